"""Towers: one model, many devices, one update.

Each tower computes loss and gradients on its own part of the batch, on its own device and at the same time as the others;
the controller, which holds the only copy of the variables, averages the gradients and updates once. `train.py` calls it.
"""

import collections
import contextlib
import gc
import re

import keras
import tensorflow as tf

from averaging import average_gradients, weighted_mean
from placement import CONTROLLER, assign_to_device, check_devices, tower_devices

# A model traced for one tower: the function (batch, loss scale) -> (loss, gradients), the variables to train, those of them
# that the loss reaches (it has their gradients), and the state that the function itself writes to.
Tower = collections.namedtuple("Tower", "function variables reached state")


def create_parallel_optimization(model_fn, input_fn, optimizer, devices=None, controller=CONTROLLER, variables=None):
    """Builds the training step: `train_step()` runs one tower per device and updates the variables once.

    The whole step is one graph. The model is traced once, and the traced tower is put into that graph once per device: all
    towers share their variables by construction, and tracing costs one model, whatever the number of towers.

    State that the model itself updates is updated once per tower, in tower order. Batch normalisation: a tower normalises
    by its own batch, and with momentum M the moving average becomes M·average + (1 - M)·(tower 0's), then
    M·average + (1 - M)·(tower 1's), and so on. Dropout: the seed moves on from tower to tower, each draws its own mask.

    A step that fails, for lack of data or in a tower, leaves every variable as it was.

    Args:
      model_fn: `model_fn(input_fn) -> loss`, a scalar: the mean over the examples of the batch that `input_fn()` returns.
        It uses the same variables at every call: make layers outside, or keep those that the first call makes.
      input_fn: Called once per tower and step, in tower order, before the graph runs. Returns the tower's batch: any nest
        of tensors or arrays whose first leaf has the examples on axis 0. Their number may differ from tower to tower. None
        lets the tower sit the step out: the last step of an epoch may have fewer examples than there are towers.
      optimizer: A Keras optimizer, `LossScaleOptimizer` included, or one of `tf.compat.v1.train`. It gets the averaged
        gradients: clipping, loss scaling and the iteration count act once per step.
      devices: One device name per tower. None: `tower_devices()`.
      controller: The device that makes variables and updates them, or a list of devices to spread the variables over; each
        gradient is averaged where its variable lives.
      variables: The variables to train: a list, or a function that returns one, called when the model has been built.
        None: every trainable variable that the loss reads, less those that Keras has frozen (`layer.trainable = False`).

    Returns:
      `train_step() -> loss`: one update; the mean loss over all examples of the step, a scalar tensor.

    Raises:
      ValueError: if a device does not exist; by `train_step`, if a tower's batch is empty or unlike the others', if the
        model makes new variables at every call, if the loss is not a scalar or depends on no variable.
      tf.errors.OutOfRangeError: by `train_step`, at the end of the data: `input_fn` raised it, or StopIteration, for some
        tower, or returned None for all.
      tf.errors.OpError: by `train_step`, if an op of a tower fails; it names the tower.

    Source: in-graph replication, the way of the CIFAR-10 multi-GPU tutorial of TensorFlow 1.
    """
    devices = tower_devices() if devices is None else list(devices)
    controllers = [controller] if isinstance(controller, str) else list(controller)
    if not devices:
        raise ValueError("devices is an empty list: name at least one device for a tower")
    check_devices([*devices, *controllers])
    spec, tower, steps = None, None, {}  # the kind of batch; the tower traced for it; the steps built of that tower

    def train_step():
        nonlocal spec, tower
        batches = _pull_batches(input_fn, len(devices))
        for i, batch in batches.items():
            wider = _widen(spec, batch, i)
            if wider != spec:
                tower = _trace_tower(model_fn, wider, variables, controllers, i)
                spec = wider
                steps.clear()
        sizes = [_count_examples(batch) for batch in batches.values()]
        key = (*batches, len(set(sizes)) == 1)
        if key not in steps:
            active = {i: devices[i] for i in batches}
            steps[key] = _build_step(tower, spec, optimizer, active, controllers[0], weighted=not key[-1])
        with _all_or_nothing(tower, devices):
            return steps[key](list(batches.values()), tf.constant(sizes, tf.int64))

    return train_step


def _trace_tower(model_fn, spec, variables, controllers, number):
    """Traces loss and gradients of one tower, on no device yet; variables that do not exist yet go to the controllers."""
    calls, made, made_again, trained, reached = 0, [], [], [], []

    def watch_creation(next_creator, **kwargs):
        if calls == 1:
            made.append(next_creator(**kwargs))
            return made[-1]
        # Made anew in the second call. Going on with the first call's variable in its place finds the others as well.
        alike = [v for v in made if v.name.split("/")[-1].startswith(kwargs.get("name") or "Variable")]
        made_again.extend([v for v in alike if all(v is not other for other in made_again)][:1])
        return made_again[-1] if alike else next_creator(**kwargs)

    @tf.autograph.experimental.do_not_convert
    def differentiate(loss, tape, scale):
        trained[:] = _choose_variables(variables, tape)
        if loss.shape.rank != 0 or not loss.dtype.is_floating:
            return []  # refused below
        # To seed the backward pass with the loss scale is to scale the loss. All of it happens inside the tower: gradients
        # are computed on the device in scope when they are asked for (tensorflow#33688).
        gradients = tape.gradient(loss, [_tf_variable(v) for v in trained], output_gradients=tf.cast(scale, loss.dtype))
        reached[:] = [v for v, gradient in zip(trained, gradients) if gradient is not None]
        return [gradient for gradient in gradients if gradient is not None]

    def tower(batch, scale):
        nonlocal calls
        calls += 1
        with tf.GradientTape() as tape:
            loss = tf.convert_to_tensor(model_fn(lambda: batch))
        return loss, differentiate(loss, tape, scale)

    # A `tf.function` that makes variables in its first call is traced once more, and must then make none.
    try:
        with assign_to_device(None, controllers), tf.variable_creator_scope(watch_creation):
            function = tf.function(tower).get_concrete_function(spec, tf.TensorSpec([]))
    except (ValueError, TypeError) as error:
        if not made_again:
            raise ValueError(f"tower {number}: model_fn cannot take its batch, {_describe(spec)}: {error}") from error
    if made_again:
        names = ", ".join(f"{variable.name} {tuple(variable.shape)}" for variable in made_again)
        raise ValueError(
            f"model_fn makes new variables at every call, so towers would not share them: {names}; "
            "make layers and variables once, outside model_fn, or keep those of the first call"
        )
    loss = function.outputs[0]
    if loss.shape.rank != 0 or not loss.dtype.is_floating:
        raise ValueError(
            f"model_fn must return a scalar, the mean loss of its batch, not {loss.dtype.name} {loss.shape}"
        )
    if not reached:
        raise ValueError("the loss depends on no variable that is to be trained: there is nothing to do")
    return Tower(function, trained, reached, _state_changed_by(function))


def _choose_variables(variables, tape):
    """The variables to train. Keras's own objects stand for the `tf.Variable` inside: only they know what is frozen."""
    if variables is not None:
        return list(variables() if callable(variables) else variables)
    of_keras = {id(v.value): v for v in gc.get_objects() if issubclass(type(v), keras.Variable)}
    read = [of_keras.get(id(variable), variable) for variable in tape.watched_variables()]
    return [variable for variable in read if variable.trainable]


def _tf_variable(variable):
    return variable.value if isinstance(variable, keras.Variable) else variable


def _state_changed_by(function):
    """The variables that the traced function writes to: moving averages, seeds."""
    handles = zip(function.captured_inputs, function.inputs[-len(function.captured_inputs) :])
    reads = ("ReadVariableOp", "ResourceGather")
    written = [id(outer) for outer, inner in handles if any(op.type not in reads for op in inner.consumers())]
    return [variable for variable in function.graph.variables if id(variable.handle) in written]


def _build_step(tower, spec, optimizer, devices, controller, weighted):
    """Builds the graph of one step: the towers side by side, then the average, then the update."""
    if isinstance(optimizer, keras.Optimizer) and not optimizer.built:
        with tf.device(controller):  # each slot is made beside its variable, the rest here
            optimizer.build(tower.variables)

    def step(batches, sizes):
        with tf.device(controller):
            scale = optimizer.scale_loss(tf.ones([])) if isinstance(optimizer, keras.Optimizer) else tf.ones([])
        results = []
        for (number, device), batch in zip(devices.items(), batches):
            with tf.device(device):
                results.append(_replicate(tower, number, (batch, scale)))
        # No update before every tower has done all it does, its assertions included: the whole step or nothing.
        with tf.device(controller), tf.control_dependencies(tf.nest.flatten(results, expand_composites=True)):
            weights = tf.unstack(sizes, len(devices)) if weighted else None
            with tf.name_scope("average"):
                loss = weighted_mean([loss for loss, _ in results], weights)
                average = average_gradients([zip(gradients, tower.reached) for _, gradients in results], weights)
            with tf.name_scope("update"):
                if not isinstance(optimizer, keras.Optimizer):
                    average = [(gradient, _tf_variable(variable)) for gradient, variable in average]
                optimizer.apply_gradients(average)
        return loss

    sizes = tf.TensorSpec([len(devices)], tf.int64)
    return tf.function(step, autograph=False).get_concrete_function([spec] * len(devices), sizes)


def _replicate(tower, number, inputs):
    """Puts the traced tower into the graph being built, on the device in scope, under the name `tower_<number>`.

    Why not call the traced function? A call is one op to its neighbours: where the model updates state (a moving average,
    a seed), TensorFlow would start tower 1 only when all such updates of tower 0 were done, deep in its forward pass.
    Ops that stand in the graph themselves wait only for those that write the same variable.
    """
    function, graph = tower.function, tf.compat.v1.get_default_graph()
    graph_def = function.graph.as_graph_def()
    for node in graph_def.node:
        if "seed2" in node.attr and (node.attr["seed"].i or node.attr["seed2"].i):
            node.attr["seed2"].i += number  # a random op with a fixed seed: without this all towers draw the same
    values = tf.nest.flatten(inputs, expand_composites=True) + [graph.capture(t) for t in function.captured_inputs]
    outputs = tf.graph_util.import_graph_def(
        graph_def,
        input_map={inner.name: value for inner, value in zip(function.inputs, values)},
        return_elements=[output.name for output in function.outputs],
        name=f"tower_{number}",
    )
    return tf.nest.pack_sequence_as(function.structured_outputs, outputs, expand_composites=True)


def _pull_batches(input_fn, count):
    """Calls `input_fn` for each tower, before the graph runs: data that end half-way must not leave half a step."""
    batches = {}
    for i in range(count):
        try:
            batch = input_fn()
        except (StopIteration, tf.errors.OutOfRangeError) as error:
            raise tf.errors.OutOfRangeError(
                None, None, f"the data ended at tower {i} of {count}; nothing was trained in this step"
            ) from error
        if batch is not None:
            batches[i] = tf.nest.map_structure(lambda x: x if tf.is_tensor(x) else tf.convert_to_tensor(x), batch)
            if not _count_examples(batches[i], i):
                raise ValueError(
                    f"tower {i} got an empty batch, {_describe(batches[i])}: give it an example, or None to sit out"
                )
    if not batches:
        raise tf.errors.OutOfRangeError(None, None, "the data ended: input_fn returned None for every tower")
    return batches


def _count_examples(batch, i=None):
    first = tf.nest.flatten(batch)[0]
    if not first.shape.rank:
        raise ValueError(f"tower {i}: the first tensor of its batch, {_describe(batch)}, has no axis of examples")
    return first.shape[0]


def _widen(spec, batch, number):
    """The narrowest spec of batches that admits `batch` as well as those admitted so far, of any number of examples."""

    def describe(leaf):
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
            return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
        return tf.type_spec_from_value(leaf)

    own = tf.nest.map_structure(describe, batch)
    if spec is None:
        return own
    try:
        wider = tf.nest.map_structure(lambda a, b: a.most_specific_common_supertype([b]), spec, own)
        ranks = tf.nest.map_structure(lambda a, b: a.shape.rank == b.shape.rank, spec, own)
    except (ValueError, TypeError):
        wider = ranks = None
    if wider is None or None in tf.nest.flatten(wider) or not all(tf.nest.flatten(ranks)):
        raise ValueError(
            f"tower {number} got a batch of another kind, {_describe(own)}; the others were {_describe(spec)}"
        )
    return wider


def _describe(nest):
    return str(tf.nest.map_structure(lambda x: f"{x.dtype.name} {x.shape}", nest))


@contextlib.contextmanager
def _all_or_nothing(tower, devices):
    """Names the tower in which a step failed, and takes back what towers had already written."""
    before = [variable.value() for variable in tower.state]
    try:
        yield
    except tf.errors.OpError as error:
        for variable, value in zip(tower.state, before):
            variable.assign(value)
        found = re.search(r"(.*)\n\s*\[\[{{node tower_(\d+)/", error.message)
        if not found:
            raise
        reason, number = found[1].strip(), int(found[2])
        message = f"tower {number} ({devices[number]}) failed and no variable was changed: {reason}"
        raise type(error)(error.node_def, error.op, message) from error
