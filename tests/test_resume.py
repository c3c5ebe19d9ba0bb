"""Stop anywhere, resume exactly: by the command line, in processes that are really killed."""

import glob
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import idx
import numpy as np
import pytest
import tensorflow as tf
from conftest import THOROUGH

import train

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(capsys, *arguments):
    code = train.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def newest(folder):
    """Everything in the newest checkpoint, by name."""
    path = max(glob.glob(f"{folder}/step-*.index"), key=lambda name: int(re.search(r"step-(\d+)", name)[1]))
    reader = tf.train.load_checkpoint(path.removesuffix(".index"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in name}


def events(folder):
    """(tag, step, value) of every point, in order."""
    points = []
    for path in sorted(glob.glob(f"{folder}/events*")):
        for record in tf.data.TFRecordDataset(path):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars" or value.tag in ("loss", "test accuracy"):
                    points.append((value.tag, event.step, float(tf.make_ndarray(value.tensor))))
    return points


def assert_same_run(folder, other, bitwise=True):
    a, b = newest(folder), newest(other)
    assert a.keys() == b.keys()
    for name in a:
        if bitwise:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        else:
            np.testing.assert_allclose(a[name], b[name], rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.fixture
def stop_at(monkeypatch):
    """Makes the run receive a signal when it shows that step."""

    def at(step, number=signal.SIGTERM):
        plain = train.watch.progress

        def progress(*arguments):
            show = plain(*arguments)

            def interrupted(now, loss, rate):
                show(now, loss, rate)
                if now == step:
                    os.kill(os.getpid(), number)

            return interrupted

        monkeypatch.setattr(train.watch, "progress", progress)

    return at


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs SIGKILL")
def test_a_run_that_is_killed_at_any_moment_ends_like_one_that_is_not(tmp_path):
    """Bit for bit: weights, slots, step, and the curve of the loss, with --deterministic."""
    kills_wanted, epochs = (20, 15) if THOROUGH else (2, 3)
    data = tmp_path / "data"
    data.mkdir()
    options = [
        "--parallel",
        "--deterministic",
        "--data",
        idx.write_bars(data, 165),
        "--batch-size",
        "8",
        "--epochs",
        str(epochs),
    ]
    options += ["--checkpoint-every", "2"]

    def start(name):
        folders = ["--checkpoint-dir", str(tmp_path / name), "--logdir", str(tmp_path / name / "log")]
        return subprocess.Popen(
            [sys.executable, "train.py", *options, *folders], cwd=ROOT, text=True, stdout=subprocess.PIPE
        )

    calm = start("calm")
    dice, kills = random.Random(0), 0
    while True:
        victim = start("killed")
        lines = iter(victim.stdout.readline, "")
        if kills < kills_wanted:
            assert any(line.startswith("work on") for line in lines)
            time.sleep(dice.uniform(0.0, 1.5))  # some of them in the middle of a save
            victim.kill()
            kills += victim.wait() == -signal.SIGKILL
        else:
            assert victim.wait() == 0
            break
        if victim.returncode == 0:
            break
    assert kills == kills_wanted if THOROUGH else kills
    calm.communicate()
    assert calm.returncode == 0
    assert_same_run(tmp_path / "calm", tmp_path / "killed")
    curves = [
        [p for p in events(tmp_path / name / "log") if p[0] in ("loss", "test accuracy")] for name in ("calm", "killed")
    ]
    assert curves[0] == curves[1] and len(curves[0]) == 11 * epochs // 10 + epochs


@pytest.mark.parametrize("towers", [8, 2, 1, 0] if THOROUGH else [8, 0])
def test_a_run_begun_on_four_towers_goes_on_with_any_other_number(capsys, tmp_path, stop_at, monkeypatch, towers):
    """The same global batch, hence the same examples per step, and the same weights to rounding. 0: serial."""
    data = tmp_path / "data"
    data.mkdir()
    common = ["--data", idx.write_bars(data, 67), "--epochs", 2, "--checkpoint-dir"]  # the last step has 3 examples
    four = ["--parallel", "--towers", 4, "--batch-size", 2]
    assert run(capsys, *four, *common, tmp_path / "calm")[0] == 0
    with monkeypatch.context():
        stop_at(5)
        code, out, _ = run(capsys, *four, *common, tmp_path / "moved")
    assert code == 143 and "stopped by SIGTERM after step 5; the same command goes on from there" in out
    monkeypatch.undo()
    other = ["--parallel", "--towers", towers] if towers else []
    code, out, _ = run(capsys, *other, "--batch-size", 8 // (towers or 1), *common, tmp_path / "moved")
    assert code == 0 and out.startswith("resuming from step 5, found in ")
    assert_same_run(tmp_path / "calm", tmp_path / "moved", bitwise=False)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_step_and_says_how_to_go_on(capsys, tmp_path, stop_at, number, code):
    data = idx.write_bars(tmp_path, 40)
    before = signal.getsignal(number)
    stop_at(2, number)
    got, out, err = run(capsys, "--data", data, "--batch-size", 8)
    assert got == code and err == "" and "final loss" not in out
    assert out.splitlines()[-1] == (
        f"stopped by {signal.Signals(number).name} after step 2; "
        "nothing was saved: run it with --checkpoint-dir DIR to be able to go on"
    )
    assert signal.getsignal(number) is before


def test_a_finished_run_is_not_trained_again_and_a_longer_one_goes_on(capsys, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    options = ["--data", idx.write_bars(data, 20), "--batch-size", 8, "--checkpoint-dir", tmp_path / "run"]
    _, first, _ = run(capsys, *options, "--epochs", 1)
    state = newest(tmp_path / "run")
    code, again, _ = run(capsys, *options, "--epochs", 1)
    assert (
        code == 0 and re.findall("final loss.*|test acc.*", again) == re.findall("final loss.*|test acc.*", first)[-2:]
    )
    assert all(np.array_equal(state[name], value) for name, value in newest(tmp_path / "run").items())
    code, out, _ = run(capsys, *options, "--epochs", 2)
    assert code == 0 and "resuming from step 3" in out and len(re.findall("^epoch", out, re.M)) == 1


def test_another_run_s_checkpoint_is_refused_and_the_difference_named(capsys, tmp_path):
    for name, count in (("data", 20), ("other", 21)):
        (tmp_path / name).mkdir()
        idx.write_bars(tmp_path / name, count)
    folder = tmp_path / "run"
    base = {"--data": tmp_path / "data", "--batch-size": 8, "--epochs": 1, "--checkpoint-dir": folder}

    def flat(**changes):
        options = {**base, **{"--" + name.replace("_", "-"): value for name, value in changes.items()}}
        return [part for pair in options.items() for part in pair]

    assert run(capsys, *flat())[0] == 0
    before = newest(folder)
    for change, name in (
        ({"seed": 1}, "seed"),
        ({"learning_rate": 0.1}, "optimizer"),
        ({"batch_size": 4}, "global batch"),
        ({"data": tmp_path / "other"}, "data set"),
    ):
        code, out, err = run(capsys, *flat(**change))
        assert code == 2 and out == "" and len(err.splitlines()) == 1
        assert f"{folder} holds a run with another {name}" in err
    code, _, err = run(capsys, *flat(), "--mixed-precision")
    assert code == 2 and "holds a run with another " in err
    settings = json.loads((folder / "settings.json").read_text())
    settings["model"][0][1] = [3, 3, 1, 32]
    (folder / "settings.json").write_text(json.dumps(settings))
    assert "holds a run with another model" in run(capsys, *flat())[2]
    os.remove(folder / "settings.json")
    assert "holds checkpoints but no settings.json" in run(capsys, *flat())[2]
    assert all(np.array_equal(before[name], value) for name, value in newest(folder).items())


@pytest.mark.parametrize("damage", ["truncated data", "truncated index", "garbage", "data missing"])
def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_is_used(capsys, tmp_path, damage):
    data = tmp_path / "data"
    data.mkdir()
    options = ["--data", idx.write_bars(data, 64), "--batch-size", 8, "--checkpoint-dir", tmp_path / "run"]
    options += ["--checkpoint-every", 3, "--epochs", 1]
    assert run(capsys, *options)[0] == 0
    expected = newest(tmp_path / "run")
    path = tmp_path / "run" / ("step-8.index" if "index" in damage else "step-8.data-00000-of-00001")
    content = path.read_bytes()
    if damage == "data missing":
        path.unlink()
    else:
        path.write_bytes(os.urandom(len(content)) if damage == "garbage" else content[: len(content) // 2])
    code, out, _ = run(capsys, *options)
    assert code == 0
    assert out.startswith("checkpoint of step 8 in ") and "cannot be read" in out
    assert "resuming from step 6" in out
    for name, value in newest(tmp_path / "run").items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5)


def test_two_runs_do_not_share_a_folder(capsys, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    options = ["--data", idx.write_bars(data, 20), "--checkpoint-dir", str(tmp_path / "run"), "--epochs", "1"]
    with train.resume.open_folder(str(tmp_path / "run"), {}):
        code, _, err = run(capsys, *options)
    assert (
        code == 2 and err == f"train.py: {tmp_path}/run: another run is using it; wait for it, or name another folder\n"
    )


@pytest.mark.parametrize("option", ["--checkpoint-dir", "--logdir", "--save"])
def test_a_place_that_cannot_be_written_is_said_before_the_training(capsys, tmp_path, monkeypatch, option):
    monkeypatch.setattr(train, "do_training", lambda *_, **__: pytest.fail("trained before"))
    (tmp_path / "file").write_text("")
    data = tmp_path / "data"
    data.mkdir()
    code, out, err = run(capsys, "--data", idx.write_bars(data, 20), option, tmp_path / "file" / "x.keras")
    assert code == 2 and out == ""
    assert "cannot be written there" in err and str(tmp_path / "file") in err and len(err.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_loses_nothing_that_was_saved(capsys, tmp_path):
    data, disk = tmp_path / "data", tmp_path / "disk"
    data.mkdir(), disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", str(disk)]).returncode:
        pytest.skip("cannot mount")
    try:
        options = ["--data", idx.write_bars(data, 40), "--batch-size", 8, "--checkpoint-dir", disk / "run"]
        options += ["--checkpoint-every", 2, "--epochs", 1]
        code, out, err = run(capsys, *options)
        assert code == 1 and "final loss" in out  # the training itself went on
        assert re.search(
            r"checkpoint of step 4 could not be written to .*; training goes on, the last good one .* step 2", out
        )
        assert re.search(r"the end of the run is not saved in .*: make room, run the same command", err)
        assert [os.path.basename(path) for path in glob.glob(f"{disk}/run/step-*.index")] == ["step-2.index"]
        assert not glob.glob(f"{disk}/run/step-4*")
        subprocess.run(["mount", "-o", "remount,size=400m", str(disk)], check=True)
        code, out, _ = run(capsys, *options)
        assert code == 0 and "resuming from step 2" in out
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_saved_model_needs_nothing_of_this_project(capsys, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    path = tmp_path / "model.keras"
    options = ["--data", idx.write_bars(data, 400, test_count=100), "--batch-size", 8, "--epochs", 1, "--save", path]
    code, out, _ = run(capsys, "--parallel", *options)
    assert code == 0
    images, labels = idx.bars(100, seed=1)
    np.savez(tmp_path / "test.npz", images=(images / 255).astype(np.float32), labels=labels)
    code = (
        "import keras, numpy as np\n"
        "data = np.load('test.npz')\n"
        "model = keras.models.load_model('model.keras')\n"
        "print(100 * np.mean(model.predict(data['images'], verbose=0).argmax(1) == data['labels']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert float(done.stdout) == pytest.approx(float(re.search(r"test accuracy: (\S+) %", out)[1]), abs=0.01)
    assert run(capsys, "--save", "model.h5")[0] == 2
