"""Workers: towers on other machines.

`train.py --serve PORT` lends the devices of a machine, `train.py --workers HOST:PORT,...` puts towers on them. The step
is that of `towers.py`, with the names of remote devices; this file connects, and notices when a worker is lost.
"""

import contextlib
import os
import socket
import sys
import threading
import time

import tensorflow as tf

import resume

HERE = "/job:localhost/replica:0/task:0"  # this machine, in the names of devices
PATIENCE, EVERY = 10, 5  # seconds: how long a worker may take to answer, and how long after an answer it is asked again


class Lost(ValueError):
    """A worker does not answer; the message names it, and says what to do."""


def serve(port, towers=None):
    """Lends this machine's devices to whoever asks, until SIGINT or SIGTERM.

    TensorFlow's server listens on all interfaces, asks for no password and runs whatever it is sent, file operations
    included. A run whose driver is gone leaves nothing that hinders the next one.

    Args:
      port: The TCP port.
      towers: Number of towers, if they run on the CPU: they share its cores. None means one. GPUs are lent all.

    Raises:
      ValueError: if the port cannot be had.
    """
    _check_free(port)
    count, cores = towers or 1, os.cpu_count() or 1
    config = tf.compat.v1.ConfigProto(
        device_count={"CPU": count},
        intra_op_parallelism_threads=max(1, cores // count),
        inter_op_parallelism_threads=max(count, cores),
    )
    config.gpu_options.allow_growth = True
    # The driver tells each worker which task of which job it is; here it stands for itself.
    cluster = tf.train.ClusterSpec({"worker": [f"localhost:{port}"]})
    with resume.stop_signals() as check_stop:
        server = tf.distribute.Server(cluster, job_name="worker", task_index=0, config=config)
        print(f"serving on port {port}, on all interfaces, until Ctrl-C", flush=True)
        with contextlib.suppress(resume.Stopped):
            while True:
                check_stop()
                time.sleep(0.5)
        print("stopped serving", flush=True)
        del server


def connect(workers, controllers, address=None):
    """Makes the devices of other machines available to this process.

    TensorFlow's runtime then listens on a port of this machine as well, on all interfaces, because a worker asks the
    controller for the weights. That ends with the process.

    Args:
      workers: Addresses of workers, "HOST:PORT".
      controllers: What holds the variables: devices of this machine, or addresses of machines that serve; a worker may
        be one of them.
      address: "HOST" or "HOST:PORT" under which the workers reach this machine. None: that of the route to the first
        worker, with a free port.

    Returns:
      (devices, controllers): the names of the workers' devices, GPUs or else CPUs, in the order of the workers, and of
      the devices that hold the variables.

    Raises:
      ValueError: if an address is malformed, or given twice.
      Lost: if a machine does not answer, or cannot reach this one.
    """
    servers = [controller for controller in controllers if is_address(controller)]
    tasks, cluster = {}, {}  # address -> the beginning of its devices' names; job -> addresses
    for job, addresses in (("worker", workers), ("ps", servers)):
        for each in addresses:
            _split(each)
            if addresses.count(each) > 1:
                raise ValueError(f"{each} is named twice: name each machine once")
            if each not in tasks:
                cluster.setdefault(job, []).append(each)
                tasks[each] = f"/job:{job}/replica:0/task:{len(cluster[job]) - 1}/"
    places = {}
    for each in tasks:
        with contextlib.suppress(OSError):  # a name that nobody knows is told below
            for place in {found[-1] for found in socket.getaddrinfo(*_split(each), type=socket.SOCK_STREAM)}:
                if places.setdefault(place, each) != each:
                    raise ValueError(f"{places[place]} and {each} are one machine: name each machine once")
        fault = ask(each)
        if fault:
            raise Lost(
                f"{each} {fault}: look at the name, start it with `python train.py --serve PORT --trusted-network`, "
                "or leave it out"
            )
    cluster["localhost"] = [_own_address(address, workers[0])]
    apart = None
    if not servers:  # workers need not know of each other
        apart = tf.config.experimental.ClusterDeviceFilters()
        for task in range(len(workers)):
            apart.set_device_filters("worker", task, ["/job:localhost"])
    try:
        tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(cluster), cluster_device_filters=apart)
        there = [device.name for device in tf.config.list_logical_devices()]
    except tf.errors.OpError as error:
        if "already exists" in error.message:
            raise ValueError(f"{', '.join(tasks)}: two of these are one machine; name each machine once") from error
        # It speaks HTTP/2, but not of towers.
        culprit = [each for each in tasks if tasks[each].rstrip("/") in error.message] or list(tasks)
        raise Lost(f"{', '.join(culprit)} is no worker: {error.message.splitlines()[0]}") from error
    devices = []
    for each in tasks:
        own = [name for name in there if name.startswith(tasks[each])]
        if each in workers:
            devices += [name for name in own if "GPU:" in name] or [name for name in own if "CPU:" in name]
        _check_way_back(each, own[0], cluster["localhost"][0])
    here = tf.DeviceSpec.from_string(HERE)
    return devices, [
        tasks[each] + "device:CPU:0"
        if each in servers
        else here.make_merged_spec(tf.DeviceSpec.from_string(each)).to_string()
        for each in controllers
    ]


def watch(addresses):
    """From now on a machine that stops answering ends this process with code 1, within PATIENCE + EVERY seconds.

    It has to be the process: a step that waits for a machine that is silent waits for ever, and Python cannot
    interrupt it. Checkpoints are written whole or not at all, so that the last one is good.

    Returns:
      `stop()`, which ends the watch.
    """
    done = threading.Event()

    def look(address):
        while not done.wait(EVERY):
            fault = ask(address)
            if fault and not done.is_set():
                end(address, fault)

    for address in addresses:
        threading.Thread(target=look, args=(address,), daemon=True).start()
    return done.set


def blame(addresses):
    """After an error: ends the process if a machine is to blame. TensorFlow tells at once, but in other words."""
    for address in addresses:
        fault = ask(address)
        if fault:
            end(address, fault)


_ending = threading.Lock()


def end(address, fault):
    """Says which machine was lost, once, and ends the process: an orderly end would wait for the machine."""
    if _ending.acquire(blocking=False):
        sys.stdout.flush()
        print(
            f"train.py: lost {address}: it {fault}; the same command without it goes on from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
    threading.Event().wait()  # another thread is ending the process


def ask(address):
    """Asks a machine whether TensorFlow's server is alive there.

    Opens a connection in the way of HTTP/2, which gRPC speaks, and waits for the first frame of the answer. A process
    that is stopped, a line that is cut and a program of another kind do not send one.

    Returns:
      None, or what is wrong, to follow the machine's name.
    """
    preface, settings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    try:
        with socket.create_connection(_split(address), PATIENCE) as line:
            line.settimeout(PATIENCE)
            line.sendall(preface + settings)
            frame = b""
            while len(frame) < 9:
                received = line.recv(9 - len(frame))
                if not received:
                    return "is no worker: something else answers there"
                frame += received
            return None if frame[3] == settings[3] else "is no worker: something else answers there"
    except TimeoutError:
        return f"does not answer within {PATIENCE} s"
    except OSError as error:
        return f"cannot be reached ({(error.strerror or str(error)).lower()})"


def _check_way_back(address, device, here):
    """A worker fetches the weights from this machine: it must reach it, under the address it has been told."""
    with tf.device(HERE + "/device:CPU:0"):
        number = tf.Variable(1.0)

    @tf.function
    def fetch():
        with tf.device(device):
            return number + 1.0

    answers = []
    thread = threading.Thread(target=lambda: answers.append(_attempt(fetch)), daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)
    if answers != [2.0]:
        raise Lost(
            f"{address} cannot reach this machine at {here}: name an address that it can reach with --address HOST "
            "or HOST:PORT, and let its firewall pass"
        )


def _attempt(function):
    with contextlib.suppress(tf.errors.OpError):
        return float(function())


def _own_address(address, worker):
    """HOST:PORT of this machine, as a worker sees it."""
    host, _, port = (address or "").rpartition(":") if ":" in (address or "") else (address, "", "")
    if not host:  # the route to the worker knows; nothing is sent
        family, _, _, _, target = socket.getaddrinfo(*_split(worker), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            host = probe.getsockname()[0]
    if port:
        _check_free(_split(f"{host}:{port}")[1])
    else:
        with contextlib.closing(socket.socket()) as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_free(port):
    with contextlib.closing(socket.socket()) as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("", port))
        except OSError as error:
            raise ValueError(f"port {port} cannot be had: {error.strerror.lower()}; name another") from error


def is_address(name):
    """Whether a name is that of a machine, HOST:PORT, and not that of a device, like /CPU:0."""
    return not name.startswith("/") and name.split(":")[0].upper() not in ("CPU", "GPU", "DEVICE")


def _split(address):
    """("HOST", port) of "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not an address: write HOST:PORT, e.g. 10.0.0.2:7000")
    return host.strip("[]"), int(port)
