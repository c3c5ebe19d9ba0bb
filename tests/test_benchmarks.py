"""Benchmarks. They print ratios and assert nothing about time.

With the ordinary tests one quick comparison runs, of the serial and the parallel step. The full one, with all peers,

    python -m pytest tests/test_benchmarks.py --benchmark-only

takes about six minutes on two idle cores and writes benchmarks/results.json and benchmarks/speed.svg.
"""

import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import create_parallel_optimization

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", 7))
FLOPS_PER_IMAGE = 3 * 2 * (28 * 28 * 25 * 32 + 14 * 14 * 25 * 32 * 64 + 3136 * 1024 + 1024 * 10) - 2 * 28 * 28 * 25 * 32


@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_a_step_of_a_small_model(benchmark, kind, request):
    """Equal global batch; both compute the same loss."""
    from conftest import DEVICES

    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.layers.Dense(256, "relu"), keras.layers.Dense(10)])
    net.build((None, 100))
    optimizer = keras.optimizers.SGD(0.0)
    rng = np.random.default_rng(0)
    x, y = tf.constant(rng.normal(size=(512, 100)), tf.float32), tf.constant(rng.integers(0, 10, 512))

    def model_fn(input_fn):
        x, y = input_fn()
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, net(x)))

    count = {"serial": 1, "parallel": 2}[kind]
    parts = list(zip(tf.split(x, count), tf.split(y, count)))
    turns = iter(lambda: parts[next(numbers) % count], None)
    numbers = iter(range(10**9))
    step = create_parallel_optimization(model_fn, lambda: next(turns), optimizer, DEVICES[:count])
    loss = benchmark.pedantic(lambda: float(step()), rounds=20, iterations=2, warmup_rounds=2)
    assert loss == pytest.approx(float(model_fn(lambda: (x, y))), rel=1e-5)


class Contender:
    """A contender in a process of its own; see contenders.py."""

    def __init__(self, name):
        self.name, self.seconds = name, []
        command = [sys.executable, os.path.join(ROOT, "tests", "contenders.py"), *name.split()]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.first, _ = self.run(1)

    def run(self, steps):
        """Does so many steps while all others stand still: some of them never rest by themselves."""
        self.process.send_signal(signal.SIGCONT)
        print(steps, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("answer "):
                self.process.send_signal(signal.SIGSTOP)
                seconds, peak = map(float, line.split()[1:])
                return seconds, peak
        raise RuntimeError(f"contender {self.name!r} died")

    def stop(self):
        self.process.kill()  # MirroredStrategy's processes do not always end by themselves
        self.process.wait()


def interleave(names, steps):
    """Seconds per step of each contender, in rounds, so that all see the machine's good and bad times."""
    contenders = [Contender(name) for name in names]
    try:
        for contender in contenders:
            contender.run(max(3, steps // 2))  # warm-up
        return {c.name: seconds for c, seconds in zip(contenders, _rounds(contenders, steps))}
    finally:
        for contender in contenders:
            contender.stop()


def _rounds(contenders, steps):
    rounds = [[contender.run(steps)[0] for contender in contenders] for _ in range(ROUNDS)]
    return list(zip(*rounds))


def ratio(numerator, denominator, factor=1.0):
    """Median and range over the rounds of numerator / denominator."""
    values = [factor * n / d for n, d in zip(numerator, denominator)]
    return {"ratio": statistics.median(values), "low": min(values), "high": max(values)}


def fastest(seconds, *names):
    return min((seconds[name] for name in names), key=statistics.median)


def startup():
    """Seconds from the start of a process to TensorFlow imported, and to the first step of `python train.py`."""
    first_step = (
        "import train\n"
        "def one(step, **_):\n    step()\n    raise SystemExit\n"
        "train.do_training = one\ntrain.main(['--parallel'])"
    )
    times = []
    for code in ["import tensorflow", first_step] * ROUNDS:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
        times.append(time.perf_counter() - started)
    return ratio(times[1::2], times[0::2])


def resnet(name):
    """First step, later steps (median), peak memory of ResNet-50 in a fresh process."""
    contender = Contender(name)
    try:
        later, peak = zip(*[contender.run(4) for _ in range(ROUNDS)])
        return contender.first, statistics.median(later), peak[-1]
    finally:
        contender.stop()


def prediction():
    """What `--explain` expects of four towers after measuring two, as a share of what four towers reach."""

    def explained(towers):
        code = (
            f"import train\ntrain.train = lambda *_: 0\ntrain.main(['--parallel', '--explain', '--towers', '{towers}'])"
        )
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout

    expected = [float(re.search(r"expected:.* (\S+) with 4", explained(2))[1]) for _ in range(3)]
    return ratio(expected, [float(re.search(r"reached with 4: (\S+)", explained(4))[1]) for _ in range(3)])


def accuracy(*options):
    done = subprocess.run(
        [sys.executable, "train.py", "--parallel", *options], cwd=ROOT, capture_output=True, text=True
    )
    return float(done.stdout.rsplit("test accuracy: ", 1)[1].split()[0])


@pytest.mark.benchmark(group="full")
def test_full_comparison(benchmark, request, capsys):
    """All rows of the table, each a ratio of medians from interleaved rounds."""
    if not request.config.getoption("benchmark_only"):
        pytest.skip("only with --benchmark-only")
    results = benchmark.pedantic(compare, args=(capsys,), rounds=1, iterations=1)
    assert all(np.isfinite(row["ratio"]) for row in results["rows"])


def compare(capsys):
    rows = []

    def row(measure, target, result):
        rows.append({"measure": measure, "target": target, **result})
        met = result["ratio"] >= float(target[2:]) if target[0] == "≥" else result["ratio"] <= float(target[2:])
        with capsys.disabled():
            spread = f"{result['low']:.2f}-{result['high']:.2f}"
            print(
                f"{measure:62} {result['ratio']:6.2f}  ({spread})  {target}  {'met' if met else 'NOT MET'}", flush=True
            )

    with capsys.disabled():
        print()
    mirrored = ["mirrored mnist 2 128 1 0", "mirrored mnist 2 128 5 0"]
    tuned = ["mirrored mnist 2 128 1 1", "mirrored mnist 2 128 5 1"]
    central = ["central mnist 2 128 1 0", "central mnist 2 128 1 1"]
    legacy = ["legacy 2 128 0", "legacy 2 128 1"]
    ours = "towers mnist 2 128"
    names = [ours, "serial mnist 256", *mirrored, *tuned, *central, *legacy, "bfloat16 mnist 2 128", "matmul float32"]
    s = interleave([*names, "matmul bfloat16", "pipeline 2 128"], 10)
    row("2 towers x 128 vs serial at 256", "≥ 1.03", ratio(s["serial mnist 256"], s[ours]))
    row("... vs MirroredStrategy, default threads", "≥ 1.45", ratio(fastest(s, *mirrored), s[ours]))
    row("... vs MirroredStrategy with our threads per op", "≥ 1.00", ratio(fastest(s, *tuned), s[ours]))
    row("... vs CentralStorageStrategy", "≥ 1.12", ratio(fastest(s, *central), s[ours]))
    row("... vs the graph-mode program of 2017", "≥ 1.03", ratio(fastest(s, *legacy), s[ours]))
    limit = [256 * FLOPS_PER_IMAGE / (2 * 2048**3 / seconds) for seconds in s["matmul float32"]]
    row("... as a share of the matmul limit", "≥ 0.80", ratio(limit, s[ours]))
    row("bfloat16 vs float32, 2 towers x 128", "≥ 2.3", ratio(s[ours], s["bfloat16 mnist 2 128"]))
    row("(bfloat16 vs float32 matmul)", "≥ 2.3", ratio(s["matmul float32"], s["matmul bfloat16"]))
    row("input pipeline alone vs training", "≥ 10", ratio(s[ours], s["pipeline 2 128"]))

    names = ["towers mnist 4 128", "serial mnist 512", "mirrored mnist 4 128 1 0", "mirrored mnist 4 128 1 1"]
    more = interleave(names, 6)
    row("4 towers x 128 vs serial at 512", "≥ 1.05", ratio(more["serial mnist 512"], more["towers mnist 4 128"]))
    tiny = ["towers tiny 8 8", "mirrored tiny 8 8 1 0"]
    t = interleave(tiny, 100)
    row("tiny model, 8 towers vs MirroredStrategy: time per step", "≤ 0.35", ratio(*t.values()))
    row("python train.py to the first step vs import tensorflow", "≤ 2.0", startup())
    a, b = resnet("towers resnet 4 4"), resnet("mirrored resnet 4 4 1 0")
    targets = {"first step": "≤ 0.35", "later steps": "≤ 0.30", "peak memory": "≤ 0.50"}
    for (what, target), mine, theirs in zip(targets.items(), a, b):
        row(f"ResNet-50, 4 towers vs MirroredStrategy: {what}", target, ratio([mine], [theirs]))
    row("speed-up of 4 towers: expected from 2, vs reached", "≥ 0.75", prediction())
    difference = accuracy() - accuracy("--mixed-precision")
    row("test accuracy lost by bfloat16, percentage points", "≤ 0.3", ratio([difference], [1.0]))

    sizes = [
        "towers mnist 1 128",
        "towers mnist 2 64",
        "mirrored mnist 2 64 1 0",
        "serial mnist 128",
        "towers mnist 1 64",
        "serial mnist 64",
    ]
    small = interleave(sizes, 10)
    speed = {}
    for name, seconds in {**s, **more, **small}.items():
        kind, *numbers = name.split()
        if "mnist" in numbers or kind == "legacy":
            numbers = [int(n) for n in numbers if n.isdigit()]
            images = numbers[0] if kind == "serial" else numbers[0] * numbers[1]
            speed[name] = images / statistics.median(seconds)
    results = {"machine": machine(), "rounds": ROUNDS, "rows": rows, "images per second": speed}
    folder = os.path.join(ROOT, "benchmarks")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "results.json"), "w") as file:
        json.dump(results, file, indent=1)
    with open(os.path.join(folder, "speed.svg"), "w") as file:
        file.write(picture(speed, results["machine"]))
    return results


def machine():
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "unknown")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
    }


LABELS = {"towers": "towers", "bfloat16": "towers, bfloat16", "serial": "one device", "mirrored": "MirroredStrategy"}
LABELS |= {"central": "CentralStorageStrategy", "legacy": "graph mode of 2017"}
COLOURS = {"towers": "#2a6fbb", "bfloat16": "#7db1e8", "serial": "#777777", "mirrored": "#d9822b", "central": "#b5a22c"}
COLOURS |= {"legacy": "#6aa36a"}


def picture(speed, machine):
    """A bar for each contender: images per second, the fastest variant of each, by towers and batch size."""
    bars = {}
    for name, rate in speed.items():
        kind, *numbers = name.split()
        numbers = [number for number in numbers if number.isdigit()]
        label = f"batch {numbers[0]}" if kind == "serial" else f"{numbers[0]} x {numbers[1]}"
        key = (int(numbers[0]) if kind == "serial" else int(numbers[0]) * int(numbers[1]), kind, label)
        bars[key] = max(rate, bars.get(key, 0))
    scale, height = 420 / max(bars.values()), 20
    lines, y, group = [], 40, None
    for (size, kind, label), rate in sorted(bars.items(), key=lambda item: (item[0][0], -item[1])):
        if size != group:
            group, y = size, y + 26
            lines.append(f'<text x="10" y="{y - 6}" font-weight="bold">global batch {size}</text>')
        lines.append(f'<text x="200" y="{y + 14}" text-anchor="end">{LABELS[kind]}, {label}</text>')
        lines.append(
            f'<rect x="208" y="{y + 2}" width="{rate * scale:.0f}" height="{height - 5}" fill="{COLOURS[kind]}"/>'
        )
        lines.append(f'<text x="{214 + rate * scale:.0f}" y="{y + 14}">{rate:.0f}</text>')
        y += height
    title = (
        f"MNIST convnet, images/s; {machine['processor']}, {machine['cores']} cores, TensorFlow {machine['tensorflow']}"
    )
    size = f'width="700" height="{y + 14}" font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join(
        [
            head,
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="10" y="24" font-size="14">{title}</text>',
            *lines,
            "</svg>\n",
        ]
    )
