"""Towers on other machines: real processes on loopback, and where it can be done, hosts in network namespaces."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import idx
import keras
import numpy as np
import pytest
from conftest import THOROUGH

import train
import workers

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = ["--batch-size", "8", "--epochs", "12"]  # 11 steps an epoch, of two towers, with 165 images


def run(capsys, *arguments):
    code = train.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def losses(out):
    return [float(loss) for loss in re.findall(r"loss:? (\d+\.\d+)", out)]


def free_port():
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def all_ended():
    """`start(*command)`; whatever happens meanwhile, none of them is left."""
    started = []

    def start(*command, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, **options}
        options["env"] = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.communicate()


@pytest.fixture
def processes():
    with all_ended() as start:
        yield start


@pytest.fixture(scope="module")
def serve():
    """`serve(count)` -> {address: process} of so many workers that are ready; those of earlier tests, if they live."""
    serving = {}

    def ready(count):
        for address in [address for address, process in serving.items() if process.poll() is not None]:
            del serving[address]
        new = []
        while len(serving) < count:
            port = free_port()
            new.append(start(sys.executable, "train.py", "--serve", str(port), "--trusted-network"))
            serving[f"127.0.0.1:{port}"] = new[-1]
        for process in new:
            assert process.stdout.readline().startswith("serving on port")
        return dict(list(serving.items())[:count])

    with all_ended() as start:
        yield ready


@pytest.fixture
def drive(processes):
    """`drive(*options)` starts a run that asks its workers more often than usual: the tests need not wait as long."""

    def start(*options, patience=2):
        program = (
            f"import sys, train, workers; workers.PATIENCE, workers.EVERY = {patience}, 0.5\nsys.exit(train.main())"
        )
        return processes(sys.executable, "-c", program, "--parallel", *map(str, options))

    return start


def wait_for(process, beginning):
    for line in iter(process.stdout.readline, ""):
        if line.startswith(beginning):
            return line
    raise AssertionError(f"{beginning!r} never came: {process.stderr.read()}")


@pytest.mark.parametrize(
    "count, controllers",
    [(2, 0)] + [(1, 0), (4, 0), (2, 1), (3, 2)] * THOROUGH,
)
def test_workers_train_like_towers_of_this_machine(serve, drive, capsys, tmp_path, count, controllers):
    """The same examples and the same result, to rounding; variables here, or on machines that only hold them."""
    options = [*SMALL, "--data", idx.write_bars(tmp_path, 165), "--epochs", "3"]
    machines = list(serve(count + controllers))
    there = ["--workers", ",".join(machines[:count]), "--save", tmp_path / "there.keras"]
    if controllers:
        there += ["--controller", ",".join(machines[count:]), "--checkpoint-dir", tmp_path / "run"]
    there += ["--logdir", tmp_path / "log"]
    remote = drive(*options, *there)
    out, err = remote.communicate(timeout=120)
    assert (remote.returncode, err) == (0, "")
    code, local, _ = run(capsys, "--parallel", "--towers", count, *options, "--save", tmp_path / "here.keras")
    assert code == 0
    assert "work on: " + ", ".join(f"worker {i} CPU:0" for i in range(count)) in out
    holders = ", ".join(f"ps {i} CPU:0" for i in range(controllers)) or "CPU:0"
    assert f"variables on: {holders}\n" in out
    np.testing.assert_allclose(losses(out), losses(local), atol=2e-3)
    nets = [keras.models.load_model(tmp_path / name, compile=False) for name in ("there.keras", "here.keras")]
    for a, b in zip(nets[0].get_weights(), nets[1].get_weights()):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=5e-4)


@pytest.mark.parametrize("victim", range(2) if THOROUGH else [1])
def test_a_dead_driver_and_a_dead_worker_cost_nothing_but_time(serve, drive, capsys, tmp_path, victim):
    """Kill the driver: the workers are free for the next run. Kill a worker: it is named; the others go on exactly."""
    options = [*SMALL, "--data", idx.write_bars(tmp_path, 165)]
    kept = ["--checkpoint-dir", tmp_path / "run", "--checkpoint-every", "5"]
    machines = serve(2)
    everywhere = ["--workers", ",".join(machines)]

    first = drive(*options, *kept, *everywhere)
    wait_for(first, "epoch 3/")
    first.kill()

    second = drive(*options, *kept, *everywhere)
    wait_for(second, "resuming from step")
    wait_for(second, "epoch 6/")
    address = list(machines)[victim]
    machines[address].kill()
    started = time.monotonic()
    _, err = second.communicate(timeout=60)
    assert time.monotonic() - started < 10
    assert second.returncode == 1
    assert re.fullmatch(rf"train.py: lost {address}: it .*; the same command without it goes on .*\n", err)

    third = drive(*options, *kept, "--workers", list(machines)[1 - victim])
    out, err = third.communicate(timeout=120)
    assert (third.returncode, err) == (0, "")
    step = int(re.match(r"resuming from step (\d+),", out)[1])
    assert step >= 11 * 5
    code, calm, _ = run(capsys, "--parallel", *options)
    assert code == 0
    np.testing.assert_allclose(losses(out)[-1], losses(calm)[-1], atol=2e-3)


def test_a_worker_that_hangs_is_named_in_bounded_time(serve, drive, tmp_path):
    machines = serve(2)
    driver = drive(*SMALL, "--data", idx.write_bars(tmp_path, 165), "--workers", ",".join(machines))
    wait_for(driver, "epoch 1/")
    address, hung = list(machines.items())[0]
    hung.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    _, err = driver.communicate(timeout=60)
    assert time.monotonic() - started < 10
    assert driver.returncode == 1
    assert re.fullmatch(rf"train.py: lost {address}: it does not answer within 2 s; .*\n", err)
    hung.send_signal(signal.SIGCONT)


def test_who_is_no_worker_is_told_apart(monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.5)
    assert re.fullmatch(r"cannot be reached \(connection refused\)", workers.ask(f"127.0.0.1:{free_port()}"))
    for says, fault in ((None, "does not answer within 0.5 s"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no worker")):
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
            thread = threading.Thread(target=answer_once, args=(server, says))
            thread.start()
            assert workers.ask(f"127.0.0.1:{server.getsockname()[1]}").startswith(fault)
            thread.join()


def answer_once(server, says):
    with contextlib.closing(server.accept()[0]) as line:
        while line.recv(100):
            if says:
                line.sendall(says)
                break


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["--serve", "7000"], 2, "asks for no password; give --trusted-network if that is only machines you trust"),
        (["--serve", "7000", "--trusted-network", "--parallel"], 2, "does not train: leave out --parallel"),
        (["--workers", "a:1"], 2, "--workers needs --parallel"),
        (["--parallel", "--controller", "10.0.0.1:7000"], 2, "--controller 10.0.0.1:7000 needs --workers"),
        (["--parallel", "--address", "10.0.0.1"], 2, "--address needs --workers"),
        (["--parallel", "--workers", "somewhere"], 2, "'somewhere' is not an address: write HOST:PORT"),
        (["--parallel", "--workers", "a:1,b:2,a:1"], 2, "a:1 is named twice"),
        (
            ["--parallel", "--workers", "127.0.0.1:1"],
            1,
            "127.0.0.1:1 cannot be reached .*: look at the name, start it with `python train",
        ),
        (["--parallel", "--workers", "127.0.0.1:1, nobody.invalid:1"], 1, "127.0.0.1:1 cannot be reached"),
        (["--parallel", "--workers", "nobody.invalid:1"], 1, "nobody.invalid:1 cannot be reached .*: look at the name"),
        (
            ["--parallel", "--workers", ""],
            2,
            "--workers: a name is missing in '': write one, or several",
        ),
        (["--parallel", "--workers", "a:1,"], 2, "--workers: a name is missing in 'a:1,'"),
        (["--serve", "99999", "--trusted-network"], 2, "--serve: 99999 is more than 65535"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(capsys, arguments, code, message):
    got, _, err = run(capsys, *arguments)
    assert got == code and re.search(f"train.py: .*{message}", err.splitlines()[-1])


def test_a_port_that_is_taken_is_named(capsys):
    with contextlib.closing(socket.create_server(("", 0))) as taken:
        port = taken.getsockname()[1]
        code, _, err = run(capsys, "--serve", port, "--trusted-network")
    assert code == 2 and err == f"train.py: port {port} cannot be had: address already in use; name another\n"


def test_the_driver_s_own_port_that_is_taken_is_named_and_so_is_one_that_is_none(monkeypatch):
    monkeypatch.setattr(workers, "ask", lambda address: None)
    with contextlib.closing(socket.create_server(("", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"^port {port} cannot be had: address already in use; name another"):
            workers.connect(["127.0.0.1:1"], [], f"127.0.0.1:{port}")
    with pytest.raises(ValueError, match="^'127.0.0.1:99999' is not an address"):
        workers.connect(["127.0.0.1:1"], [], "127.0.0.1:99999")


def test_a_machine_under_two_names_is_one_machine(monkeypatch):
    monkeypatch.setattr(workers, "ask", lambda address: None)
    with pytest.raises(ValueError, match="^127.0.0.1:1 and localhost:1 are one machine: name each machine once"):
        workers.connect(["127.0.0.1:1", "127.0.0.1:2", "localhost:1"], [])


def test_a_worker_ends_when_it_is_told_to(serve):
    (process,) = serve(1).values()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "stopped serving\n", "")


def listening():
    """The listening TCP sockets of this process."""
    own = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    found = []
    for path in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(path) as file:
            fields = [line.split() for line in file][1:]
        found += [line[1] for line in fields if line[3] == "0A" and f"socket:[{line[9]}]" in own]
    return found


def test_nothing_listens_unless_it_was_asked_for(capsys, tmp_path):
    assert run(capsys, "--parallel", "--epochs", "1", "--data", idx.write_bars(tmp_path, 20))[0] == 0
    assert listening() == []
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))):
        assert len(listening()) == 1


NAMESPACES = THOROUGH and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")


@pytest.mark.skipif(not NAMESPACES, reason="thorough profile, as root, with ip and tc")
def test_hosts_with_a_slow_line_that_is_cut(processes, tmp_path):
    """A driver and two workers in network namespaces on a bridge, 10 ms there and back."""
    options = [*SMALL, "--data", idx.write_bars(tmp_path, 165), "--checkpoint-dir", str(tmp_path / "run")]
    options += ["--checkpoint-every", "5"]
    names = [f"tower{os.getpid()}{letter}" for letter in "dab"]

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def inside(name, *command):
        return processes("ip", "netns", "exec", name, *command)

    try:
        ip("link", "add", "towerbridge", "type", "bridge")
        ip("link", "set", "towerbridge", "up")
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"tw{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"tw{number}", "master", "towerbridge", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            # (a kernel without netem has no delay to offer; the line is cut all the same)
            subprocess.run(["ip", "netns", "exec", name, *"tc qdisc add dev eth0 root netem delay 5ms".split()])
        for name in names[1:]:
            worker = inside(name, sys.executable, "train.py", "--serve", "7000", "--trusted-network")
            assert worker.stdout.readline().startswith("serving")
        machines = ["10.77.0.2:7000", "10.77.0.3:7000"]
        command = [sys.executable, "train.py", "--parallel", *options]
        driver = inside(names[0], *command, "--workers", ",".join(machines))
        wait_for(driver, "epoch 5/")
        ip("link", "set", "tw2", "down")
        started = time.monotonic()
        _, err = driver.communicate(timeout=60)
        assert time.monotonic() - started < workers.PATIENCE + workers.EVERY + 5
        assert driver.returncode == 1 and re.fullmatch(r"train.py: lost 10.77.0.3:7000: it .*\n", err)
        rest = inside(names[0], *command, "--workers", machines[0])
        out, err = rest.communicate(timeout=120)
        assert (rest.returncode, err) == (0, "")
        assert int(re.match(r"resuming from step (\d+),", out)[1]) >= 55
    finally:
        for number, name in enumerate(names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            subprocess.run(["ip", "link", "del", f"tw{number}"], capture_output=True)
        subprocess.run(["ip", "link", "del", "towerbridge"], capture_output=True)
