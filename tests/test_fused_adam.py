"""The fused Adam is Keras's Adam, and a quiet start shows what it held back when it fails."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_adam import FusedAdam

OPTIONS = {
    "plain": {},
    "other constants": {"learning_rate": 0.1, "beta_1": 0.5, "beta_2": 0.9, "epsilon": 0.1},
    "schedule": {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)},
    "amsgrad": {"amsgrad": True},
    "clipnorm": {"clipnorm": 0.1},
    "weight decay": {"weight_decay": 0.1},
    "moving average": {"use_ema": True, "ema_overwrite_frequency": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sparse", [False, True])
@given(seed=st.integers(0, 2**31))
@settings(max_examples=3)
def test_the_fused_adam_is_keras_s_adam(options, sparse, seed):
    rng = np.random.default_rng(seed)
    start, gradients = rng.normal(size=(5, 3)), rng.normal(size=(4, 5, 3))
    rows = rng.integers(0, 5, (4, 2))
    results = []
    for kind in (FusedAdam, keras.optimizers.Adam):
        variable, optimizer = keras.Variable(start, dtype="float64"), kind(**OPTIONS[options])
        for gradient, row in zip(gradients, rows):
            gradient = tf.IndexedSlices(tf.constant(gradient[:2]), tf.constant(row), (5, 3)) if sparse else gradient
            optimizer.apply_gradients([(gradient if sparse else tf.constant(gradient), variable)])
        results.append([variable.numpy(), *(np.array(slot) for slot in optimizer.variables)])
    for fused, plain in zip(*results, strict=True):
        np.testing.assert_allclose(fused, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes_are_kept(dtype):
    results = []
    for kind in (FusedAdam, keras.optimizers.Adam):
        variable, optimizer = keras.Variable(np.ones(4), dtype=dtype), kind(0.1)
        for _ in range(3):
            optimizer.apply_gradients([(tf.cast([1.0, -2.0, 0.5, 0.25], dtype), variable)])
        assert variable.dtype == dtype
        results.append(np.array(tf.cast(variable.value, tf.float64)))
    np.testing.assert_allclose(*results, rtol=3e-2 if "16" in dtype else 1e-5)


def test_it_is_saved_and_loaded_like_any_keras_optimizer():
    config = keras.optimizers.serialize(FusedAdam(0.25, beta_1=0.5))
    loaded = keras.optimizers.deserialize(config)
    assert type(loaded) is FusedAdam and float(loaded.learning_rate) == 0.25 and loaded.beta_1 == 0.5


@pytest.mark.parametrize("fails, shown", [(False, "after\n"), (True, "held back\n")])
def test_a_quiet_start_shows_what_it_held_back_only_if_it_fails(fails, shown):
    code = (
        "import os\nfrom quiet import quiet_start\n"
        f"with quiet_start():\n    os.write(2, b'held back\\n')\n    {'raise SystemExit(3)' if fails else 'pass'}\n"
        "os.write(2, b'after\\n')"
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stderr == shown and done.returncode == (3 if fails else 0)
