"""Asynchronous: towers that do not wait for each other.

Each tower takes a batch and the weights of the moment; its gradients are applied, by themselves, as soon as they are
there. Built from the towers of `towers.py`; `train.py --asynchronous` uses it, nothing else needs it.
"""

import collections
import concurrent.futures

import keras
import tensorflow as tf

from placement import CONTROLLER, check_devices, tower_devices
from towers import (
    _build_optimizer,
    _check_batch,
    _check_caller,
    _check_frozen,
    _check_optimizer,
    _fits,
    _reason,
    _replicate,
    _tf_variable,
    _trace_tower,
    _widen,
)

# What a tower is at work on: its number, how many updates its weights have seen, the scale of its loss, the update.
Work = collections.namedtuple("Work", "number seen scale update")


def create_asynchronous_optimization(
    model_fn, input_fn, optimizer, devices=None, controller=CONTROLLER, variables=None
):
    """Builds asynchronous training: `train_step()` applies the gradients of the next tower that has some.

    Towers compute in threads of their own. All else happens inside `train_step`, in the caller's thread: it gives every
    idle tower a batch and the weights, waits for the first tower to be done, and updates with its gradients alone.
    Hence the rules:

    - An update is one tower's gradients, whole, at the learning rate as it is: N towers take N steps where synchronous
      towers take one with the mean. With one tower it is serial training.
    - A tower computes on a copy of the weights as they were between two updates; none is half written. A trainable
      variable that the model itself writes to is not copied.
    - Staleness of an update: the number of updates by other towers since its tower got the weights. A tower's own
      updates are all in the weights it gets. With N towers at work the mean is near N - 1, however slow one of them
      is: each update adds one to the staleness of the N - 1 others. A slow tower shows in the maximum.
    - Nothing happens between two calls but computation: the weights after call k have seen k updates, always.
    - State that the model itself updates (moving averages, seeds of dropout) is shared and written by each tower when
      it gets there. If two do at once, the later may undo what the earlier did, and masks may repeat.

    Args:
      model_fn, optimizer, devices, controller, variables: As for `create_parallel_optimization`.
      input_fn: Returns the batch of the tower that is idle. Called in the caller's thread, one call at a time. None: no
        batch for now; towers at work finish theirs, all of them, before it is called again.

    Returns:
      `train_step() -> loss`: does one update; the loss is its tower's, on the weights which that tower had.
      `train_step.staleness` counts updates by staleness, `train_step.updates` by tower.
      `train_step.at_rest()` tells whether every batch taken has been applied; if not, no tower takes another until that
      is so: ask again after the next step. It is the moment for a checkpoint.
      `train_step.graph()` is the graph of the first tower.
      `train_step.close()` waits for the towers at work and drops what they computed. To forget `train_step` is enough
      to have its threads end, each after its batch.

    Raises:
      ValueError: As for `create_parallel_optimization`.
      tf.errors.OutOfRangeError: By `train_step`, when all batches taken have been applied and the data have ended:
        `input_fn` raised it, or StopIteration, or returned None more often in a row than there are towers.
      tf.errors.OpError: By `train_step`, if an op of a tower fails; the message names the tower. The others are waited
        for and what they computed is dropped; every later call raises the same error.

    Source: asynchronous replicas, as in TensorFlow 1's `replica_device_setter` without a `SyncReplicasOptimizer`.
    """
    devices = tower_devices() if devices is None else list(devices)
    controllers = [controller] if isinstance(controller, str) else list(controller)
    if not devices or not controllers:
        raise ValueError("devices and controller must each name at least one device")
    check_devices(devices + controllers)
    _check_optimizer(optimizer)
    spec, tower, update, graphs = None, None, None, {}  # the kind of batch, the tower of it, and what is built of that
    running, resting, ended, failure = {}, False, None, None  # running: what is being computed -> Work
    staleness, updates = collections.Counter(), [0] * len(devices)
    pool = concurrent.futures.ThreadPoolExecutor(len(devices), "tower")

    def train_step():
        nonlocal failure, resting
        _check_caller()
        if failure:
            raise failure
        resting = resting and bool(running)
        for number in sorted(set(range(len(devices))) - {work.number for work in running.values()}):
            batch = None if resting else next_batch()
            if batch is None:
                resting = True
                break
            start(number, batch)
        done, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
        first = min(done, key=lambda future: running[future].seen)  # of several, the one with the oldest weights
        work = running.pop(first)
        try:
            loss, gradients = first.result()
            work.update(gradients, work.scale)
        except Exception as error:
            failure = error
            if isinstance(error, tf.errors.OpError):
                message = f"tower {work.number} ({devices[work.number]}) failed: {_reason(error)}"
                failure = type(error)(error.node_def, error.op, message)
            close()
            raise failure from error
        staleness[sum(updates) - work.seen] += 1
        updates[work.number] += 1
        return loss

    def next_batch():
        """The next batch; None if there is none before the towers at work are done."""
        nonlocal ended
        for _ in range(len(devices) + 1):
            try:
                batch = None if ended else input_fn()
            except (StopIteration, tf.errors.OutOfRangeError) as error:
                batch, ended = None, error
            if running or batch is not None:
                return batch
            if ended:
                break
        error, ended = ended, None
        raise tf.errors.OutOfRangeError(None, None, "the data ended, and all towers are done") from error

    def start(number, batch):
        nonlocal spec, tower, update
        batch = _check_batch(batch, number)
        if tower:
            _check_frozen(tower)
        if spec is None or not _fits(batch, spec):
            wider = _widen(spec, batch, number)
            tower, spec = _trace_tower(model_fn, wider, variables, controllers, number), wider
            update = _build_update(tower, optimizer, controllers[0])
            graphs.clear()
        if number not in graphs:
            graphs[number] = _build_tower(tower, spec, number, devices[number])
        scale = optimizer.scale_loss(tf.ones([])) if isinstance(optimizer, keras.Optimizer) else tf.ones([])
        weights = [variable.value() for variable in _copied(tower)]
        running[pool.submit(graphs[number], batch, scale, weights)] = Work(number, sum(updates), scale, update)

    def at_rest():
        nonlocal resting
        resting = True
        return not running

    def close():
        nonlocal failure
        failure = failure or ValueError("this step was closed, its threads have ended: make a new one")
        pool.shutdown(cancel_futures=True)
        running.clear()

    train_step.staleness, train_step.updates, train_step.at_rest, train_step.close = staleness, updates, at_rest, close
    train_step.graph = lambda: graphs[min(graphs)].graph
    return train_step


def _copied(tower):
    """The variables of which each tower has a copy of its own: those that are updated here and nowhere else."""
    written = {id(variable) for variable in tower.state}
    return [v for v in map(_tf_variable, tower.reached) if id(v) not in written]


def _build_tower(tower, spec, number, device):
    """The graph of one tower: (batch, scale, weights) -> (loss, gradients).

    It is the traced tower with copies in the place of the variables, so that all reads see the same weights, wherever
    in the graph they are: a recurrent layer reads its own at every time step.
    """
    shared = _copied(tower)
    with tf.device(device):
        copies = [tf.Variable(variable.value(), trainable=False) for variable in shared]
    handles = {id(variable.handle): copy.handle for variable, copy in zip(shared, copies)}

    def compute(batch, scale, weights):
        with tf.device(device):
            for copy, value in zip(copies, weights):
                copy.assign(value)
            loss, gradients = _replicate(tower, number, (batch, scale), handles)
        # The way to the controller is the tower's own time: the update finds its gradients there.
        for i, variable in enumerate(tower.reached):
            with tf.device(_tf_variable(variable).device):
                gradients[i] = tf.nest.map_structure(tf.identity, gradients[i], expand_composites=True)
        return loss, gradients

    weights = [tf.TensorSpec(variable.shape, variable.dtype) for variable in shared]
    return tf.function(compute, autograph=False).get_concrete_function(spec, tf.TensorSpec([]), weights)


def _build_update(tower, optimizer, controller):
    """The graph of an update: one tower's gradients, and the scale of the loss that they are of."""
    _build_optimizer(optimizer, tower, controller)
    of_keras = isinstance(optimizer, keras.Optimizer)

    def update(gradients, scale):
        with tf.device(controller):
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                # Others may have changed the scale meanwhile, and it divides by the one it has now.
                change = optimizer.scale_loss(tf.ones([])) / scale
                gradients = [gradient * tf.cast(change, gradient.dtype) for gradient in gradients]
            variables = tower.reached if of_keras else [_tf_variable(v) for v in tower.reached]
            optimizer.apply_gradients(list(zip(gradients, variables)))

    gradients = [tf.type_spec_from_value(gradient) for gradient in tower.function.structured_outputs[1]]
    return tf.function(update, autograph=False).get_concrete_function(gradients, tf.TensorSpec([]))
