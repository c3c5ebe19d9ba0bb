"""Placement: which device holds what.

Variables live on the controller, everything else runs on the tower's device; an inner `tf.device` has the last word.
`towers.py` runs one copy of the model inside each `assign_to_device` scope; this file knows nothing of towers.
"""

import contextlib
import functools
import os
import threading

import tensorflow as tf

CONTROLLER = "/CPU:0"
_placed = threading.local()  # .now: a scope further in is placing a variable
_own_threads = 0  # threads per op as `tower_devices` has set them


@contextlib.contextmanager
def assign_to_device(device, controller=CONTROLLER):
    """Creates variables on `controller` and runs every other op on `device`.

    Works eagerly and in a `tf.function`, for everything that is a `tf.Variable` in the end: Keras layers (built before
    or lazily), `tf.Module`, optimizer slots. An inner `with tf.device(...)` is respected, for variables too (unless it
    names the very device of this scope: that looks like none). A lookup table is an op, not a variable: it is made on
    `device` (or where an inner scope says), and looked up where it is. Build a Keras optimizer before a `tf.function`,
    not in it: there Keras makes slots on the device in scope.

    Args:
      device: Where ops run, as `tf.device` takes it: "/GPU:0", "/job:worker/task:1/device:CPU:0".
      controller: Where variables are created; one device, or a list of them. A list shares the load: each new variable
        goes to the device that holds the fewest bytes so far (the first of them, if equal).

    Yields:
      Nothing; use it in a `with` statement.

    Raises:
      ValueError: if `controller` is an empty list.

    Source: TensorFlow 1's `replica_device_setter`, and the device function of every article on towers. `tf.device` no
      longer takes functions, so the hook is `tf.variable_creator_scope`. It sees resource variables and leaves inner
      scopes alone, which device functions did not (tensorflow#35952, DeepRec#932).
    """
    load = dict.fromkeys([controller] if isinstance(controller, str) else controller, 0)  # device -> bytes it holds
    if not load:
        raise ValueError("controller is an empty list: name at least one device to hold the variables")

    def create_on_controller(next_creator, **kwargs):
        here = _current_device()
        asked_for = device is None and not tf.executing_eagerly() and here != tf.DeviceSpec()  # a graph knows of none
        if getattr(_placed, "now", False) or asked_for or _conflict(here, outer):
            return next_creator(**kwargs)
        least_loaded = min(load, key=load.get)
        _placed.now = True
        try:
            with tf.device(least_loaded):
                variable = next_creator(**kwargs)
        finally:
            _placed.now = False
        load[least_loaded] += (variable.shape.num_elements() or 0) * variable.dtype.size
        return variable

    with tf.device(device):
        outer = _current_device()
        with tf.variable_creator_scope(create_on_controller):
            yield


def check_devices(devices):
    """Raises ValueError if a device does not exist: with soft placement TensorFlow would quietly take another one."""
    there = [device.name for device in tf.config.list_logical_devices()]
    here = tf.DeviceSpec.from_string("/job:localhost/replica:0/task:0")  # what the names of its own devices leave out
    known = [here.make_merged_spec(tf.DeviceSpec.from_string(name)) for name in there]
    for device in devices:
        try:
            spec = tf.DeviceSpec.from_string(device)
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{device!r} is not the name of a device: write, for instance, /CPU:0 or /GPU:1"
            ) from error
        if all(_conflict(spec, other) for other in known):
            raise ValueError(f"there is no device {device}; there are {', '.join(there)}")


def _current_device():
    """The device scope in force, as a `DeviceSpec`. TensorFlow has no public getter, but every tensor tells."""
    return tf.DeviceSpec.from_string(tf.constant(0.0).device)


def _conflict(inner, outer):
    """True if both scopes name a job, task or device and the names differ: then the inner one was asked for."""
    fields = ("job", "replica", "task", "device_type", "device_index")
    pairs = [(getattr(inner, field), getattr(outer, field)) for field in fields]
    return any(a is not None and b is not None and a != b for a, b in pairs)


def get_available_gpus():
    """Names the logical GPUs, in order, e.g. ["/device:GPU:0", "/device:GPU:1"]. Without a GPU: [].

    Where there is a GPU this starts TensorFlow's devices, so `tower_devices` and `device_options` come first.
    """
    if not tf.config.list_physical_devices("GPU"):
        return []
    return [device.name for device in tf.config.list_logical_devices("GPU")]


def tower_devices(count=None):
    """Names one device per tower: the GPUs or, where there is none, logical CPU devices beside the controller's.

    GPUs that are not asked for are hidden from TensorFlow, which would otherwise take their memory as well
    (tensorflow#31410). Logical CPU devices share the processor, but TensorFlow places, copies and schedules for them
    as it does for GPUs: what runs on two of them runs on two GPUs. Unless `device_options` has set it, an op then uses
    cores / towers threads, and each tower can have an op under way, so that none queues behind another's.

    Call it before anything else in TensorFlow: the first op starts the devices, and then their number is fixed. A later
    call is fine as long as the devices it asks for exist.

    Args:
      count: How many towers; None means all GPUs or, without a GPU, two.

    Returns:
      A list of `count` device names, e.g. ["/device:CPU:1", "/device:CPU:2"].

    Raises:
      ValueError: if `count` is not a whole number of at least 1, or there are fewer GPUs (it says how many there are).
      RuntimeError: if TensorFlow has started its devices already and they do not suffice.
    """
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(f"the number of towers must be a whole number of at least 1, not {count!r}")
    gpus = tf.config.get_visible_devices("GPU")
    return _gpu_towers(gpus, count) if gpus else _cpu_towers(count or 2)


def _gpu_towers(gpus, count):
    split = [len(tf.config.get_logical_device_configuration(gpu) or [gpu]) for gpu in gpus]  # logical per physical GPU
    if count is None:
        count = sum(split)
    if count > sum(split):
        raise ValueError(f"{count} towers asked for, but there are {sum(split)} GPUs: ask for {sum(split)} or fewer")
    needed = next(n for n in range(1, len(gpus) + 1) if sum(split[:n]) >= count)
    if needed < len(gpus):
        _before_start(
            lambda: tf.config.set_visible_devices(gpus[:needed], "GPU"), f"{count} of {sum(split)} GPUs asked for"
        )
    return get_available_gpus()[:count]


def _cpu_towers(count):
    global _own_threads
    cpu = tf.config.get_visible_devices("CPU")[0]
    there = len(tf.config.get_logical_device_configuration(cpu) or [cpu])
    if there < count + 1:
        _before_start(
            lambda: tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count + 1)]
            ),
            f"{count} CPU towers asked for and there are {there - 1} beside the controller",
        )
        cores = os.cpu_count() or 1
        if tf.config.threading.get_intra_op_parallelism_threads() in (0, _own_threads):  # not set by the user
            _own_threads = max(1, cores // count)
            tf.config.threading.set_intra_op_parallelism_threads(_own_threads)
            tf.config.threading.set_inter_op_parallelism_threads(max(count, cores))
    return [f"/device:CPU:{i}" for i in range(1, count + 1)]


def device_options(soft_placement=True, log_placement=False, memory_growth=True, threads=None):
    """Sets TensorFlow's device options: what `tf.ConfigProto` was in TensorFlow 1. Call it before any other op.

    Args:
      soft_placement: If True, an op that its device cannot run falls back to one that can; if False, it is an error.
      log_placement: If True, TensorFlow writes the device of every op to stderr.
      memory_growth: If True, GPU memory is taken as needed; if False, all of it at once.
      threads: Number of threads one op may use on the CPU; None leaves the default, see `tower_devices`.

    Raises:
      ValueError: if `threads` is not a whole number of at least 1.
      RuntimeError: if TensorFlow has started its devices already.
    """
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads must be a whole number of at least 1, not {threads!r}")
    tf.config.set_soft_device_placement(soft_placement)
    tf.debugging.set_log_device_placement(log_placement)
    for gpu in tf.config.get_visible_devices("GPU"):
        if not tf.config.get_logical_device_configuration(gpu):  # a GPU split by hand has fixed shares of memory
            grow = functools.partial(tf.config.experimental.set_memory_growth, gpu, memory_growth)
            _before_start(grow, "memory growth asked for")
    if threads is not None:
        _before_start(
            lambda: tf.config.threading.set_intra_op_parallelism_threads(threads), f"{threads} threads asked for"
        )


def _before_start(configure, what):
    try:
        configure()
    except RuntimeError as error:
        raise RuntimeError(
            f"too late: {what}, but TensorFlow has already started its devices; "
            "call tower_devices() and device_options() first, before any tensor, variable or model is made"
        ) from error
