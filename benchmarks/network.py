"""What a controller can feed: seconds per step against the number of workers, on lines of a known speed.

    sudo python benchmarks/network.py        Linux, as root: hosts are network namespaces, `tc tbf` limits their lines

Towers with one controller and with several, and `MultiWorkerMirroredStrategy` (ring all-reduce), on a model of equal
layers with next to no arithmetic, so that the lines decide. Beside each measurement stands the time that its bytes
take on the busiest line. Writes benchmarks/network.json.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MEGABITS = int(os.environ.get("MEGABITS", 500))  # of each line, each way
LAYERS, WIDTH, BATCH, STEPS = 8, 640, 8, 6
WEIGHTS = LAYERS * (WIDTH + 1) * WIDTH * 4  # bytes

MODEL = f"""
import json, os, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, {ROOT!r})
import keras, numpy as np, tensorflow as tf
def make():
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.layers.Dense({WIDTH}) for _ in range({LAYERS})])
    net.build((None, {WIDTH}))
    return net
x = np.ones([{BATCH}, {WIDTH}], np.float32)
def measure(step):
    for _ in range(2):
        float(step())
    times = []
    for _ in range({STEPS}):
        started = time.perf_counter()
        float(step())
        times.append(time.perf_counter() - started)
    print("answer", json.dumps(times), flush=True)
    os._exit(0)
"""

TOWERS = (
    MODEL
    + """
import workers
from placement import assign_to_device
from towers import create_parallel_optimization
towers, holders = sys.argv[1].split(","), sys.argv[2].split(",")
devices, controllers = workers.connect(towers, holders)
with assign_to_device(devices[0], controllers):
    net, optimizer = make(), keras.optimizers.SGD(1e-6)
    optimizer.build(net.trainable_variables)
measure(create_parallel_optimization(
    lambda input_fn: tf.reduce_mean(net(input_fn()) ** 2), lambda: x, optimizer, devices, controllers))
"""
)

RING = (
    MODEL
    + """
hosts, me = sys.argv[1].split(","), int(sys.argv[2])
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": me}})
on_a_ring = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=on_a_ring)
with strategy.scope():
    net, optimizer = make(), keras.optimizers.SGD(1e-6)
    optimizer.build(net.trainable_variables)
def replica():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(net(x) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables))
    return loss
step = tf.function(lambda: strategy.reduce("mean", strategy.run(replica), axis=None))
measure(step)
"""
)


def run(*command):
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def hosts(count):
    """So many hosts, each on a line of MEGABITS to one bridge; yields `start(host, *command)`, and their addresses."""
    names, processes = [f"tower-net{i}" for i in range(count)], []
    limit = f"tbf rate {MEGABITS}mbit burst 256kb latency 500ms".split()
    try:
        run("ip", "link", "add", "tower-bridge", "type", "bridge")
        run("ip", "link", "set", "tower-bridge", "up")
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"tower{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", f"tower{number}", "master", "tower-bridge", "up")
            run("ip", "-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("tc", "qdisc", "add", "dev", f"tower{number}", "root", *limit)
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", *limit)

        def start(number, *command):
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", names[number], sys.executable, *command],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            return processes[-1]

        yield start, [f"10.78.0.{number + 1}:7000" for number in range(count)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, name in enumerate(names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            subprocess.run(["ip", "link", "del", f"tower{number}"], capture_output=True)
        subprocess.run(["ip", "link", "del", "tower-bridge"], capture_output=True)
        time.sleep(1)


def answer(process):
    for line in process.stdout:
        if line.startswith("answer "):
            return json.loads(line.removeprefix("answer "))
    raise RuntimeError("a program of the benchmark failed; run it by hand to see why")


def towers(count, holders):
    """Seconds per step with `count` workers; variables on the driver (0) or on so many machines of their own."""
    with hosts(1 + count + holders) as (start, addresses):
        for number in range(1, 1 + count + holders):
            server = start(number, "train.py", "--serve", "7000", "--trusted-network")
            assert server.stdout.readline().startswith("serving")
        controllers = addresses[1 + count :] or ["/CPU:0"]
        return answer(start(0, "-c", TOWERS, ",".join(addresses[1 : 1 + count]), ",".join(controllers)))


def ring(count):
    with hosts(count) as (start, addresses):
        programs = [start(number, "-c", RING, ",".join(addresses), str(number)) for number in range(count)]
        return answer(programs[0])


def main():
    line = MEGABITS * 1e6 / 8  # bytes per second
    rows = []
    for count in (1, 2, 4):
        # A controller first sends the weights and then receives the gradients; on a ring all send and receive at once.
        ways = {
            f"{max(1, holders)} controller{'s' * (holders > 1)}": (
                towers,
                (count, holders),
                2 * max(1, count / max(1, holders)),
            )
            for holders in (0, 2, 4)
        }
        if count > 1:
            ways["ring all-reduce"] = ring, (count,), 2 * (count - 1) / count
        for way, (measure, arguments, weights_moved) in ways.items():
            times = measure(*arguments)
            seconds, alone = statistics.median(times), weights_moved * WEIGHTS / line
            rows.append({"workers": count, "way": way, "seconds": seconds, "the line alone": alone, "all": times})
            print(
                f"{count} workers, {way:16} {seconds:6.2f} s a step, the busiest line alone {alone:5.2f} s", flush=True
            )
    result = {"megabits": MEGABITS, "weights, bytes": WEIGHTS, "rows": rows}
    with open(os.path.join(ROOT, "benchmarks", "network.json"), "w") as file:
        file.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
