"""Trains the MNIST classifier, on one device or with one tower per device.

    python train.py                                    one device
    python train.py --parallel                         a tower on every GPU; without a GPU, two towers on the CPU
    python train.py --parallel --towers 4              four towers
    python train.py --parallel --asynchronous          towers that do not wait for each other
    python train.py --parallel --data DIR              another data set in MNIST's format, e.g. Fashion-MNIST
    python train.py --parallel --checkpoint-dir DIR    can be stopped at any time; the same command goes on
    python train.py --serve PORT --trusted-network     lends this machine to others, for
    python train.py --parallel --workers HOST:PORT,... a tower on every device of these machines

Serial and parallel training are one loop around two kinds of step. This file wires the others together.
"""

import contextlib
import functools
import signal
import sys
import time
import types

from quiet import quiet_start

QUIET = "--log-device-placement" not in sys.argv  # the placement log is one of the messages held back otherwise
with quiet_start(QUIET):
    import keras
    import numpy as np
    import tensorflow as tf

import mnist
import resume
import watch
import workers
from explain import explain
from fused_adam import FusedAdam
from options import parse_arguments
from placement import CONTROLLER, assign_to_device, check_devices, device_options, tower_devices
from towers import create_asynchronous_optimization, create_parallel_optimization


def main(argv=None):
    """Runs the command line.

    Args:
      argv: The arguments, without the program's name; None: those of the process.

    Returns:
      The exit code: 0 done, 1 a failed run, 2 bad usage or bad input, 128 + n after signal n.
    """
    try:
        options = parse_arguments(argv)
    except SystemExit as stop:  # argparse has said why
        return stop.code
    with contextlib.ExitStack() as opened:
        try:
            if options.serve:
                return workers.serve(options.serve, options.towers)
            job = prepare(options, opened)
        except KeyboardInterrupt:  # later, a signal is waited for at the end of a step
            return fail("stopped by SIGINT before the first step", 128 + signal.SIGINT)
        except workers.Lost as error:
            return fail(error, 1)
        except tf.errors.OpError as error:
            workers.blame(options.machines)
            return fail(error, 2)
        except (ValueError, RuntimeError) as error:
            return fail(error, 2)
        try:
            return train(options, job)
        except resume.Stopped as stop:
            return 128 + stop.signal
        except (tf.errors.OpError, ValueError) as error:
            workers.blame(options.machines)
            return fail(error, 1)


def prepare(options, opened):
    """All that comes before the first step, and all that can be wrong with the arguments and the data."""
    job = types.SimpleNamespace(controllers=options.controller)
    with quiet_start(QUIET):
        device_options(log_placement=options.log_device_placement)
        if options.workers:
            job.devices, job.controllers = workers.connect(options.workers, job.controllers, options.address)
            opened.callback(workers.watch(options.machines))
            if len(job.devices) < (options.towers or 0):
                raise ValueError(f"{options.towers} towers asked for, but the workers have {len(job.devices)} devices")
            job.devices = job.devices[: options.towers]
        else:
            job.devices = tower_devices(options.towers) if options.parallel else []
        check_devices(job.controllers)
    job.towers = len(job.devices) or 1
    job.batches_per_step = 1 if options.asynchronous else job.towers
    job.global_batch = options.batch_size * job.batches_per_step
    if options.workers and options.checkpoint_dir:  # fewer workers than before share what all shared
        saved = resume.saved_setting(options.checkpoint_dir, "global batch", job.global_batch)
        job.global_batch = max(job.batches_per_step, saved)
    job.images = mnist.count_examples(options.data)
    job.test_data = mnist.test_dataset(batch_size=1000, data=options.data)
    job.check_stop = opened.enter_context(resume.stop_signals())
    if options.save:
        resume.check_can_save(options.save)
    if options.deterministic:
        tf.config.experimental.enable_op_determinism()
    if options.explain:
        explain_step(options, job)
    job.core, job.optimizer = build(options, job)

    job.first_step, job.loss, job.save = 0, None, None
    settings = settings_of(options, job)
    if options.checkpoint_dir:
        opened.enter_context(resume.open_folder(options.checkpoint_dir, settings))
        job.first_step, job.loss, job.save = resume.restore(options.checkpoint_dir, job.core, job.optimizer)
    if options.logdir:
        job.board = watch.board(options.logdir, settings, job.first_step if options.checkpoint_dir else None)
    job.training_data = mnist.training_dataset(
        options.epochs, None, job.batches_per_step, options.data, options.seed, job.first_step, 10, job.global_batch
    )
    return job


def build(options, job):
    """The model and its optimizer, variables on the controllers."""
    keras.utils.set_random_seed(options.seed)
    keras.config.set_dtype_policy("mixed_bfloat16" if options.mixed_precision else "float32")
    with assign_to_device(job.devices[0], job.controllers) if job.devices else contextlib.nullcontext():
        core, optimizer = mnist.core_model(), FusedAdam(options.learning_rate)
        optimizer.build(core.trainable_variables)
    return core, optimizer


def train(options, job):
    """Trains, and reports: devices, progress, final loss, images per second, test accuracy."""
    print("variables on:", ", ".join(sorted({short_name(weight.value.device) for weight in job.core.weights})))
    print("work on:", ", ".join(map(short_name, job.devices or [tf.constant(0.0).device])), flush=True)
    total = options.epochs * -(-job.images // job.global_batch)
    show = watch.progress(total)
    saved, accuracy, due = True, None, False

    def after_step(step, loss, rate, at_rest=lambda: True):
        nonlocal saved, due
        show(step, loss, rate)
        if options.logdir and step % watch.EVERY == 0:
            job.board.scalars(step, loss=loss, images_per_s=rate, learning_rate=job.optimizer.learning_rate)
        due = due or bool(options.checkpoint_dir) and (step % options.checkpoint_every == 0 or step == total)
        if due and at_rest():
            saved, due = checkpoint(step, loss), False
        try:
            job.check_stop()
        except resume.Stopped as stop:
            if not options.checkpoint_dir or at_rest():
                explain_stop(stop, step, loss)
                raise

    def checkpoint(step, loss):
        if options.logdir:
            job.board.flush()
        return job.save(step, loss)

    def explain_stop(stop, step, loss):
        how = "nothing was saved: run it with --checkpoint-dir DIR to be able to go on"
        if options.checkpoint_dir and checkpoint(step, loss):
            how = f"the same command goes on from there, with what is in {options.checkpoint_dir}"
        print(f"stopped by {stop} after step {step}; {how}", flush=True)

    def after_epoch(epoch, step):
        nonlocal accuracy
        accuracy = test_accuracy(job.core, job.test_data)
        print(f"epoch {epoch}/{options.epochs}  test accuracy {100 * accuracy:.2f} %", flush=True)
        if options.logdir:
            job.board.scalars(step, test_accuracy=accuracy)

    loss, rate = job.loss, 0.0
    if job.first_step < total:
        batches = tower_batches(job.training_data, job.images, job.global_batch, job.batches_per_step, job.first_step)
        loop = {"images": job.images, "global_batch": job.global_batch, "first_step": job.first_step}
        loop |= {"after_step": after_step, "after_epoch": after_epoch}
        model_fn, variables = mnist.training_model(job.core), job.core.trainable_variables
        if options.parallel:
            if options.logdir:
                loop["first_graph"] = job.board.graph
            training = asynchronous_training if options.asynchronous else parallel_training
            loss, rate = training(model_fn, batches, job.optimizer, job.devices, job.controllers, variables, **loop)
        else:
            loss, rate = serial_training(model_fn, batches, job.optimizer, variables, **loop)
    if options.save:
        resume.save_model(job.core, options.save)
    print(f"final loss: {loss:.4f}")
    print(f"images/s: {rate:.0f}")
    print(f"test accuracy: {100 * (accuracy or test_accuracy(job.core, job.test_data)):.2f} %", flush=True)
    if not saved:
        return fail(f"the end of the run is not saved in {options.checkpoint_dir}: make room, run the same command", 1)
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

    if not optimizer.built:
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


def asynchronous_training(
    model_fn, batches, optimizer, devices=None, controller=CONTROLLER, variables=None, after_step=None, **loop
):
    """Trains with towers that do not wait for each other: `do_training` around the asynchronous step.

    Prints the staleness of the updates in the end: how many updates by other towers each of them was late.

    Args:
      model_fn, optimizer, devices, controller, variables: As for `create_asynchronous_optimization`.
      batches: An iterator over the tower batches, one per step.
      after_step: As for `do_training`; called with `at_rest` as well, see `create_asynchronous_optimization`.
      **loop: What else `do_training` takes.

    Returns:
      What `do_training` returns.
    """
    if loop.get("images"):
        steps_per_epoch = -(-loop["images"] // loop["global_batch"])
        batches = rest_between_epochs(batches, steps_per_epoch, loop.get("first_step", 0))
    input_fn = functools.partial(next, batches)
    train_step = create_asynchronous_optimization(model_fn, input_fn, optimizer, devices, controller, variables)
    if after_step:
        loop["after_step"] = functools.partial(after_step, at_rest=train_step.at_rest)
    with contextlib.closing(train_step):
        loss, rate = do_training(train_step, **loop)
    staleness = train_step.staleness
    mean = sum(late * count for late, count in staleness.items()) / staleness.total()
    print(f"staleness: mean {mean:.2f}, max {max(staleness)}")
    return loss, rate


def rest_between_epochs(batches, steps_per_epoch, first_step):
    """Adds None after the last batch of an epoch: all updates of an epoch come before the first of the next."""
    for step, batch in enumerate(batches, start=first_step + 1):
        yield batch
        if step % steps_per_epoch == 0:
            yield None


def do_training(
    train_step, images=None, global_batch=None, first_step=0, after_step=None, after_epoch=None, first_graph=None
):
    """Calls `train_step` until the data end.

    Args:
      train_step: `train_step() -> loss`; at the end of the data it raises `tf.errors.OutOfRangeError` or StopIteration.
      images, global_batch: Number of images in an epoch and in a step; None if unknown, then there are no epochs.
      first_step: Number of steps already done, by a run that this one goes on with.
      after_step: `after_step(step, loss, rate)`, called after each step. None: progress is printed.
      after_epoch: `after_epoch(epoch, step)`, called after the last step of each epoch.
      first_graph: `first_graph(graph)`, called after the first step with its graph, `train_step.graph()`.

    Returns:
      (loss, rate): the loss of the last step, and images per second without the first step, which also builds the
      graph; steps per second if the number of images is unknown.

    Raises:
      ValueError: if there are no data, or the loss is no longer finite.
    """
    after_step = after_step or watch.progress(None, "images" if images else "steps")
    steps_per_epoch = -(-images // global_batch) if images else None
    step, loss, rate, seen, seconds = first_step, None, 0.0, 0, 0.0

    while True:
        started = time.perf_counter()
        try:
            loss = train_step()
        except (tf.errors.OutOfRangeError, StopIteration):
            break
        step += 1
        if step % 100 == 0:
            check_finite(loss, step)
        if step > first_step + 1:
            seconds += time.perf_counter() - started
            seen += min(global_batch, images - (step - 1) % steps_per_epoch * global_batch) if images else 1
            rate = seen / seconds
        elif first_graph:
            first_graph(train_step.graph())
        if after_epoch and step % steps_per_epoch == 0:
            after_epoch(step // steps_per_epoch, step)
        after_step(step, loss, rate)
    if loss is None:
        raise ValueError("there are no data to train on: the first step found them at an end")
    check_finite(loss, step)
    return float(loss), rate


def check_finite(loss, step):
    """Raises ValueError if the loss is not a number: what follows would be in vain."""
    if not np.isfinite(loss):
        raise ValueError(f"the loss is {float(loss)} after step {step}: try a smaller learning rate")


def tower_batches(dataset, images, global_batch, towers, first_step=0):
    """Iterates over the tower batches of `mnist.training_dataset`, as many per step as there are towers.

    The last step of an epoch may have fewer examples than there are towers, and then has fewer batches: None stands for
    those that are missing, and their towers sit the step out.

    Args:
      dataset: One tower batch per element.
      images, global_batch, towers: Number of images in an epoch and in a step, and of towers.
      first_step: The step that the data set begins with.

    Yields:
      Tower batches, or None.
    """
    full_steps, rest = divmod(images, global_batch)
    per_epoch = full_steps * towers + min(rest, towers)
    before = first_step % (full_steps + bool(rest)) * towers
    for number, batch in enumerate(dataset, start=before + 1):
        yield batch
        if number % per_epoch == 0:
            yield from [None] * (-per_epoch % towers)


def test_accuracy(core, dataset):
    """The share of test images that the model classifies right, from 0 to 1."""
    right, count = 0, 0
    for image, label in dataset:
        right += int(count_right(core, image, label))
        count += len(label)
    return right / count


@tf.function(reduce_retracing=True)
def count_right(core, image, label):
    """How many images of a batch the model classifies right."""
    logits = core(tf.image.convert_image_dtype(image, tf.float32), training=False)
    return tf.reduce_sum(tf.cast(tf.argmax(logits, 1, tf.int32) == label, tf.int32))


def explain_step(options, job):
    """Prints where the time of a parallel step goes; see explain.py."""

    def build_again():
        core, optimizer = build(options, job)
        return mnist.training_model(core), core.trainable_variables, optimizer

    def feed(towers):
        return iter(mnist.training_dataset(1000, options.batch_size, towers, options.data, options.seed))

    explain(build_again, feed, job.devices, job.controllers)


def settings_of(options, job):
    """What must stay the same for a run to be the same run."""
    optimizer = {"class": type(job.optimizer).__name__, **job.optimizer.get_config()}
    return {
        "model": [[weight.path, list(weight.shape), weight.dtype] for weight in job.core.weights],
        "data set (checksum)": resume.checksum(mnist.load(options.data)),
        "seed": options.seed,
        "optimizer": {name: repr(value) for name, value in optimizer.items() if name != "name"},
        "global batch": job.global_batch,
        "mixed precision": options.mixed_precision,
    } | ({"asynchronous": True} if options.asynchronous else {})


def short_name(device):
    """/job:localhost/replica:0/task:0/device:CPU:0 -> CPU:0; with job:worker and task:1 -> worker 1 CPU:0"""
    spec = tf.DeviceSpec.from_string(device)
    where = f"{spec.job} {spec.task} " if spec.job not in (None, "localhost") else ""
    return f"{where}{spec.device_type}:{spec.device_index}"


def fail(error, code):
    print(f"train.py: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
