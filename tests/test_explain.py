"""The explanation of a step: complete, consistent, harmless, and right in cases made to have one bottleneck."""

import contextlib
import itertools
import random
import time

import idx
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES, THOROUGH
from hypothesis import given
from hypothesis import strategies as st

import train
from explain import PER_TOWER, _fit, _verdict, explain


def case(width, batch, pause=0.0):
    """What `explain` takes, for a dense layer of width x width on batches of that size, fed with pauses."""

    def build():
        keras.utils.set_random_seed(0)
        layer, optimizer = keras.layers.Dense(width), keras.optimizers.Adam()
        layer.build((None, width))
        return lambda input_fn: tf.reduce_mean(layer(input_fn()) ** 2), layer.trainable_variables, optimizer

    def feed(towers):
        for _ in itertools.count():
            time.sleep(pause)
            yield np.ones((batch, width), np.float32)

    return build, feed


@pytest.mark.parametrize("towers", [1, 2])
def test_the_parts_of_a_step_are_its_whole(towers):
    """tensorflow#35095, #32172, #41213: two devices slower than one, and nobody can say why."""
    lines = []
    result = explain(*case(16, 4), DEVICES[:towers], ["/CPU:0"], lines.append)
    assert all(seconds >= 0 for seconds in result["parts"].values()) and result["step"] > 0 and result["tower"] >= 0
    assert sum(result["parts"].values()) == pytest.approx(result["step"])
    assert result["bytes"] == {
        "weights out": towers * 4 * (16 * 16 + 16),
        "gradients back": towers * 4 * (16 * 16 + 16),
        "input": towers * 4 * 16 * 4,
    }
    assert result["expected"][1] == 1.0 and set(result["expected"]) == {1, 2, 4, 8}
    assert result["expected"][towers] == pytest.approx(result["reached"])
    text = "\n".join(lines)
    for word in [*result["parts"], *result["bytes"], "reached", "expected", result["verdict"]]:
        assert word in text


@given(st.lists(st.floats(0, 2), min_size=1), st.floats(0.1, 10), st.floats(0, 20))
def test_parts_are_never_negative_nor_more_than_the_step(measured, step, compute):
    parts = _fit(dict(enumerate(measured)), step, compute)
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(step)


def embedding(rows, width, batch):
    """What `explain` takes, for a table of which each step looks up a few rows: nearly no arithmetic."""

    def build():
        keras.utils.set_random_seed(0)
        table, optimizer = keras.layers.Embedding(rows, width), keras.optimizers.Adam()
        table.build()
        return lambda input_fn: tf.reduce_mean(table(input_fn()) ** 2), table.trainable_variables, optimizer

    return build, lambda towers: itertools.repeat(np.arange(batch, dtype=np.int32))


@pytest.mark.skipif(not THOROUGH, reason="measures, which a busy machine disturbs")
@pytest.mark.parametrize(
    "case, bottleneck",
    [
        (case(16, 4, 0.02), "is the input"),
        (case(2000, 1), "is averaging and updating on the controller"),
        (embedding(100_000, 32, 4), "is averaging and updating on the controller"),
        (case(4, 1), "is the overhead of the runtime, the model is too small for its towers: a larger batch"),
        (case(512, 2048), "is the arithmetic of the model: the towers share"),
    ],
    ids=["slow input", "large layer", "large table", "small model", "large batch"],
)
def test_the_verdict_names_the_bottleneck(case, bottleneck):
    result = explain(*case, DEVICES[:2], ["/CPU:0"], lambda line: None)
    assert bottleneck in result["verdict"], result


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    "part, overhead, words",
    [
        ("waiting for input", 0.1, "is the input: a faster pipeline would help"),
        ("copying weights out", 0.1, "is copying between controller and towers: a larger batch per tower"),
        ("copying gradients back", 0.1, "or a controller nearer to the towers"),
        ("averaging", 0.1, "or several controllers"),
        ("update", 0.1, "is averaging and updating"),
        ("the runtime, and waiting for each other", 0.1, "is the overhead of the runtime"),
        ("update", 0.9, "is the overhead of the runtime"),
        ("waiting for input", 0.9, "is the input"),
    ],
)
def test_the_largest_part_is_the_bottleneck(gpu, part, overhead, words):
    parts = dict.fromkeys(
        [*PER_TOWER, "update", "forward and backward", "the runtime, and waiting for each other"], 0.05
    )
    parts[part] += 1.0 - sum(parts.values())
    verdict = _verdict(parts, 1.0, overhead, ["/GPU:0", "/GPU:1"] if gpu else ["/CPU:1", "/CPU:2"], 0 if gpu else 2)
    assert words in verdict
    assert ("PCIe" in verdict) == gpu


def test_sparse_gradients_travel_as_rows():
    rows, width, batch = 1000, 8, 4
    moved = explain(*embedding(rows, width, batch), DEVICES[:2], ["/CPU:0"], lambda line: None)["bytes"]
    assert moved["weights out"] == 2 * 4 * rows * width
    assert moved["gradients back"] < 2 * 4 * rows * width / 50  # a row per example, its index, the table's shape


def test_training_starts_from_the_same_bits_after_an_explanation(capsys, tmp_path):
    arguments = ["--parallel", "--batch-size", "8", "--data", idx.write_bars(tmp_path, 48)]

    def start(*more):
        with contextlib.ExitStack() as opened:
            job = train.prepare(train.parse_arguments([*arguments, *more]), opened)
            held = [variable.numpy().tobytes() for variable in [*job.core.weights, *job.optimizer.variables]]
            drawn = tf.random.uniform([4]).numpy().tobytes(), np.random.rand(), random.random()
            return held, drawn, [image.numpy().tobytes() for image, _ in job.training_data]

    plain, out = start(), capsys.readouterr()
    assert "a step of" not in out.out
    assert start("--explain") == plain
    out = capsys.readouterr()
    assert "a step of 2 towers takes" in out.out and "The bottleneck is" in out.out
    assert "AutoGraph" not in out.out + out.err


def test_mixed_precision_computes_in_bfloat16_and_keeps_floats(capsys, tmp_path):
    arguments = ["--parallel", "--mixed-precision", "--data", idx.write_bars(tmp_path, 48)]
    try:
        with contextlib.ExitStack() as opened:
            core = train.prepare(train.parse_arguments(arguments), opened).core
        assert {weight.dtype for weight in core.weights} == {"float32"}
        assert {layer.compute_dtype for layer in core.layers if layer.weights} == {"bfloat16", "float32"}
        assert core(tf.zeros([1, 28, 28])).dtype == tf.float32
    finally:
        keras.config.set_dtype_policy("float32")
