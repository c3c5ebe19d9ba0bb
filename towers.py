"""Towers: one model, many devices, one update.

Each tower computes loss and gradients on its own part of the batch, on its own device, while the others do the same.
The controller, which holds the only copy of the variables, averages the gradients and updates once. `train.py` runs it.
"""

import collections
import contextlib
import gc
import itertools
import re

import keras
import tensorflow as tf

from averaging import average_gradients, weighted_mean
from placement import CONTROLLER, assign_to_device, check_devices, tower_devices

# A model traced for one tower: the function (batch, loss scale) -> (loss, gradients), the variables to train, those of
# them that the loss reaches (it has their gradients), the state that the model itself writes to, and, if they were
# chosen by it, all variables that the loss reads, each with whether it could be trained.
Tower = collections.namedtuple("Tower", "function variables reached state trainable")


def create_parallel_optimization(model_fn, input_fn, optimizer, devices=None, controller=CONTROLLER, variables=None):
    """Builds the training step: `train_step()` runs one tower per device and updates the variables once.

    The step is one graph. The model is traced once and put into that graph once per device, so that towers share their
    variables by construction, run at the same time, and cost one tracing however many they are.

    State that the model itself updates is updated once per tower, in tower order. Batch normalisation: a tower
    normalises by its own batch, and with momentum M the moving average becomes M·average + (1 - M)·(tower 0's), then
    M·average + (1 - M)·(tower 1's), and so on. Dropout: the seed moves on from tower to tower, each draws its own mask.

    A step that fails, for lack of data or in a tower, leaves every variable as it was. (An error of the optimizer's own
    ops, of a constraint for instance, comes when some variables have been updated; it says so.)

    Args:
      model_fn: `model_fn(input_fn) -> loss`, a scalar, the mean over the examples that `input_fn()` returns. It uses
        the same variables at every call: make layers outside, or keep those of the first call.
      input_fn: Called once per tower and step, in tower order, before the graph runs. Returns a tower batch: a nest of
        tensors or arrays whose first leaf has the examples on axis 0; their number may differ. None lets the tower sit
        the step out (the last step of an epoch may have fewer examples than there are towers).
      optimizer: Any Keras optimizer or one of `tf.compat.v1.train`. It gets the averaged gradients: clipping, loss
        scaling and the count of iterations act once per step.
      devices: One device name per tower. None: `tower_devices()`.
      controller: The device that holds the variables made here and updates them; or several, over which variables are
        spread, and each gradient is averaged where its variable lives.
      variables: The variables to train: a list, or a function that returns one, called when the model is built. None:
        all trainable variables that the loss reads, less those frozen by Keras (`layer.trainable = False`). To freeze
        or unfreeze layers later, make a new step.

    Returns:
      `train_step() -> loss`: does one update; the loss is the mean over all examples of the step, a scalar tensor.
      `train_step.graph()` is the graph of the step, once it has run.

    Raises:
      ValueError: if a device does not exist. By `train_step`: if a batch is empty or unlike the others, if the model
        makes new variables at every call, if the loss is not a scalar or depends on none of the variables, if layers
        were frozen or unfrozen since.
      TypeError: if the optimizer is none.
      tf.errors.OutOfRangeError: By `train_step`, at the end of the data: `input_fn` raised it (or StopIteration) for
        any tower, or returned None for all.
      tf.errors.OpError: By `train_step`, if an op of a tower fails; the message names the tower.
      RuntimeError: By `train_step`, if it is called in a `tf.function`.

    Source: in-graph replication, as in TensorFlow 1's CIFAR-10 multi-GPU tutorial.
    """
    devices = tower_devices() if devices is None else list(devices)
    controllers = [controller] if isinstance(controller, str) else list(controller)
    if not devices or not controllers:
        raise ValueError("devices and controller must each name at least one device")
    check_devices(devices + controllers)
    _check_optimizer(optimizer)
    spec, tower, steps = None, None, {}  # the kind of batch, the tower traced for it, the steps built from that tower
    rebuilt = 0

    def train_step():
        nonlocal spec, tower, rebuilt
        _check_caller()
        if tower:
            _check_frozen(tower)
        batches = _pull_batches(input_fn, len(devices))
        for number, batch in batches.items():
            if spec is None or not _fits(batch, spec):
                wider = _widen(spec, batch, number)
                tower, spec = _trace_tower(model_fn, wider, variables, controllers, number), wider
                steps.clear()
        try:
            return run(batches)
        except tf.errors.AlreadyExistsError:
            # If memory seems short, TensorFlow makes sums into temporary variables, which go by the names of their ops.
            # One that a failed step has left behind would be in the way of all that follow: so take other names.
            rebuilt += 1
            steps.clear()
            return run(batches)

    def run(batches):
        sizes = [_examples(batch, number) for number, batch in batches.items()]
        kind = (*batches, len(set(sizes)) > 1)  # which towers take part, and whether their weights differ
        if kind not in steps:
            on = {number: devices[number] for number in batches}
            names = f"rebuilt_{rebuilt}/" if rebuilt else ""
            steps[kind] = _build_step(tower, spec, optimizer, on, controllers[0], kind[-1], names)
        with _all_or_nothing(tower, batches, devices):
            return steps[kind](list(batches.values()), tf.constant(sizes, tf.int64))

    train_step.graph = lambda: next(iter(steps.values())).graph  # of the first kind of step, to look at
    return train_step


def create_asynchronous_optimization(*args, **kwargs):
    """The same arguments, but towers do not wait for each other: see asynchronous.py, which builds on this file."""
    import asynchronous

    return asynchronous.create_asynchronous_optimization(*args, **kwargs)


def _build_step(tower, spec, optimizer, devices, controller, weighted, names):
    """Builds the graph of a step: the towers side by side, then the average, then the update; all under `names`."""
    of_keras = isinstance(optimizer, keras.Optimizer)
    _build_optimizer(optimizer, tower, controller)

    def step(batches, sizes):
        with tf.device(controller):
            scale = optimizer.scale_loss(tf.ones([])) if of_keras else tf.ones([])
        results = []
        for (number, device), batch in zip(devices.items(), batches):
            with tf.device(device):
                results.append(_replicate(tower, number, (batch, scale)))
        with tf.device(controller):
            weights = tf.unstack(sizes, len(devices)) if weighted else None
            variables = tower.reached if of_keras else [_tf_variable(v) for v in tower.reached]
            with tf.name_scope("average"):
                loss = weighted_mean([loss for loss, _ in results], weights)
                average = average_gradients([zip(gradients, variables) for _, gradients in results], weights)
            # No update before every tower has done all it does, assertions included: the whole step or nothing.
            all_done = tf.group(*tf.nest.flatten(results, expand_composites=True))
            with tf.name_scope("update"), tf.control_dependencies([all_done]):
                optimizer.apply_gradients(average)
        return loss

    def named(*inputs):
        with tf.name_scope(names):
            return step(*inputs)

    sizes = tf.TensorSpec([len(devices)], tf.int64)
    return tf.function(named, autograph=False).get_concrete_function([spec] * len(devices), sizes)


def _check_caller():
    if tf.inside_function():
        raise RuntimeError("a step is a graph of its own: call it from Python, not in a tf.function")


def _check_optimizer(optimizer):
    if not hasattr(optimizer, "apply_gradients"):
        raise TypeError(f"{optimizer!r} is no optimizer: take one of keras.optimizers or tf.compat.v1.train")


def _build_optimizer(optimizer, tower, controller):
    if isinstance(optimizer, keras.Optimizer) and not optimizer.built:
        with tf.device(controller):  # Keras makes each slot beside its variable, and the rest here
            optimizer.build(tower.variables)


def _replicate(tower, number, inputs, instead=None):
    """Puts the traced tower into the graph being built, on the device in scope, under the name `tower_<number>`.

    `instead` names other variables for it to use: the id of a handle -> the handle of another.

    Why not call the traced function? A call is a single op to its neighbours: if the model updates state (a moving
    average, a seed), tower 1 would wait for the last such update of tower 0, deep in its forward pass. Ops that stand
    in the graph themselves wait for those alone that write the same variable.
    """
    function, graph = tower.function, tf.compat.v1.get_default_graph()
    graph_def = function.graph.as_graph_def()
    _keep_apart(graph_def)
    _keep_own(graph_def, number)
    captured = [(instead or {}).get(id(outer), outer) for outer in function.captured_inputs]
    values = tf.nest.flatten(inputs, expand_composites=True) + [graph.capture(outer) for outer in captured]
    outputs = tf.graph_util.import_graph_def(
        graph_def,
        input_map={inner.name: value for inner, value in zip(function.inputs, values)},
        return_elements=[output.name for output in function.outputs],
        name=f"tower_{number}",
    )
    return tf.nest.pack_sequence_as(function.structured_outputs, outputs, expand_composites=True)


def _keep_own(graph_def, number):
    """Makes a copy of the traced tower that tower's own: its devices and its random numbers.

    It may hold functions, of loops and calls, which go by their names: a tower's own have names of their own.
    """

    def change(nodes):
        changed = False
        for node in nodes:
            if "_class" in node.attr:  # "beside its variable": it would mean beside the traced function's input
                del node.attr["_class"]
                changed = True
            if "seed2" in node.attr and (node.attr["seed"].i or node.attr["seed2"].i):
                # An op with a seed would draw the same in every tower. Seeds have 32 bits; the generator takes 64.
                node.attr["seed2"].i += number << 32
                changed = True
        return changed

    change(graph_def.node)
    functions = graph_def.library.function
    changed = [change(function.node_def) for function in functions]
    if not any(changed):
        return
    names = {function.signature.name: f"{function.signature.name}_tower_{number}" for function in functions}
    for function in functions:
        function.signature.name = names[function.signature.name]
    for node in itertools.chain(graph_def.node, *(function.node_def for function in functions)):
        node.op = names.get(node.op, node.op)
        for value in node.attr.values():
            for called in [value.func] if value.HasField("func") else value.list.func:
                called.name = names.get(called.name, called.name)
    with tf.init_scope():  # makes the new functions known to the runtime
        tf.graph_util.import_graph_def(tf.compat.v1.GraphDef(library=graph_def.library), name="")


def _keep_apart(graph_def):
    """Keeps oneDNN from fusing the gradients of a convolution's filter and bias: its fused op takes longer than both.

    An identity that waits for the one gradient hands the other its input, as in the graphs of TensorFlow 1. With it a
    step of two towers on MNIST took 0.92 of the time.
    """
    bias = {node.input[0]: node.name for node in graph_def.node if node.op == "BiasAddGrad"}
    for node in list(graph_def.node):
        if node.op == "Conv2DBackpropFilter" and node.input[2] in bias:
            apart = graph_def.node.add(op="Identity", name=node.name + "/apart", device=node.device)
            apart.input.extend([node.input[2], "^" + bias[node.input[2]]])
            apart.attr["T"].CopyFrom(node.attr["T"])
            node.input[2] = apart.name


def _trace_tower(model_fn, spec, variables, controllers, number):
    """Traces loss and gradients of one tower, on no device yet; variables the model makes go to the controllers."""
    calls, made, initial, made_again, chosen, reached, frozen_or_not = 0, [], [], [], [], [], []

    def watch(next_creator, **kwargs):
        if calls == 1:
            made.append(next_creator(**kwargs))
            initial.append(kwargs["initial_value"])
            return made[-1]
        # A variable made anew: going on with the first call's in its place brings the others to light as well.
        value, name = kwargs["initial_value"], kwargs.get("name") or "Variable"
        shape = tf.convert_to_tensor(value() if callable(value) else value).shape
        alike = [v for v in made if v.shape == shape and v.name.split("/")[-1].startswith(name)]
        made_again.extend([v for v in alike if all(v is not other for other in made_again)][-1:])
        return made_again[-1] if made_again else next_creator(**kwargs)

    @tf.autograph.experimental.do_not_convert
    def differentiate(loss, tape, scale):
        chosen[:], frozen_or_not[:] = _choose_variables(variables, tape)
        if loss.shape.rank != 0 or not loss.dtype.is_floating:
            return []  # refused below
        # Scaling the loss is the same as starting the backward pass from the scale. It runs here, in the tower, because
        # gradients are computed on the device in scope when they are asked for (tensorflow#33688).
        gradients = tape.gradient(loss, [_tf_variable(v) for v in chosen], output_gradients=tf.cast(scale, loss.dtype))
        reached[:] = [v for v, gradient in zip(chosen, gradients) if gradient is not None]
        return [gradient for gradient in gradients if gradient is not None]

    def tower(batch, scale):
        nonlocal calls
        calls += 1
        with tf.GradientTape() as tape:
            loss = model_fn(lambda: batch)
            if tf.nest.is_nested(loss):
                raise TypeError(f"it must return a scalar, the mean loss, not a {type(loss).__name__}")
            loss = tf.convert_to_tensor(loss)
            if loss.shape.rank is None:
                loss = tf.ensure_shape(loss, [])
        return loss, differentiate(loss, tape, scale)

    try:  # a `tf.function` whose first call makes variables is traced a second time, and then must make none
        with assign_to_device(None, controllers), tf.variable_creator_scope(watch):
            function = tf.function(tower).get_concrete_function(spec, tf.TensorSpec([]))
    except Exception as error:
        lost = _initialise(made, initial)
        if not isinstance(error, (ValueError, TypeError)):
            raise
        if not made_again:
            raise ValueError(
                f"tower {number}: model_fn fails on its batch, {_describe(spec)}: {error}"
                + (f"\nand leaves {', '.join(lost)} without a value: make it anew" if lost else "")
            ) from error
    if made_again:
        raise ValueError(
            "model_fn makes new variables at every call, so that towers would not share them: "
            + ", ".join(f"{variable.name} {tuple(variable.shape)}" for variable in made_again)
            + "; make layers and variables once, outside model_fn, or keep those of the first call"
        )
    loss = function.outputs[0]
    if loss.shape.rank != 0 or not loss.dtype.is_floating:
        raise ValueError(f"model_fn must return a scalar, the mean loss, not {loss.dtype.name} of shape {loss.shape}")
    if not reached:
        raise ValueError("the loss depends on none of the variables to train: there is nothing to do")
    return Tower(function, chosen, reached, _written_by(function), frozen_or_not)


def _initialise(variables, values):
    """Gives variables made in a trace that failed the values that it was to give them.

    Returns:
      The names of those whose values are lost, because they were computed in the trace.
    """
    lost = []
    for variable, value in zip(variables, values):
        if not tf.raw_ops.VarIsInitializedOp(resource=variable.handle):
            try:
                variable.assign(value() if callable(value) else value)
            except Exception:  # whatever it is, the error of the trace is the one to tell
                lost.append(variable.name)
    return lost


def _choose_variables(variables, tape):
    """The variables to train, and those to choose from, with whether they can be trained.

    Keras's are objects of its own: the tf.Variable inside does not know that it is frozen.
    """
    if variables is not None:
        return list(variables() if callable(variables) else variables), []
    of_keras = {id(v.value): v for v in gc.get_objects() if issubclass(type(v), keras.Variable)}
    read = [of_keras.get(id(variable), variable) for variable in tape.watched_variables()]
    return [variable for variable in read if variable.trainable], [(variable, variable.trainable) for variable in read]


def _check_frozen(tower):
    """The choice was made in the trace, and so was what the optimizer has slots for."""
    for variable, trainable in tower.trainable:
        if variable.trainable != trainable:
            name = getattr(variable, "path", variable.name)
            raise ValueError(
                f"{name} was {'frozen' if trainable else 'unfrozen'} after the first step: make a new step"
                + (", and an optimizer that is built for all variables" if not trainable else "")
            )


def _tf_variable(variable):
    return variable.value if isinstance(variable, keras.Variable) else variable


def _written_by(function):
    """The variables that a traced function does more to than read them: moving averages, seeds."""

    def only_reads(op, handle):
        if op.type in ("ReadVariableOp", "ResourceGather"):
            return True
        try:  # a loop or a call, of a recurrent layer for instance, says which of its inputs it does not write to
            read = op.get_attr("_read_only_resource_inputs")
        except ValueError:
            return False
        return all(i in read for i, value in enumerate(op.inputs) if value is handle)

    handles = zip(function.captured_inputs, function.inputs[-len(function.captured_inputs) :])
    handles = {id(outer): inner for outer, inner in handles if inner.dtype == tf.resource}
    known = {id(variable.handle): variable for variable in function.graph.variables}
    if handles.keys() - known.keys():  # a graph does not know the variables that it writes and never reads
        for variable in gc.get_objects():
            if issubclass(type(variable), tf.Variable):
                with contextlib.suppress(AttributeError, ValueError):  # one that is being made, or a distributed one
                    known.setdefault(id(variable.handle), variable)
    return [
        known[key]
        for key, inner in handles.items()
        if key in known and not all(only_reads(op, inner) for op in inner.consumers())
    ]


def _pull_batches(input_fn, count):
    """Calls `input_fn` for every tower, before the graph runs: data that end half-way must not leave half a step."""
    batches = {}
    for number in range(count):
        try:
            batch = input_fn()
        except (StopIteration, tf.errors.OutOfRangeError) as error:
            message = f"the data ended at tower {number} of {count}; this step has trained nothing"
            raise tf.errors.OutOfRangeError(None, None, message) from error
        if batch is not None:
            batches[number] = _check_batch(batch, number)
    if not batches:
        raise tf.errors.OutOfRangeError(None, None, "the data ended: there is no batch for any tower")
    return batches


def _check_batch(batch, number):
    """The batch as tensors; ValueError if there is no example in it."""
    if not all(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(batch)):
        try:
            batch = tf.nest.map_structure(lambda x: x if tf.is_tensor(x) else tf.convert_to_tensor(x), batch)
        except (ValueError, TypeError) as error:
            raise ValueError(f"tower {number} got a batch that is not all tensors: {error}") from error
    if _examples(batch, number) == 0:
        raise ValueError(
            f"tower {number} got an empty batch, {_describe(batch)}: "
            "give every tower an example, or None to let it sit the step out"
        )
    return batch


def _examples(batch, number):
    first = next(iter(tf.nest.flatten(batch)), None)
    if first is None or not first.shape.rank:
        raise ValueError(f"tower {number}: the first leaf of its batch, {_describe(batch)}, has no axis of examples")
    return first.shape[0]


def _fits(batch, spec):
    """Whether the batch is of the kind that the tower was traced for; quick, because it is asked at every step."""
    try:
        tf.nest.assert_same_structure(batch, spec)
    except (TypeError, ValueError):
        return False
    pairs = zip(tf.nest.flatten(batch), tf.nest.flatten(spec))
    return all(kind.is_compatible_with(leaf) for leaf, kind in pairs)


def _widen(spec, batch, number):
    """The narrowest kind of batch, with any number of examples, that takes in this one and those seen before."""

    def kind_of(leaf):
        dense = isinstance(leaf, tf.Tensor) and leaf.shape.rank
        return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) if dense else tf.type_spec_from_value(leaf)

    def join(one, other):
        wider = one.most_specific_common_supertype([other])
        if wider is None or one.shape.rank != other.shape.rank:
            raise TypeError
        return wider

    own = tf.nest.map_structure(kind_of, batch)
    try:
        return own if spec is None else tf.nest.map_structure(join, spec, own)
    except (ValueError, TypeError):
        raise ValueError(
            f"the batch of tower {number} is {_describe(own)}, but those before were {_describe(spec)}"
        ) from None


def _describe(batch):
    return str(tf.nest.map_structure(lambda leaf: f"{leaf.dtype.name} {leaf.shape}", batch))


@contextlib.contextmanager
def _all_or_nothing(tower, batches, devices):
    """If a step fails, finds the tower to blame and takes back what the towers have written."""
    before = [variable.value() for variable in tower.state]

    def restore():
        for variable, value in zip(tower.state, before):
            variable.assign(value)

    try:
        yield
    except tf.errors.OpError as error:
        where = re.search(r"{{node (?:rebuilt_\d+/)?(tower_(\d+)|update)/", error.message)
        if where:
            number = where[2] and int(where[2])
        else:
            number, error = _failed_tower(tower, batches, devices, restore) or (None, error)
        restore()
        if number is not None:
            message = f"tower {number} ({devices[number]}) failed, and no variable was changed: {_reason(error)}"
        elif where:
            message = f"the update failed, when the towers were done, and some variables may have it: {_reason(error)}"
        else:
            raise
        raise type(error)(error.node_def, error.op, message) from error


def _failed_tower(tower, batches, devices, restore):
    """Runs the towers one by one, if an error does not tell which of them it came from: its number, and its error."""
    for number, batch in batches.items():
        restore()
        try:
            with tf.device(devices[number]):
                tower.function(batch, tf.ones([]))
        except tf.errors.OpError as error:
            return number, error
    return None


def _reason(error):
    """What an op's error says is wrong, in one line, without the places where it came from."""
    text = error.message.split("[[{{node")[0]
    heads = r"<stack traces unavailable>|defined at \(most recent call last\):|^\s*\(\d+\) [A-Z_]+:|^ +File .*$"
    text = re.split(heads, text.split("\nTraceback")[0], flags=re.MULTILINE)[-1]
    return " ".join(text.split())
