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

REPEAT, SECONDS = 9, 0.1  # each part is measured so often, and for so long; the median counts
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
      what), "tower" (seconds of one tower's forward and backward pass alone), "expected" (speed-up over one tower with
      as many threads per op, by number of towers, for equal batches per tower), "reached" (the same, as measured for
      these devices) and "verdict", the sentence that names the bottleneck.
    """
    count, shared = len(devices), _shared_cores(devices)
    step, waiting, batch, ops = _time_step(build, feed(count), devices, controllers)
    one = step if count == 1 else _time_step(build, feed(1), devices[:1], controllers)[0]
    batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
    model_fn, variables, optimizer = build()
    idle = _time(tf.function(lambda: tf.constant(0.0), autograph=False))  # what a graph costs that does nothing
    tower, pairs = _time_tower(model_fn, variables, devices[0], batch)
    tower = max(0.0, tower - idle)
    copies = [_copy_to(device, pairs) for device in devices]  # one for each tower: a sum of equals would be a product
    tensors = [(tensor, _device(v)) for copy in copies for g, v in copy for tensor in _dense_parts(g)]
    average = _time(tf.function(lambda: _look(average_gradients(copies)), autograph=False)) - idle
    parts = {
        "waiting for input": waiting,
        "copying weights out": _time_copies([(_value(v), device) for v in variables for device in devices]),
        "copying gradients back": _time_copies(tensors),
        "averaging": max(0.0, average) if count > 1 else 0.0,
        "update": max(0.0, _time_update(optimizer, pairs, variables) - idle),
    }
    # Towers with a processor each take as long as one alone; on shared cores, at most as long as one after another.
    parts = _fit(parts, step, tower * count if shared else tower)

    def expected(towers):
        if towers == 1:
            return 1.0
        grows = sum(parts[part] for part in PER_TOWER) + (parts["forward and backward"] if shared else 0.0)
        return towers * one / (step + grows * (towers / count - 1))

    moved = {
        "weights out": count * _bytes([_value(variable) for variable in variables]),
        "gradients back": _bytes([tensor for tensor, _ in tensors]),
        "input": count * _bytes(_dense_parts(batch)),
    }
    result = {"parts": parts, "step": step, "tower": tower, "bytes": moved, "reached": count * one / step}
    result["expected"] = {towers: expected(towers) for towers in sorted({1, 2, 4, 8, count})}
    overhead = _overhead(ops, devices, controllers)
    result["verdict"] = _verdict(parts, step, overhead, devices, shared)
    _print(result, count, report)
    return result


def _fit(parts, step, compute):
    """The parts of a step, arithmetic and the rest added, so that they sum to it."""
    parts = parts | {"forward and backward": max(0.0, min(step - sum(parts.values()), compute))}
    shrink = step / max(step, sum(parts.values()))  # what overlaps in the step takes longer part by part
    parts = {part: seconds * shrink for part, seconds in parts.items()}
    return parts | {"the runtime, and waiting for each other": max(0.0, step - sum(parts.values()))}


def _verdict(parts, step, overhead, devices, shared):
    """One sentence: the bottleneck, and what would help. `overhead`: seconds of a step that are not the model's."""
    copies = parts["copying weights out"] + parts["copying gradients back"]
    controller = parts["averaging"] + parts["update"]
    runtime = parts["the runtime, and waiting for each other"]
    compute = parts["forward and backward"]
    worst = max(
        (parts["waiting for input"], "input"), (copies, "copies"), (controller, "controller"), (runtime, "runtime")
    )
    if worst[1] != "input" and overhead > (step - parts["waiting for input"]) / 3:
        worst = (runtime, "runtime")  # whatever part it shows in: the ops of a small model cost more than their work
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
    report(f"  {'(one tower alone, forward and backward)':42} {1e3 * result['tower']:9.2f} ms")
    for what, size in result["bytes"].items():
        report(f"  {what + ', moved per step':42} {size / 1e6:9.2f} MB")
    report(f"speed-up over one tower with as many threads per op, reached with {count}: {result['reached']:.2f}")
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
    while len(times) < REPEAT + 2 or sum(times[2:]) < SECONDS:
        started = time.perf_counter()
        result = call()
        tf.nest.map_structure(lambda x: x.numpy() if x.shape.rank == 0 else None, result)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def _time_step(build, batches, devices, controllers):
    """(seconds of a step, seconds of it spent waiting for input, the last batch, the number of its ops)."""
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
    return seconds, statistics.median(waited[2 * len(devices) :]) * len(devices), last, _count_ops(step)


def _time_tower(model_fn, variables, device, batch):
    """(seconds of one tower's forward and backward pass alone, its (gradient, variable) pairs)."""
    values = [_value(variable) for variable in variables]

    @tf.function
    def tower(batch):
        with tf.device(device), tf.GradientTape() as tape:
            loss = model_fn(lambda: batch)
            gradients = tape.gradient(loss, values)
        return loss, gradients

    seconds = _time(lambda: tower(batch)[0])
    return seconds, [pair for pair in zip(tower(batch)[1], variables) if pair[0] is not None]


def _time_copies(moves):
    """Seconds to bring each tensor to its target, beyond what it takes to bring as many single numbers there."""
    targets = [target for _, target in moves]
    numbers = []
    for tensor, _ in moves:
        with tf.device(tensor.device):
            numbers.append(tf.zeros([]))

    def bring(tensors):
        looks = []
        for tensor, target in zip(tensors, targets):
            with tf.device(target):
                looks.append(_first(tf.convert_to_tensor(tensor)))
        return looks

    whole, single = (
        tf.function(lambda which=which: bring(which), autograph=False)
        for which in ([tensor for tensor, _ in moves], numbers)
    )
    return max(0.0, _time(whole) - _time(single))


def _time_update(optimizer, pairs, variables):
    """Seconds of an update by the optimizer."""
    if hasattr(optimizer, "build") and not optimizer.built:
        optimizer.build(variables)
    elif not hasattr(optimizer, "build"):  # one of tf.compat.v1.train
        pairs = [(gradient, _value(variable)) for gradient, variable in pairs]

    def update():
        optimizer.apply_gradients(pairs)
        return tf.constant(0.0)

    return _time(tf.function(update, autograph=False))


def _overhead(ops, devices, controllers):
    """Seconds that a step of so many ops takes if they have nothing to work on: the least step, and the other ops."""
    with tf.device(controllers[0]):
        weight, one = tf.Variable(0.0), tf.ones([1])
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.0)
    least = create_parallel_optimization(
        lambda input_fn: weight * tf.reduce_mean(input_fn()), lambda: one, optimizer, devices, controllers, [weight]
    )

    def chain(length):
        x = tf.identity(weight)
        for _ in range(length):
            x = tf.sin(x)
        return x

    many, few = (_time(tf.function(lambda n=n: chain(n), autograph=False)) for n in (1000, 1))
    return _time(least) + max(0, ops - _count_ops(least)) * max(0.0, many - few) / 999


def _count_ops(step):
    """How many ops of a step's graph are run, about: constants and the like are not."""
    return sum(op.type not in ("Const", "Identity", "NoOp", "Placeholder") for op in step.graph().get_operations())


def _copy_to(device, pairs):
    """The pairs with gradients of their own on the device."""
    with tf.device(device):
        own = [tf.nest.map_structure(lambda t: t + tf.zeros([], t.dtype), g, expand_composites=True) for g, _ in pairs]
    return [(gradient, variable) for gradient, (_, variable) in zip(own, pairs)]


def _look(average):
    """A number of each averaged gradient, so that all are computed and none need be brought to Python."""
    return [_first(tensor) for gradient, _ in average for tensor in _dense_parts(gradient)]


def _first(tensor):
    return tf.cast(tf.reshape(tensor, [-1])[0], tf.float32)


def _dense_parts(nest):
    return tf.nest.flatten(nest, expand_composites=True)


def _bytes(tensors):
    return sum(int(tf.size(tensor)) * tensor.dtype.size for tensor in tensors)


def _value(variable):
    return getattr(variable, "value", variable) if not isinstance(variable, tf.Variable) else variable


def _device(variable):
    return _value(variable).device
