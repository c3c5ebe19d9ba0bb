"""Benchmarks. They print ratios and assert nothing about time.

With the ordinary tests one quick comparison runs, of the serial and the parallel step. The full one, with all peers,

    python -m pytest tests/test_benchmarks.py --benchmark-only

writes benchmarks/results.json as it goes, and benchmarks/speed.svg. BENCHMARK_ROUNDS=1 is a short one, for trying out.
Every peer takes part with each of its settings (threads per op, steps per call), and the fastest of them counts.
"""

import contextlib
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import create_parallel_optimization

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", 15))  # many short ones, so that all see the machine's good times
FEW = min(ROUNDS, 5)  # of what takes long
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

    if kind == "parallel":
        turns = itertools.cycle(list(zip(tf.split(x, 2), tf.split(y, 2))))
        step = create_parallel_optimization(model_fn, lambda: next(turns), optimizer, DEVICES[:2])
    else:
        optimizer.build(net.trainable_variables)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = model_fn(lambda: (x, y))
            optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables))
            return loss

    loss = benchmark.pedantic(lambda: float(step()), rounds=20, iterations=2, warmup_rounds=2)
    assert loss == pytest.approx(float(model_fn(lambda: (x, y))), rel=1e-5)


class Contender:
    """A contender in a process of its own; see contenders.py."""

    def __init__(self, name, steps=5):
        self.name, self.errors = name, tempfile.TemporaryFile("w+")
        command = [sys.executable, os.path.join(ROOT, "tests", "contenders.py"), *name.split()]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        try:
            self.first, self.loss, _ = self.run(steps)  # as many for all, so that the losses can be compared
        except BaseException:
            self.stop()
            raise

    def run(self, steps):
        """Does so many steps while all others stand still: some of them never rest by themselves."""
        self.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            print(steps, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("answer "):
                self.process.send_signal(signal.SIGSTOP)
                return tuple(map(float, line.split()[1:]))
        self.errors.seek(0)
        raise RuntimeError(f"contender {self.name!r} died: {self.errors.read()[-500:]}")

    def stop(self):
        self.process.kill()  # MirroredStrategy's processes do not always end by themselves
        self.process.wait()


def interleave(names, steps):
    """Seconds per step of each contender, in rounds, so that all see the machine's good and bad times."""
    contenders = []
    try:
        for name in names:
            contenders.append(Contender(name))
        check_same_loss(contenders)
        for contender in contenders:
            contender.run(max(3, steps // 2))  # warm-up
        rounds = [[contender.run(steps)[0] for contender in contenders] for _ in range(ROUNDS)]
        return dict(zip(names, zip(*rounds)))
    finally:
        for contender in contenders:
            contender.stop()


def check_same_loss(contenders):
    """Contenders that train the same model on as many images have the same loss after the same steps."""
    groups = {}
    for contender in contenders:
        if global_batch(contender.name):
            groups.setdefault(global_batch(contender.name), []).append(contender)
    for first, *others in groups.values():
        for other in others:
            close = 0.1 if "bfloat16" in first.name + other.name else 0.01
            assert other.loss == pytest.approx(first.loss, rel=close), f"{other.name} differs from {first.name}"


def global_batch(name):
    """The images per step of a contender that trains; 0 of the others."""
    kind, *numbers = name.split()
    numbers = [int(number) for number in numbers if number.isdigit()]
    return 0 if kind not in BARS else numbers[0] if kind == "serial" else numbers[0] * numbers[1]


def ratio(numerator, denominator, factor=1.0):
    """Median and range over the rounds of numerator / denominator."""
    values = [factor * n / d for n, d in zip(numerator, denominator)]
    return {"ratio": statistics.median(values), "low": min(values), "high": max(values)}


def fastest(seconds, *names):
    return min((seconds[name] for name in names), key=statistics.median)


def startup(*options):
    """Seconds from the start of a process to the first step of `python train.py`, over `import tensorflow` alone."""
    first_step = (
        "import sys, train\n"
        "def one(step, **_):\n    float(step())\n    print('first step done')\n    sys.exit()\n"
        f"train.do_training = one\ntrain.main({list(options)})"
    )
    times = []
    for code in ["import tensorflow; print('first step done')", first_step] * FEW:
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        times.append(time.perf_counter() - started)
        assert done.returncode == 0 and "first step done" in done.stdout, done.stderr[-500:]
    return ratio(times[1::2], times[0::2])


def resnet(name):
    """First step, later steps (median), peak memory of ResNet-50 in a fresh process."""
    contender = Contender(name, steps=1)
    try:
        later, _, peak = zip(*[contender.run(2) for _ in range(4)])
        return contender.first, statistics.median(later[1:]), peak[-1]
    finally:
        contender.stop()


def accuracy(*options):
    done = subprocess.run(
        [sys.executable, "train.py", "--parallel", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-500:]
    return float(done.stdout.rsplit("test accuracy: ", 1)[1].split()[0])


@pytest.mark.benchmark(group="full")
def test_full_comparison(benchmark, request, capsys):
    """All rows of the table, each a ratio of medians from interleaved rounds."""
    if not request.config.getoption("benchmark_only"):
        pytest.skip("only with --benchmark-only")
    results = benchmark.pedantic(compare, args=(capsys,), rounds=1, iterations=1)
    assert not results["failed"], results["failed"]
    assert all(np.isfinite(row["ratio"]) for row in results["rows"])


def compare(capsys):
    """Runs the sections, each by itself: what one has measured is kept if another fails."""
    results = {"machine": machine(), "rounds": ROUNDS, "rows": [], "failed": {}, "seconds per step": {}}
    with capsys.disabled():
        print()

    def row(measure, target, result):
        met = None
        if target:
            limit = float(target[2:])
            met = result["ratio"] >= limit if target[0] == "≥" else result["ratio"] <= limit
        results["rows"].append({"measure": measure, "target": target, "met": met, **result})
        verdict = {None: "", True: "met", False: "NOT MET"}[met]
        with capsys.disabled():
            spread = f"({result['low']:.2f} - {result['high']:.2f})"
            print(f"{measure:70} {result['ratio']:7.2f} {spread:18} {target or '':7} {verdict}", flush=True)
        save("results.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n")

    def run(names, steps):
        seconds = interleave(names, steps)
        results["seconds per step"] |= {name: statistics.median(values) for name, values in seconds.items()}
        return seconds

    for section in (two_towers, four_towers, other_sizes, tiny, starting, explained, resnets, accuracies):
        try:
            section(row, run)
        except Exception as error:
            results["failed"][section.__name__] = f"{type(error).__name__}: {error}"
            with capsys.disabled():
                print(f"{section.__name__} FAILED: {error}", flush=True)
    speeds = {n: global_batch(n) / s for n, s in results["seconds per step"].items() if global_batch(n) > 100}
    results["images per second"] = speeds
    save("results.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    save("speed.svg", picture(speeds, results["machine"]))
    return results


def save(name, text):
    os.makedirs(os.path.join(ROOT, "benchmarks"), exist_ok=True)
    with open(os.path.join(ROOT, "benchmarks", name), "w") as file:
        file.write(text)


def two_towers(row, run):
    ours, bfloat16 = "towers mnist 2 128", "bfloat16 mnist 2 128"
    mirrored = [f"mirrored mnist 2 128 {steps} {threads}" for threads in (0, 1) for steps in (1, 5)]
    central = [f"central mnist 2 128 1 {threads}" for threads in (0, 1)]
    legacy = [f"legacy 2 128 {threads}" for threads in (0, 1)]
    usual = "mirrored_keras mnist 2 128 1 0"  # as its tutorial has it, a step per call
    rates = [f"{what} {dtype}" for what in ("matmul", "convolution") for dtype in ("float32", "bfloat16")]
    s = run([ours, "serial mnist 256", *mirrored, usual, *central, *legacy, bfloat16, *rates, "pipeline 2 128"], 5)
    row("2 towers x 128 vs serial at 256", "≥ 1.03", ratio(s["serial mnist 256"], s[ours]))
    row("... vs MirroredStrategy, with our Adam and its best threads", "≥ 1.45", ratio(fastest(s, *mirrored), s[ours]))
    row("    (with our Adam and TensorFlow's default threads)", None, ratio(fastest(s, *mirrored[:2]), s[ours]))
    row("    (as its tutorial has it: Keras's Adam, default threads)", None, ratio(s[usual], s[ours]))
    row("... vs CentralStorageStrategy", "≥ 1.12", ratio(fastest(s, *central), s[ours]))
    row("... vs the graph-mode program of 2017", "≥ 1.03", ratio(fastest(s, *legacy), s[ours]))
    limit = [256 * FLOPS_PER_IMAGE / (2 * 2048**3 / seconds) for seconds in s["matmul float32"]]
    row("... as a share of the matmul limit", "≥ 0.80", ratio(limit, s[ours]))
    row("bfloat16 vs float32, 2 towers x 128", "≥ 2.3", ratio(s[ours], s[bfloat16]))
    row("    (matrix products alone)", None, ratio(s[rates[0]], s[rates[1]]))
    row("    (the second convolution alone, forward and backward)", None, ratio(s[rates[2]], s[rates[3]]))
    row("input pipeline alone vs training", "≥ 10", ratio(s[ours], s["pipeline 2 128"]))


def four_towers(row, run):
    ours, serial = "towers mnist 4 128", "serial mnist 512"
    mirrored = [f"mirrored mnist 4 128 1 {threads}" for threads in (0, 1)]
    s = run([ours, serial, *mirrored], 3)
    row("4 towers x 128 vs serial at 512", "≥ 1.05", ratio(s[serial], s[ours]))
    row("    (vs MirroredStrategy, its best threads)", None, ratio(fastest(s, *mirrored), s[ours]))


def other_sizes(row, run):
    """For the picture."""
    mirrored = [f"mirrored mnist 2 64 1 {threads}" for threads in (0, 1)]
    run(["towers mnist 2 64", "towers mnist 1 128", "serial mnist 128", *mirrored], 5)


def tiny(row, run):
    mirrored = [f"mirrored tiny 8 8 {steps} {threads}" for threads in (0, 1) for steps in (1, 5)]
    s = run(["towers tiny 8 8", *mirrored], 50)
    peer = fastest(s, *mirrored)
    row("tiny model, 8 towers vs MirroredStrategy: time per step", "≤ 0.35", ratio(s["towers tiny 8 8"], peer))
    single = fastest(s, *mirrored[::2])
    row("    (one step per call)", None, ratio(s["towers tiny 8 8"], single))


def starting(row, run):
    row("python train.py to the first step vs import tensorflow", "≤ 2.0", startup())
    row("    (with --parallel)", None, startup("--parallel"))


def explained(row, run):
    for batch_size in (128, 16):
        contender = Contender(f"prediction mnist {batch_size}")
        try:
            off = [abs(value - 1) for value in [contender.first, *(contender.run(1)[0] for _ in range(FEW - 1))]]
        finally:
            contender.stop()
        measure = f"--explain with 2 towers x {batch_size}: speed-up expected of 4, off by"
        row(measure, "≤ 0.25", ratio(off, [1.0] * len(off)))


def resnets(row, run):
    peers = [f"mirrored resnet 4 4 1 {threads}" for threads in (0, 1)]
    tried = {name: resnet(name) for name in peers} if ROUNDS > 1 else {peers[0]: None}
    peer = min(peers, key=lambda name: tried[name][1]) if ROUNDS > 1 else peers[0]
    names = ("towers resnet 4 4", peer, "mirrored_keras resnet 4 4 1 0")
    rounds = [[resnet(name) for name in names] for _ in range(FEW)]
    for number, (what, target) in enumerate({"first step": 0.35, "later steps": 0.30, "peak memory": 0.50}.items()):
        ours, theirs, usual = ([figures[number] for figures in side] for side in zip(*rounds))
        row(f"ResNet-50, 4 towers vs MirroredStrategy: {what}", f"≤ {target:.2f}", ratio(ours, theirs))
        row("    (as its tutorial has it)", None, ratio(ours, usual))


def accuracies(row, run):
    lost = accuracy() - accuracy("--mixed-precision")
    row("test accuracy lost by bfloat16, percentage points", "≤ 0.3", ratio([lost], [1.0]))


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


BARS = {  # the contenders that train -> what they are called, colour
    "towers": ("towers", "#2a6fbb"),
    "bfloat16": ("towers, bfloat16", "#7db1e8"),
    "serial": ("one device", "#777777"),
    "mirrored": ("MirroredStrategy", "#d9822b"),
    "mirrored_keras": ("MirroredStrategy, its tutorial", "#e8b68a"),
    "central": ("CentralStorageStrategy", "#b5a22c"),
    "legacy": ("graph mode of 2017", "#6aa36a"),
}


def picture(speed, machine):
    """A bar for each contender: images per second, the fastest variant of each, by towers and batch size."""
    bars = {}
    for name, rate in speed.items():
        kind, *numbers = name.split()
        numbers = [number for number in numbers if number.isdigit()]
        label = f"batch {numbers[0]}" if kind == "serial" else f"{numbers[0]} x {numbers[1]}"
        key = (int(numbers[0]) if kind == "serial" else int(numbers[0]) * int(numbers[1]), kind, label)
        bars[key] = max(rate, bars.get(key, 0))
    scale, left, height = 420 / max(bars.values()), 248, 20
    lines, y, group = [], 40, None
    for (size, kind, label), rate in sorted(bars.items(), key=lambda item: (item[0][0], -item[1])):
        if size != group:
            group, y = size, y + 26
            lines.append(f'<text x="10" y="{y - 6}" font-weight="bold">global batch {size}</text>')
        name, colour = BARS[kind]
        lines.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name}, {label}</text>')
        lines.append(f'<rect x="{left}" y="{y + 2}" width="{rate * scale:.0f}" height="{height - 5}" fill="{colour}"/>')
        lines.append(f'<text x="{left + 6 + rate * scale:.0f}" y="{y + 14}">{rate:.0f}</text>')
        y += height
    title = (
        f"MNIST convnet, images/s; {machine['processor']}, {machine['cores']} cores, TensorFlow {machine['tensorflow']}"
    )
    size = f'width="{left + 492}" height="{y + 14}" font-family="sans-serif" font-size="12"'
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
