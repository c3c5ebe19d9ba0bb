"""Resume: stop a run anywhere, and go on exactly there.

A checkpoint holds the model, the optimizer and the step. The step alone says where in the data a run is, because their
order depends on nothing but the seed. `train.py --checkpoint-dir` uses it, and `workers.py` its way with signals.
"""

import contextlib
import fcntl
import glob
import json
import os
import re
import shutil
import signal
import zlib

import tensorflow as tf

KEEP = 3  # checkpoints


class Stopped(Exception):
    """A signal asked the run to stop; `signal` is its number."""

    def __init__(self, number):
        super().__init__(signal.Signals(number).name)
        self.signal = number


@contextlib.contextmanager
def stop_signals():
    """Inside, SIGINT and SIGTERM no longer interrupt; call what it yields, between steps: it raises `Stopped` then.

    The handler takes no lock, as that of a `threading.Event` would: the signal may come while its own thread holds it.
    """
    received = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda caught, _: received.append(caught)) for number in numbers}

    def check():
        if received:
            raise Stopped(received[0])

    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_folder(folder, settings):
    """Takes a checkpoint folder for this run, before anything is trained.

    Args:
      folder: The folder; it is made if there is none.
      settings: A dict of all that must be the same for a run to go on, in values that JSON can hold.

    Returns:
      The lock; another run is refused as long as it is open.

    Raises:
      ValueError: if the folder cannot be written, is in use by another run, or holds a run with other settings.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        lock = open(os.path.join(folder, "lock"), "w")
        _write(os.path.join(folder, "writable"), "")
        os.remove(os.path.join(folder, "writable"))
    except OSError as error:
        raise ValueError(f"{folder}: checkpoints cannot be written there: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(f"{folder}: another run is using it; wait for it, or name another folder") from error
    path = os.path.join(folder, "settings.json")
    settings = json.loads(json.dumps(settings))
    if os.path.exists(path):
        with open(path) as file:
            there = json.load(file)
        for name in {**there, **settings}:
            if there.get(name) != settings.get(name):
                raise ValueError(
                    f"{folder} holds a run with another {name}: {there.get(name)} there, {settings.get(name)} here; "
                    "give the same options, or name another folder"
                )
    elif _saved(folder):
        raise ValueError(f"{folder} holds checkpoints but no settings.json to tell of what: name another folder")
    else:
        _write(path, json.dumps(settings, indent=1))
    return lock


def saved_setting(folder, name, default):
    """A setting of the run that the folder holds; `default` if it holds none."""
    try:
        with open(os.path.join(folder, "settings.json")) as file:
            return json.load(file).get(name, default)
    except OSError:
        return default


def restore(folder, core, optimizer, report=print):
    """Brings model and optimizer to the newest checkpoint that can be read, if there is one.

    Args:
      folder: A folder from `open_folder`.
      core: The Keras model.
      optimizer: Its optimizer, built.
      report: Called with each line about what was found.

    Returns:
      (step, loss, save): the number of steps done and the loss of the last one (0, None for a new run), and
      `save(step, loss)`, which writes a checkpoint and returns whether it could.
    """
    elsewhere = []  # (variable, copy): what is on other devices or machines is saved from here

    def here(variable):
        if variable.value.device.endswith("/job:localhost/replica:0/task:0/device:CPU:0"):
            return variable.value
        with tf.device("/job:localhost/device:CPU:0"):
            elsewhere.append((variable.value, tf.Variable(variable.value, trainable=False)))
        return elsewhere[-1][1]

    state = tf.train.Checkpoint(
        model=[here(variable) for variable in core.variables],
        optimizer=[here(variable) for variable in optimizer.variables],
        step=tf.Variable(0, dtype=tf.int64, trainable=False),
        loss=tf.Variable(0.0, dtype=tf.float64, trainable=False),
    )
    for leftover in glob.glob(os.path.join(glob.escape(folder), "step-*temp*")):
        shutil.rmtree(leftover, ignore_errors=True) if os.path.isdir(leftover) else os.remove(leftover)
    found = None
    for number in sorted(_saved(folder), reverse=True):
        try:
            state.read(os.path.join(folder, f"step-{number}")).assert_consumed()
        except (tf.errors.OpError, ValueError, IndexError, AssertionError) as error:
            report(
                f"checkpoint of step {number} in {folder} cannot be read ({_first_line(error)}); trying the one before"
            )
            _remove(folder, number)
            continue
        for variable, copy in elsewhere:
            variable.assign(copy)
        found = number
        report(f"resuming from step {number}, found in {folder}")
        break
    good = [found or 0]

    def save(step, loss):
        for variable, copy in elsewhere:
            copy.assign(variable)
        state.step.assign(step)
        state.loss.assign(tf.cast(loss, tf.float64))
        try:
            state.write(os.path.join(folder, f"step-{step}"))
        except (tf.errors.OpError, OSError) as error:
            _remove(folder, step)
            report(
                f"checkpoint of step {step} could not be written to {folder} ({_first_line(error)}); "
                f"training goes on, the last good one is that of step {good[0]}"
            )
            return False
        good[0] = step
        for number in sorted(_saved(folder))[:-KEEP]:
            _remove(folder, number)
        return True

    return int(state.step) if found else 0, float(state.loss) if found else None, save


def check_can_save(path):
    """Raises ValueError, before the training, if a model cannot be written to `path` after it."""
    try:
        _write(path + ".tmp", "")
        os.remove(path + ".tmp")
    except OSError as error:
        raise ValueError(f"{path}: the model cannot be written there: {error.strerror}") from error


def save_model(core, path):
    """Writes the model, whole or not at all, in Keras's own format: `keras.models.load_model` needs nothing of ours."""
    unfinished = path.removesuffix(".keras") + ".new.keras"
    try:
        core.save(unfinished)
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(unfinished)
        raise ValueError(f"{path}: the model could not be written: {error.strerror or error}") from error


def checksum(arrays):
    """A number that changes with the data."""
    total = 0
    for array in arrays:
        total = zlib.crc32(array, total)
    return total


def _saved(folder):
    """The steps of the complete checkpoints: TensorFlow writes the index last, and renames it into place."""
    names = (re.fullmatch(r"step-(\d+)\.index", name) for name in os.listdir(folder))
    return [int(name[1]) for name in names if name]


def _remove(folder, step):
    for path in glob.glob(os.path.join(glob.escape(folder), f"step-{step}.*")):
        with contextlib.suppress(OSError):
            os.remove(path)
    shutil.rmtree(os.path.join(folder, f"step-{step}_temp"), ignore_errors=True)


def _write(path, text):
    with open(path + ".new", "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def _first_line(error):
    return (str(getattr(error, "message", None) or error).strip().splitlines() or [type(error).__name__])[0]
