"""What a run shows: progress in a pipe and on a terminal, and what TensorBoard finds in the events."""

import glob
import json
import os
import pty
import re
import subprocess
import sys
import time
import urllib.request

import idx
import pytest
import tensorflow as tf

import train

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def records(folder):
    for path in sorted(glob.glob(f"{folder}/events*")):
        for record in tf.data.TFRecordDataset(path):
            yield tf.compat.v1.Event.FromString(record.numpy())


def curves(folder):
    result = {}
    for event in records(folder):
        for value in event.summary.value:
            if value.tag != "settings":
                result.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
    return result


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A folder of events, of a run of two epochs that was resumed after the first."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "data").mkdir()
    options = ["--parallel", "--data", idx.write_bars(folder / "data", 250), "--batch-size", "5"]
    options += ["--logdir", str(folder / "log"), "--checkpoint-dir", str(folder / "run")]
    assert train.main([*options, "--epochs", "1"]) == 0
    assert train.main([*options, "--epochs", "2"]) == 0
    return str(folder / "log")


def test_the_curves_go_on_without_gap_or_overlap(logged):
    found = curves(logged)
    assert set(found) == {"loss", "images per s", "learning rate", "test accuracy"}
    for tag in ("loss", "images per s", "learning rate"):
        assert [step for step, _ in found[tag]] == [10, 20, 30, 40, 50]
    assert [step for step, _ in found["test accuracy"]] == [25, 50]
    assert all(value == pytest.approx(1e-3) for _, value in found["learning rate"])
    assert all(0 <= value <= 1 for _, value in found["test accuracy"])


def test_the_settings_are_shown(logged):
    texts = [v.tensor.string_val[0] for e in records(logged) for v in e.summary.value if v.tag == "settings"]
    assert len(texts) == 1 and b'"global batch": 10' in texts[0]


def test_the_graph_shows_each_tower_with_its_device_the_average_and_the_update(logged):
    graphs = [tf.compat.v1.GraphDef.FromString(event.graph_def) for event in records(logged) if event.graph_def]
    devices = {}
    for node in graphs[0].node:
        devices.setdefault(node.name.split("/")[0], set()).add(node.device.split("device:")[-1])
    assert devices["tower_0"] - {""} == {"CPU:1"} and devices["tower_1"] - {""} == {"CPU:2"}
    assert "CPU:0" in devices["average"] and "update" in devices


def test_points_after_the_checkpoint_are_dropped_when_a_run_resumes(tmp_path):
    board = train.watch.board(str(tmp_path), {}, 0)
    for step in range(1, 8):
        board.scalars(step, loss=step)
    board.flush()
    path = glob.glob(f"{tmp_path}/events*")[0]
    with open(path, "ab") as file:
        file.write(b"cut short by a kill")
    train.watch.board(str(tmp_path), {}, 4).scalars(5, loss=50.0)
    assert curves(tmp_path)["loss"] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50)]


def test_a_run_of_its_own_does_not_write_among_another_s_events(tmp_path):
    train.watch.board(str(tmp_path), {}).scalars(1, loss=1.0)
    with pytest.raises(ValueError, match="holds the events of another run"):
        train.watch.board(str(tmp_path), {})


def test_tensorboard_finds_the_curves_and_the_graph(logged):
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logged, "--host", "127.0.0.1", "--port", "0"]
    board = subprocess.Popen(
        [*command, "--load_fast", "false"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        address = next(m[0] for line in board.stderr if (m := re.search(r"http://\S+:\d+/", line)))

        def ask(path):
            with urllib.request.urlopen(address + "data/" + path, timeout=20) as answer:
                return answer.read().decode()

        deadline = time.monotonic() + 30
        while not (tags := json.loads(ask("plugin/scalars/tags"))).get(".") and time.monotonic() < deadline:
            time.sleep(0.3)
        assert set(tags["."]) == {"loss", "images per s", "learning rate", "test accuracy"}
        assert len(json.loads(ask("plugin/scalars/scalars?run=.&tag=loss"))) == 5
        graph = ask("plugin/graphs/graph?run=.&conceptual=false")
        assert "tower_0/" in graph and "tower_1/" in graph and "average/" in graph and "update/" in graph
    finally:
        board.terminate()
        board.wait(20)


def test_on_a_terminal_there_is_a_bar(tmp_path):
    data = idx.write_bars(tmp_path, 40)
    main, other = pty.openpty()
    command = [sys.executable, "train.py", "--data", data, "--batch-size", "4", "--epochs", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=other, stderr=subprocess.DEVNULL)
    os.close(other)
    shown = b""
    try:
        while chunk := os.read(main, 4096):
            shown += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    assert process.wait() == 0
    assert b"10/10" in shown and b"loss:" in shown and b"images/s:" in shown and b"step 100" not in shown


def test_in_a_pipe_there_is_a_line_every_100_steps(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    show = train.watch.progress(250)
    for step in range(1, 251):
        show(step, 0.5, 1234.4)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"step {step}/250  loss 0.5000  1234 images/s" for step in (100, 200)]
