"""Trains the MNIST classifier, on one device or with one tower per device.

    python train.py                          one device
    python train.py --parallel               a tower on every GPU; without a GPU, two towers on the CPU
    python train.py --parallel --towers 4    four towers
    python train.py --parallel --data DIR    another data set in MNIST's format, e.g. Fashion-MNIST

Serial and parallel training are one loop around two kinds of step. This file wires the others together.
"""

import argparse
import contextlib
import functools
import sys
import time

from quiet import quiet_start

QUIET = (
    "--log-device-placement" not in sys.argv
)  # the placement log is one of the messages that are held back otherwise
with quiet_start(QUIET):
    import keras
    import numpy as np
    import tensorflow as tf

import mnist
from explain import explain
from fused_adam import FusedAdam
from placement import CONTROLLER, assign_to_device, check_devices, device_options, tower_devices
from towers import create_parallel_optimization


def main(argv=None):
    """Runs the command line.

    Args:
      argv: The arguments, without the program's name; None: those of the process.

    Returns:
      The exit code: 0 done, 1 a failed run, 2 bad usage or bad input.
    """
    try:
        options = parse_arguments(argv)
    except SystemExit as stop:  # argparse has said why
        return stop.code
    controllers = options.controller.split(",")
    try:
        with quiet_start(QUIET):
            device_options(log_placement=options.log_device_placement)
            devices = tower_devices(options.towers) if options.parallel else []
            check_devices(controllers)
        towers = len(devices) or 1
        images = mnist.count_examples(options.data)
        training_data = mnist.training_dataset(options.epochs, options.batch_size, towers, options.data, options.seed)
        test_data = mnist.test_dataset(batch_size=1000, data=options.data)
    except (ValueError, RuntimeError) as error:
        return fail(error, 2)

    def build():
        keras.utils.set_random_seed(options.seed)
        keras.config.set_dtype_policy("mixed_bfloat16" if options.mixed_precision else "float32")
        with assign_to_device(devices[0], controllers) if devices else contextlib.nullcontext():
            return mnist.core_model(), FusedAdam(options.learning_rate)

    core, optimizer = build()
    model_fn = mnist.training_model(core)
    batches = tower_batches(training_data, images, options.batch_size, towers)
    print("variables on:", ", ".join(sorted({short_name(weight.value.device) for weight in core.weights})))
    print("work on:", ", ".join(map(short_name, devices or [tf.constant(0.0).device])), flush=True)

    if options.explain:
        explain_step(build, options, devices, controllers)
    loop = {"epochs": options.epochs, "images": images, "global_batch": options.batch_size * towers}
    try:
        if options.parallel:
            loss, rate = parallel_training(model_fn, batches, optimizer, devices, controllers, **loop)
        else:
            loss, rate = serial_training(model_fn, batches, optimizer, core.trainable_variables, **loop)
        accuracy = test_accuracy(core, test_data)
    except (tf.errors.OpError, ValueError) as error:
        return fail(error, 1)
    print(f"final loss: {loss:.4f}")
    print(f"images/s: {rate:.0f}")
    print(f"test accuracy: {100 * accuracy:.2f} %")
    return 0


def serial_training(model_fn, batches, optimizer, variables, **loop):
    """Trains on one device: `do_training` around the plain step.

    Args:
      model_fn: `model_fn(input_fn) -> loss`, a scalar, the mean over the batch.
      batches: An iterator over the batches; each is a whole global batch.
      optimizer: A Keras optimizer.
      variables: The variables to train.
      **loop: What else `do_training` takes.

    Returns:
      What `do_training` returns.
    """

    @tf.function(reduce_retracing=True)
    def update(batch):
        with tf.GradientTape() as tape:
            loss = model_fn(lambda: batch)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    optimizer.build(variables)
    return do_training(lambda: update(next(batches)), **loop)


def parallel_training(model_fn, batches, optimizer, devices=None, controller=CONTROLLER, variables=None, **loop):
    """Trains with one tower per device: `do_training` around the parallel step.

    Args:
      model_fn, optimizer, devices, controller, variables: As for `create_parallel_optimization`.
      batches: An iterator over the tower batches, as many per step as there are devices; see `tower_batches`.
      **loop: What else `do_training` takes.

    Returns:
      What `do_training` returns.
    """
    input_fn = functools.partial(next, batches)
    train_step = create_parallel_optimization(model_fn, input_fn, optimizer, devices, controller, variables)
    return do_training(train_step, **loop)


def do_training(train_step, epochs=None, images=None, global_batch=None, report=print):
    """Calls `train_step` until the data end, and reports every 100 steps.

    Args:
      train_step: `train_step() -> loss`; at the end of the data it raises `tf.errors.OutOfRangeError` or StopIteration.
      epochs, images, global_batch: Number of epochs, of images in an epoch, and of images in a step, to
        tell how far the training is and how fast. None: unknown.
      report: Called with each line of the report.

    Returns:
      (loss, rate): the last step's loss, and images per second without the first step, which also builds the graph; in
      steps per second if `images` is unknown.

    Raises:
      ValueError: if there are no data, or the loss is no longer finite.
    """
    steps_per_epoch = -(-images // global_batch) if images else None
    total = f"/{epochs * steps_per_epoch}" if images and epochs else ""
    step, loss, started = 0, None, None

    def rate():
        seen = (
            (step // steps_per_epoch) * images + (step % steps_per_epoch) * global_batch - first if images else step - 1
        )
        return seen / max(time.perf_counter() - started, 1e-9)

    def check(loss):
        if loss is None:
            raise ValueError("there are no data to train on: the first step found them at an end")
        if not np.isfinite(loss):
            raise ValueError(f"the loss is {float(loss)} after step {step}: try a smaller learning rate")

    while True:
        try:
            loss = train_step()
        except (tf.errors.OutOfRangeError, StopIteration):
            break
        step += 1
        if started is None:
            started, first = time.perf_counter(), min(images or 0, global_batch or 0)
        if step % 100 == 0:
            check(loss)
            report(f"step {step}{total}  loss {float(loss):.4f}  {rate():.0f} {'images' if images else 'steps'}/s")
    check(loss)
    return float(loss), rate()


def tower_batches(dataset, images, batch_size, towers):
    """Iterates over the tower batches of `mnist.training_dataset`, as many per step as there are towers.

    The last step of an epoch may have fewer examples than there are towers, and then has fewer batches: None stands for
    those that are missing, and their towers sit the step out.

    Args:
      dataset: One tower batch per element.
      images, batch_size, towers: Number of images in an epoch, in a tower batch, and of towers.

    Yields:
      Tower batches, or None.
    """
    global_batch = batch_size * towers
    full_steps, rest = divmod(images, global_batch)
    batches_per_epoch = full_steps * towers + min(rest, towers)
    for number, batch in enumerate(dataset, start=1):
        yield batch
        if number % batches_per_epoch == 0:
            yield from [None] * (-batches_per_epoch % towers)


def test_accuracy(core, dataset):
    """The share of test images that the model classifies right, from 0 to 1."""

    @tf.function(reduce_retracing=True)
    def count_right(image, label):
        logits = core(tf.image.convert_image_dtype(image, tf.float32), training=False)
        return tf.reduce_sum(tf.cast(tf.argmax(logits, 1, tf.int32) == label, tf.int32))

    right, count = 0, 0
    for image, label in dataset:
        right += int(count_right(image, label))
        count += len(label)
    return right / count


def explain_step(build, options, devices, controllers):
    """Prints where the time of a step goes; see explain.py."""

    def build_again():
        core, optimizer = build()
        return mnist.training_model(core), core.trainable_variables, optimizer

    def feed(towers):
        return iter(mnist.training_dataset(1000, options.batch_size, towers, options.data, options.seed))

    explain(build_again, feed, devices, controllers)


def parse_arguments(argv):
    """The command line; argparse prints what is wrong with it and exits with code 2."""
    parser = argparse.ArgumentParser(prog="train.py", description="Trains the MNIST classifier, serially or on towers.")
    add = parser.add_argument
    add("--parallel", action="store_true", help="one tower per device, instead of one device")
    add("--towers", type=positive(int), metavar="N", help="number of towers (default: all GPUs; without a GPU, 2)")
    add("--controller", default=CONTROLLER, metavar="DEV", help="device that holds the variables, or several: A,B")
    add("--epochs", type=positive(int), default=2, metavar="N", help="passes over the data (default: 2)")
    add("--batch-size", type=positive(int), default=128, metavar="N", help="images per tower and step (default: 128)")
    add("--learning-rate", type=positive(float), default=1e-3, metavar="X", help="Adam's (default: 0.001)")
    add("--data", default=mnist.DATA, metavar="DIR", help="folder of the four MNIST files (default: data)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the weights and of the order (default: 0)")
    add("--mixed-precision", action="store_true", help="compute in bfloat16, keep the weights in float32")
    add("--explain", action="store_true", help="first measure where the time of a parallel step goes")
    add("--log-device-placement", action="store_true", help="log the device of every op")
    options = parser.parse_args(argv)
    for name in ("towers", "controller", "explain"):
        if getattr(options, name) != parser.get_default(name) and not options.parallel:
            parser.error(f"--{name} needs --parallel")
    return options


def positive(number):
    """An argparse type: a finite number above zero."""

    def parse(text):
        value = number(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    parse.__name__ = f"positive {number.__name__}"  # argparse says: invalid positive int value: '0'
    return parse


def short_name(device):
    """/job:localhost/replica:0/task:0/device:CPU:0 -> CPU:0; what is not on this machine keeps its job and task."""
    return device.removeprefix("/job:localhost/replica:0/task:0").removeprefix("/device:").removeprefix("/")


def fail(error, code):
    print(f"train.py: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
