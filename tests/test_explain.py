"""The explanation of a step: complete, consistent, harmless, and right in cases made to have one bottleneck."""

import itertools
import time

import idx
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES

import train
from explain import explain


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
    lines = []
    result = explain(*case(16, 4), DEVICES[:towers], ["/CPU:0"], lines.append)
    assert all(seconds >= 0 for part, seconds in result["parts"].items() if "runtime" not in part)
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


@pytest.mark.parametrize(
    "width, batch, pause, bottleneck",
    [
        (16, 4, 0.02, "is the input"),
        (2000, 1, 0.0, "is averaging and updating on the controller"),
        (4, 1, 0.0, "is the overhead of the runtime"),
        (512, 2048, 0.0, "is the arithmetic of the model: the towers share"),
    ],
)
def test_the_verdict_names_the_bottleneck(width, batch, pause, bottleneck):
    result = explain(*case(width, batch, pause), DEVICES[:2], ["/CPU:0"], lambda line: None)
    assert bottleneck in result["verdict"], result


def test_an_explained_run_trains_as_if_nothing_had_been(capsys, tmp_path):
    arguments = ["--parallel", "--epochs", "1", "--batch-size", "8", "--data", idx.write_bars(tmp_path, 48)]
    assert train.main(arguments) == 0
    plain = capsys.readouterr().out
    assert train.main([*arguments, "--explain"]) == 0
    explained = capsys.readouterr().out
    assert "a step of 2 towers takes" in explained and "The bottleneck is" in explained
    assert plain.split("final loss")[1].split("\n")[0] == explained.split("final loss")[1].split("\n")[0]
