"""Explain: where the time of a step goes, what moves, and what more towers would bring.

Every part of a step is measured by itself, on a model and an optimizer made for the purpose: training is not touched.
`train.py --explain` calls it; nothing else needs it.
"""

import os
import statistics
import time

import tensorflow as tf

from averaging import average_gradients
from towers import create_parallel_optimization

REPEAT = 9  # measurements of each part; the median counts
PER_TOWER = ("waiting for input", "copying weights out", "copying gradients back", "averaging")  # grow with the towers


def explain(build, feed, devices, controllers, report=print):
    """Measures a parallel step part by part, and reports it.

    Args:
      build: `build() -> (model_fn, variables, optimizer)`, made anew at each call, on the controllers.
      feed: `feed(towers) -> iterator` over tower batches.
      devices: The towers' devices.
      controllers: The devices that hold the variables.
      report: Called with each line of the report.

    Returns:
      A dict: "parts" (seconds per step by part; they sum to "step"), "step" (seconds), "bytes" (moved per step, by
      what), "expected" (speed-up over one tower by number of towers, for equal batches per tower), "reached" (the same,
      as measured for these devices) and "verdict", the sentence that names the bottleneck.
    """
    count, shared = len(devices), _shared_cores(devices)
    step, waiting, batch = _time_step(build, feed(count), devices, controllers)
    one = step if count == 1 else _time_step(build, feed(1), devices[:1], controllers)[0]
    batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
    model_fn, variables, optimizer = build()
    idle = _time(tf.function(lambda: tf.constant(0.0)))  # what a graph costs that does nothing
    compute, gradients = _time_tower(model_fn, variables, devices[0], batch)
    compute = max(0.0, compute - idle)
    values = [getattr(variable, "value", variable) for variable in variables]
    dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
    parts = {
        "waiting for input": waiting,
        "copying weights out": _time_copies(values, [controllers[0]], devices),
        "copying gradients back": _time_copies(dense, devices, [controllers[0]]),
        "averaging": max(0.0, _time(tf.function(lambda: _average(dense, values, count))) - idle) if count > 1 else 0.0,
        "update": max(0.0, _time_update(optimizer, dense, variables) - idle),
    }
    # Towers with a processor each take as long as one alone; on shared cores, at most as long as one after another.
    rest = step - sum(parts.values())
    parts["forward and backward"] = max(0.0, min(rest, compute * count if shared else compute))
    parts["the runtime, and waiting for each other"] = step - sum(parts.values())

    def expected(towers):
        if towers == 1:
            return 1.0
        grows = sum(parts[part] for part in PER_TOWER) + (parts["forward and backward"] if shared else 0.0)
        return towers * one / (step + grows * (towers / count - 1))

    size = sum(int(tf.size(value)) * value.dtype.size for value in values)
    moved = {
        "weights out": count * size,
        "gradients back": count * size,
        "input": count * sum(int(tf.size(leaf)) * leaf.dtype.size for leaf in tf.nest.flatten(batch)),
    }
    result = {"parts": parts, "step": step, "bytes": moved, "reached": count * one / step}
    result["expected"] = {towers: expected(towers) for towers in sorted({1, 2, 4, 8, count})}
    result["verdict"] = _verdict(parts, step, idle, devices, shared)
    _print(result, count, report)
    return result


def _verdict(parts, step, idle, devices, shared):
    """One sentence: the bottleneck, and what would help."""
    copies = parts["copying weights out"] + parts["copying gradients back"]
    controller = parts["averaging"] + parts["update"]
    runtime = parts["the runtime, and waiting for each other"]
    compute = parts["forward and backward"]
    worst = max(
        (parts["waiting for input"], "input"), (copies, "copies"), (controller, "controller"), (runtime, "runtime")
    )
    if worst[1] != "input" and step - parts["waiting for input"] < 10 * idle:
        worst = (runtime, "runtime")  # a step that costs no more than a few empty graphs is nothing but overhead
    elif worst[0] < 0.25 * step or worst[0] < 0.5 * compute:
        worst = (compute, "compute")
    if worst[1] == "compute":
        help_ = (
            f"the towers share {shared} cores, more towers bring little, more cores would"
            if shared
            else "more towers would help"
        )
        verdict = f"The bottleneck is the arithmetic of the model: {help_}."
    else:
        verdict = {
            "input": "The bottleneck is the input: a faster pipeline would help, more towers would not.",
            "copies": "The bottleneck is copying between controller and towers: a larger batch per tower would help, "
            "or a controller nearer to the towers.",
            "controller": "The bottleneck is averaging and updating on the controller: a larger batch per tower would "
            "help, or several controllers.",
            "runtime": "The bottleneck is the overhead of the runtime, the model is too small for its towers: a larger "
            "batch per tower would help, more towers would not.",
        }[worst[1]]
    if any("GPU" in device for device in devices):
        verdict += " On GPUs, check the PCIe width (nvidia-smi --query-gpu=pcie.link.width.current --format=csv)."
    return verdict


def _print(result, count, report):
    report(f"a step of {count} towers takes {1e3 * result['step']:.2f} ms:")
    for part, seconds in result["parts"].items():
        report(f"  {part:42} {1e3 * seconds:9.2f} ms  {100 * seconds / result['step']:5.1f} %")
    for what, size in result["bytes"].items():
        report(f"  {what + ', moved per step':42} {size / 1e6:9.2f} MB")
    report(f"speed-up over one tower, reached with {count}: {result['reached']:.2f}")
    expected = ", ".join(f"{speed:.2f} with {towers}" for towers, speed in result["expected"].items() if towers > 1)
    report(f"speed-up over one tower, expected: {expected}")
    report(result["verdict"])


def _shared_cores(devices):
    """The cores that the towers share, if they are all on this machine's CPU; 0 if each has a processor of its own."""
    local = all("CPU" in device.upper() and "job:" not in device.replace("job:localhost", "") for device in devices)
    return os.cpu_count() if local else 0


def _time(call):
    """Median seconds of a call, after two to warm up. Results are waited for."""
    times = []
    for _ in range(REPEAT + 2):
        started = time.perf_counter()
        result = call()
        tf.nest.map_structure(lambda x: x.numpy() if x.shape.rank == 0 else None, result)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def _time_step(build, batches, devices, controllers):
    """(seconds of a step, seconds of it spent waiting for input, the last batch)."""
    model_fn, variables, optimizer = build()
    waited, last = [], None

    def input_fn():
        nonlocal last
        started = time.perf_counter()
        last = next(batches)
        waited.append(time.perf_counter() - started)
        return last

    step = create_parallel_optimization(model_fn, input_fn, optimizer, devices, controllers, variables)
    seconds = _time(step)
    return seconds, statistics.median(waited[2 * len(devices) :]) * len(devices), last


def _time_tower(model_fn, variables, device, batch):
    """(seconds of one tower's forward and backward pass alone, its gradients)."""
    values = [getattr(variable, "value", variable) for variable in variables]

    @tf.function
    def tower(batch):
        with tf.device(device), tf.GradientTape() as tape:
            loss = model_fn(lambda: batch)
            gradients = tape.gradient(loss, values)
        return loss, [tf.zeros_like(value) if g is None else g for g, value in zip(gradients, values)]

    return _time(lambda: tower(batch)[0]), tower(batch)[1]


def _time_copies(tensors, sources, targets):
    """Seconds to bring the tensors from each source to each target, beyond what it takes to bring a single number."""

    def copy(tensors):
        looks = []
        for source in sources:
            for target in targets:
                with tf.device(source):
                    here = [tf.identity(tensor) for tensor in tensors]
                with tf.device(target):
                    looks.append(tf.add_n([tf.cast(tf.reshape(tensor, [-1])[0], tf.float32) for tensor in here]))
        return looks

    number = [tf.constant(0.0)]
    return max(0.0, _time(tf.function(lambda: copy(tensors))) - _time(tf.function(lambda: copy(number))))


def _average(gradients, values, count):
    average = average_gradients([list(zip(gradients, values))] * count)
    return [tf.reshape(gradient, [-1])[0] for gradient, _ in average]


def _time_update(optimizer, gradients, variables):
    gradients = [tf.zeros_like(gradient) for gradient in gradients]

    @tf.function
    def update():
        optimizer.apply_gradients(zip(gradients, variables))
        return tf.constant(0.0)

    if hasattr(optimizer, "build") and not optimizer.built:
        optimizer.build(variables)
    return _time(update)
