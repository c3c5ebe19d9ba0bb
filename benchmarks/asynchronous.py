"""Asynchronous or synchronous: speed, and accuracy after the same examples. Prints the table and asserts nothing.

    python benchmarks/asynchronous.py                               about 10 minutes; begun again, it goes on
    python benchmarks/asynchronous.py --seeds 1 --examples 3000     a short one, for trying out

It trains the MNIST classifier in each way with 1, 2 and 4 towers, also with a tower that is slow, and writes
benchmarks/asynchronous.json as it goes, and benchmarks/asynchronous.svg. In a way that is fair:

- All ways see the same examples in the same order, at batch 128 per tower and Adam's usual learning rate.
- Synchronous towers then make 1/N as many updates. The row "synchronous, as many updates" has the same global batch
  as one tower, 128: against it, the asynchronous row shows what staleness alone does.
- All ways with N towers run in one process, in an order that changes with the seed; the clock starts when each tower
  has trained one batch, which also builds the graphs.
- The slow tower sleeps before each batch: it is late, and takes no processor from the others.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]

import keras
import numpy as np
import tensorflow as tf
from test_benchmarks import machine, save

import mnist
from fused_adam import FusedAdam
from placement import assign_to_device, tower_devices
from towers import create_asynchronous_optimization, create_parallel_optimization
from train import test_accuracy

BATCH, TOWERS = 128, (1, 2, 4)
WAYS = {  # what they are called -> colour
    "synchronous": "#2a6fbb",
    "synchronous, as many updates": "#7db1e8",
    "asynchronous": "#d9822b",
    "synchronous, a slow tower": "#2a6fbb",
    "asynchronous, a slow tower": "#d9822b",
}


def main():
    parser = argparse.ArgumentParser(description="Compares synchronous with asynchronous towers.")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--examples", type=int, default=30_000, help="images each run trains on, at most 60000")
    parser.add_argument("--delay", type=int, default=50, help="how long the slow tower sleeps per batch, in ms")
    parser.add_argument("--run", type=int, nargs=2, metavar=("TOWERS", "SEED"), help="one process of it")
    options = parser.parse_args()
    if options.run:
        measure(*options.run, options.examples, options.delay / 1000)
        return
    conditions = {"examples": options.examples, "delay, ms": options.delay, "batch": BATCH, "machine": machine()}
    results = {**conditions, "runs": []}
    path = os.path.join(ROOT, "benchmarks", "asynchronous.json")
    if os.path.exists(path):
        with open(path) as file:
            there = json.load(file)
        if all(there.get(name) == value for name, value in conditions.items()):
            results = there
    for seed in range(options.seeds):
        for towers in TOWERS:
            if any((run["seed"], run["towers"]) == (seed, towers) for run in results["runs"]):
                continue
            command = [sys.executable, __file__, "--run", str(towers), str(seed)]
            command += ["--examples", str(options.examples), "--delay", str(options.delay)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results["runs"] += [json.loads(line) for line in done.stdout.splitlines()]
            save("asynchronous.json", json.dumps(results, indent=1) + "\n")
            print(f"seed {seed}, {towers} towers: done", file=sys.stderr, flush=True)
    rows = summary(results["runs"])
    print("| towers | | images/s | of synchronous | test accuracy (lowest to highest) | staleness: mean, max |")
    print("|---|---|---|---|---|---|")
    for (towers, way), row in rows.items():
        accuracy = f"{row['accuracy']:.2f} % ({row['lowest']:.2f} to {row['highest']:.2f})"
        speed = f"{row['speed']:.0f} | {row['ratio']:.2f} ({row['slowest']:.2f} to {row['fastest']:.2f})"
        print(f"| {towers} | {way} | {speed} | {accuracy} | {row['staleness']} |")
    save("asynchronous.svg", picture(rows, results))


def measure(towers, seed, examples, delay):
    """Trains in every way with so many towers, in this process; prints each result as a line of JSON."""
    devices = tower_devices(towers)
    # A tower that sleeps holds a thread, which a slow device would not.
    tf.config.threading.set_inter_op_parallelism_threads(max(towers, os.cpu_count()) + 1)
    ways = [way for way in WAYS if towers > 1 or way in ("synchronous", "asynchronous")]
    for way in ways[seed % len(ways) :] + ways[: seed % len(ways)]:
        batch_size = BATCH // towers if "as many" in way else BATCH
        print(
            json.dumps(
                {"towers": towers, "way": way, "seed": seed, **train(way, devices, batch_size, seed, examples, delay)}
            )
        )


def train(way, devices, batch_size, seed, examples, delay):
    count, asynchronous, slow = len(devices), way.startswith("asynchronous"), way.endswith("slow tower")
    keras.utils.set_random_seed(seed)
    with assign_to_device(devices[0]):
        core, optimizer = mnist.core_model(), FusedAdam(1e-3)
        optimizer.build(core.trainable_variables)
    number = examples // BATCH // 4 * 4 * (BATCH // batch_size)
    data = mnist.training_dataset(1, batch_size, 1 if asynchronous else count, seed=seed).take(number)
    create = create_asynchronous_optimization if asynchronous else create_parallel_optimization
    model_fn, feed = mnist.training_model(core), tower_batches(data, count, asynchronous)

    def slow_model(input_fn):
        image, label, tower = input_fn()
        zero = tf.numpy_function(sleep, [tower[0]], tf.float32, stateful=False)
        image = tf.image.convert_image_dtype(image, tf.float32) + tf.ensure_shape(zero, [])
        return model_fn(lambda: (image, label))

    def sleep(tower):
        time.sleep(delay if tower == 0 else 0)
        return np.float32(0)

    def input_fn():
        batch = next(feed)
        if slow and batch is not None:
            return (*batch, np.full(len(batch[1]), next_tower()))
        return batch

    calls, before = 0, [0] * count

    def next_tower():
        """The tower that the batch is for: in turn at first, then that of the last update."""
        nonlocal calls, before
        calls += 1
        if not asynchronous or calls <= 2 * count:  # all rest after their first batch, and begin again in turn
            return (calls - 1) % count
        changed = [i for i in range(count) if step.updates[i] != before[i]]
        before = list(step.updates)
        return changed[0]

    step = create(slow_model if slow else model_fn, input_fn, optimizer, devices, variables=core.trainable_variables)
    updates = count if asynchronous else 1
    for _ in range(updates):
        step()
    before = list(step.updates) if asynchronous else None
    started = time.perf_counter()
    while True:
        try:
            step()
        except tf.errors.OutOfRangeError:
            break
        updates += 1
    rate = (number - count) * batch_size / (time.perf_counter() - started)
    result = {"images/s": rate, "updates": updates, "examples": number * batch_size}
    result["accuracy"] = 100 * test_accuracy(core, mnist.test_dataset(batch_size=1000))
    if asynchronous:
        step.close()
        total = sum(late * times for late, times in step.staleness.items())
        result |= {"mean staleness": total / updates, "most stale": max(step.staleness), "by tower": step.updates}
    return result


def tower_batches(data, count, asynchronous):
    """Asynchronous towers rest when each has had one batch, so that the clock starts with nothing half done."""
    for number, batch in enumerate(data):
        if asynchronous and number == count:
            yield None
        yield batch


def summary(runs):
    """For each number of towers and each way: medians over the seeds, and their ranges."""
    rows = {}
    for towers in TOWERS:
        for way in WAYS:
            mine = [run for run in runs if (run["towers"], run["way"]) == (towers, way)]
            if not mine:
                continue
            peer = "synchronous" + (", a slow tower" if "slow" in way else "")
            peers = {run["seed"]: run["images/s"] for run in runs if (run["towers"], run["way"]) == (towers, peer)}
            ratios = [run["images/s"] / peers[run["seed"]] for run in mine]
            right = [run["accuracy"] for run in mine]
            late = ""
            if way.startswith("asynchronous"):
                late = f"{statistics.mean(r['mean staleness'] for r in mine):.2f}, {max(r['most stale'] for r in mine)}"
            rows[towers, way] = {
                "speed": statistics.median(run["images/s"] for run in mine),
                "ratio": statistics.median(ratios),
                "slowest": min(ratios),
                "fastest": max(ratios),
                "accuracy": statistics.mean(right),
                "lowest": min(right),
                "highest": max(right),
                "all": right,
                "staleness": late,
            }
    return rows


def picture(rows, results):
    """Left a bar for images per second; right a dot for the test accuracy of each seed, and a line for the mean."""
    scale = 220 / max(row["speed"] for row in rows.values())
    floor = int(min(row["lowest"] for row in rows.values()))
    lines, y, group = [], 56, None

    def across(accuracy):
        return 530 + 200 * (accuracy - floor) / (100 - floor)

    for (towers, way), row in rows.items():
        if towers != group:
            group, y = towers, y + 26
            lines.append(f'<text x="10" y="{y - 6}" font-weight="bold">{towers} tower{"s" * (towers > 1)}</text>')
        faded = ' fill-opacity="0.55"' if "slow" in way else ""
        lines.append(f'<text x="200" y="{y + 14}" text-anchor="end">{way}</text>')
        size = f'width="{row["speed"] * scale:.0f}" height="15"'
        lines.append(f'<rect x="208" y="{y + 2}" {size} fill="{WAYS[way]}"{faded}/>')
        lines.append(f'<text x="{214 + row["speed"] * scale:.0f}" y="{y + 14}">{row["speed"]:.0f}</text>')
        mean = across(row["accuracy"])
        lines.append(f'<path d="M{mean:.1f} {y + 1}v17" stroke="{WAYS[way]}" stroke-width="2"/>')
        for accuracy in row["all"]:
            lines.append(f'<circle cx="{across(accuracy):.1f}" cy="{y + 9}" r="3" fill="{WAYS[way]}"{faded}/>')
        y += 20
    axis = [
        f'<path d="M{across(tick):.0f} 50V{y}" stroke="#ddd"/><text x="{across(tick):.0f}" y="44" '
        f'text-anchor="middle">{tick:g} %</text>'
        for tick in np.linspace(floor, 100, 3)
    ]
    where = f"{results['machine']['processor']}, {results['machine']['cores']} cores"
    title = f"MNIST, {results['examples']} examples, batch {BATCH} per tower; {where}"
    size = f'width="760" height="{y + 14}" font-family="sans-serif" font-size="12"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="10" y="22" font-size="14">{title}</text>',
            '<text x="208" y="44">images/s</text><text x="590" y="22">test accuracy</text>',
            *axis,
            *lines,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main()
