"""The command line, used as a user does: `main(argv)` in this process, and `python train.py` in one of its own."""

import os
import re
import subprocess
import sys

import idx
import numpy as np
import pytest
import tensorflow as tf
from conftest import THOROUGH

import train

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(capsys, *arguments):
    """Exit code, stdout and stderr of `main`."""
    code = train.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def losses(out):
    return [float(loss) for loss in re.findall(r"loss:? (\d+\.\d+)", out)]


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "train.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, **options
    )


def test_the_main_job_learns_mnist(main_job):
    """`python train.py --parallel`: two epochs of the real data on towers, at least 98.5 % right, nothing on stderr."""
    out, err = main_job.communicate(timeout=300)
    assert (main_job.returncode, err) == (0, "")
    assert re.search(r"^variables on: CPU:0$", out, re.M) and re.search(r"^work on: CPU:1, CPU:2$", out, re.M)
    assert re.findall(r"^step (\d+)/470  loss \d", out, re.M) == ["100", "200", "300", "400"]
    last = re.search(r"\nfinal loss: \d+\.\d{4}\nimages/s: \d+\ntest accuracy: (\d+\.\d\d) %\n$", out)
    assert last and float(last[1]) >= 98.5


# 41: one example is left for the last step; 3: fewer than towers
@pytest.mark.parametrize("count", [48, 41, 37, 3] if THOROUGH else [41, 3])
def test_towers_that_share_the_global_batch_train_like_one_device(capsys, tmp_path, count):
    """Serial training, and 1, 2, 4 towers: the same examples per step, hence the same losses, to rounding."""
    data = idx.write_bars(tmp_path, count)
    options = ("--data", data, "--epochs", 3)
    code, serial, _ = run(capsys, *options, "--batch-size", 8)
    assert code == 0
    for towers in (1, 2, 4):
        code, out, _ = run(capsys, *options, "--parallel", "--towers", towers, "--batch-size", 8 // towers)
        assert code == 0
        np.testing.assert_allclose(losses(out), losses(serial), atol=2e-3)


def test_the_seed_decides_everything(capsys, tmp_path):
    data = idx.write_bars(tmp_path, 40)
    runs = [run(capsys, "--data", data, "--epochs", 1, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert losses(runs[0]) == losses(runs[1]) != losses(runs[2])


def test_variables_may_be_spread_over_controllers(capsys, tmp_path):
    code, out, _ = run(
        capsys, "--parallel", "--data", idx.write_bars(tmp_path, 20), "--controller", "/CPU:0,/CPU:3", "--epochs", 1
    )
    assert code == 0 and "variables on: CPU:0, CPU:3" in out


@pytest.mark.parametrize(
    "arguments, culprit",
    [
        (["--towers", "2"], "--towers needs --parallel"),
        (["--controller", "/CPU:1"], "--controller needs --parallel"),
        (["--parallel", "--towers", "0"], "--towers: invalid positive int value: '0'"),
        (["--parallel", "--towers", "two"], "--towers: invalid positive int value: 'two'"),
        (["--epochs", "-1"], "--epochs: invalid positive int value: '-1'"),
        (["--batch-size", "1.5"], "--batch-size: invalid positive int value: '1.5'"),
        (["--learning-rate", "nan"], "--learning-rate: invalid positive float value: 'nan'"),
        (["--learning-rate", "inf"], "--learning-rate: inf is more than 2147483647"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--parallel", "--controller", "/GPU:7"], "there is no device /GPU:7"),
        (["--parallel", "--towers", "200"], "200 CPU towers asked for and there are 8"),
        (["--parallel", "--towers", "900"], "--towers: 900 is more than 256"),
        (["--batch-size", "3000000000"], "--batch-size: 3000000000 is more than 2147483647"),
        (["--seed", "-1"], "--seed: invalid seed value: '-1'"),
        (["--seed", "3000000000"], "--seed: 3000000000 is more than 2147483647"),
        (["--checkpoint-dir", ""], "--checkpoint-dir: it is empty, like a variable of the shell that is not set"),
        (["--parallel", "--controller", "/CPU:0,"], "--controller: a name is missing in '/CPU:0,': write one, or"),
        (["--data", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_bad_usage_and_bad_input_exit_with_2_and_one_line(capsys, arguments, culprit):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == ""
    assert err.startswith("train.py: ") and culprit in err and len(err.splitlines()) == 1


def test_ctrl_c_before_the_first_step_is_no_traceback(capsys, monkeypatch):
    def press(data):
        raise KeyboardInterrupt

    monkeypatch.setattr(train.mnist, "count_examples", press)
    assert run(capsys, "--parallel") == (130, "", "train.py: stopped by SIGINT before the first step\n")


def test_ctrl_c_in_the_middle_of_the_imports_is_no_traceback():
    code = """
import builtins, os, signal

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
load = builtins.__import__


def interrupted(name, *rest, **options):
    return os.kill(os.getpid(), signal.SIGINT) if name == "keras" else load(name, *rest, **options)


builtins.__import__ = interrupted
import train
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("split", ["train", "t10k"])
def test_nothing_is_trained_on_data_that_failed_a_check(capsys, tmp_path, split, monkeypatch):
    data = idx.write_bars(tmp_path, 20)
    monkeypatch.setattr(train, "do_training", lambda *_, **__: pytest.fail("trained on bad data"))
    path = os.path.join(data, f"{split}-images-idx3-ubyte.gz")
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(content[: len(content) // 2])
    code, out, err = run(capsys, "--data", data)
    assert code == 2 and out == "" and path in err and len(err.splitlines()) == 1


def test_a_run_that_diverges_fails_with_1(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(train.mnist, "training_model", lambda core: lambda input_fn: float("inf") * core.weights[1][0])
    code, out, err = run(capsys, "--data", idx.write_bars(tmp_path, 20), "--epochs", 1)
    assert code == 1 and "final loss" not in out
    assert err == "train.py: the loss is nan after step 1: try a smaller learning rate\n"


def test_a_step_that_fails_ends_the_run_with_1(capsys, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise tf.errors.ResourceExhaustedError(None, None, "tower 1 (/CPU:2) failed: out of memory")

    monkeypatch.setattr(train, "do_training", refuse)
    code, _, err = run(capsys, "--data", idx.write_bars(tmp_path, 20))
    assert code == 1 and err == "train.py: tower 1 (/CPU:2) failed: out of memory\n"


def test_do_training_ends_with_the_data_and_returns_the_last_loss():
    def steps(values):
        values = iter(values)
        return lambda: tf.constant(next(values))

    loss, rate = train.do_training(steps([3.0, 2.0, 1.0]))
    assert loss == 1.0 and rate > 0
    with pytest.raises(ValueError, match="no data"):
        train.do_training(steps([]))


def test_the_placement_log_is_shown_when_asked_for(tmp_path):
    data = idx.write_bars(tmp_path, 16)
    done = command("--parallel", "--epochs", "1", "--data", data, "--log-device-placement")
    assert done.returncode == 0 and re.search(r"tower_1/.*conv2d_1.*CPU:2", done.stderr)
