"""The laws of the parallel step, over the tables of models and optimizers in models.py."""

import collections
import functools
import gc
import re
import resource
import threading
import time
import types

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES, THOROUGH
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS, OPTIMIZERS, build, slots, values

import towers
from towers import create_parallel_optimization

EXACT = [name for name in MODELS if name not in ("batch norm", "dropout", "ResNet-50")]
PAIRS = [(model, "Adam") for model in EXACT if model != "float16"]
PAIRS += [("float16", "momentum"), ("mixed_float16", "loss scale")]
PAIRS += [("dense with L2", optimizer) for optimizer in OPTIMIZERS if optimizer != "Adam"]
PAIRS += [("embedding", optimizer) for optimizer in ("momentum", "RMSprop", "clipnorm", "v1 Adam")]
if THOROUGH:
    PAIRS = [(model, optimizer) for model in EXACT for optimizer in OPTIMIZERS]
# Keras's LossScaleOptimizer does not take sparse gradients, on one device either.
LEFT_OUT = {(model, "loss scale") for model in ("embedding", "embedding layer", "inner functions")}
# With weights and slots in float16, Adam's second moments, g² / 1000, lose all digits: a rounding decides the update.
LEFT_OUT |= {("float16", name) for name in ("Adam", "AdamW", "schedule", "EMA", "v1 Adam", "loss scale")}
PAIRS = [pair for pair in PAIRS if pair not in LEFT_OUT]


def concatenate(batches):
    return tf.nest.map_structure(lambda *leaves: np.concatenate(leaves), *batches)


def parallel_step(model, optimizer, steps, devices=DEVICES, **options):
    """A step fed with lists of tower batches, one list per step."""
    feed = iter([batch for step in steps for batch in step])
    options.setdefault("variables", model.variables)
    count = len(steps[0]) if steps else 1
    return create_parallel_optimization(model.model_fn, lambda: next(feed), optimizer, devices[:count], **options)


def one_device_step(model, optimizer):
    """The oracle: the plain step, on one device, on a whole batch."""

    @tf.function(reduce_retracing=True)
    def step(batch):
        variables = [v.value if isinstance(v, keras.Variable) else v for v in model.variables]
        with tf.GradientTape() as tape:
            loss = model.model_fn(lambda: batch)
            scaled = optimizer.scale_loss(loss) if isinstance(optimizer, keras.Optimizer) else loss
        targets = model.variables if isinstance(optimizer, keras.Optimizer) else variables
        gradients = zip(tape.gradient(scaled, variables), targets)
        optimizer.apply_gradients([(gradient, v) for gradient, v in gradients if gradient is not None])
        return loss

    if isinstance(optimizer, keras.Optimizer):
        optimizer.build(model.variables)
    return lambda batch: step(tf.nest.map_structure(tf.convert_to_tensor, batch))


def assert_close(actual, expected, tolerance):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=tolerance, atol=tolerance)


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def make_steps(model, sizes, count=3, seed=0):
    rng = np.random.default_rng(seed)
    return [[model.batch(rng, size) for size in sizes] for _ in range(count)]


@pytest.mark.parametrize("model, optimizer", PAIRS)
def test_n_towers_on_parts_of_a_batch_are_one_device_on_the_whole(model, optimizer):
    """Weights, slots and iteration count, over several steps, with unequal towers (tensorflow#8957, #6220: slots)."""
    name, sizes = model, ([2, 2] if model == "convnet" else [3, 1, 4])
    model, parallel = build(name), OPTIMIZERS[optimizer]()
    steps = make_steps(model, sizes)
    train_step = parallel_step(model, parallel, steps)
    got_losses = [float(train_step()) for _ in steps]
    got = values([*model.variables, *model.state]), values(slots(parallel))

    model, serial = build(name), OPTIMIZERS[optimizer]()
    step = one_device_step(model, serial)
    np.testing.assert_allclose(
        [float(step(concatenate(batches))) for batches in steps], got_losses, rtol=model.tolerance
    )
    assert_close(got[0], values([*model.variables, *model.state]), model.tolerance)
    assert_close(got[1], values(slots(serial)), model.tolerance)
    if isinstance(parallel, keras.Optimizer):
        assert int(parallel.iterations) == len(steps)


MIRRORED = [("dense with L2", "Adam"), ("GRU", "momentum"), ("convnet", "SGD"), ("embedding", "Adam")]
if THOROUGH:
    # Its replicas draw other masks than our towers, cannot write plain variables, know nothing of inner devices, clip
    # before they sum, have no moving averages of weights, and an interface of their own for the other two.
    MIRRORED = [(name, "momentum") for name in MODELS if name not in ("dropout", "tf.Module", "inner device")]
    OTHERS = ("clipnorm", "global_clipnorm", "EMA", "v1 Adam", "loss scale")
    MIRRORED += [("dense with L2", name) for name in OPTIMIZERS if name not in OTHERS]


@pytest.mark.parametrize("model, optimizer", MIRRORED)
def test_the_weights_are_those_of_mirrored_strategy(model, optimizer):
    """An oracle from outside: the same shards, the mean of the replicas' losses."""
    name = model
    model = build(name)
    steps = make_steps(model, [4, 4], count=2)
    train_step = parallel_step(model, OPTIMIZERS[optimizer](), steps)
    for _ in steps:
        train_step()
    got = values(model.variables)

    strategy = tf.distribute.MirroredStrategy(DEVICES[:2], cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        mirrored, optimizer = build(name), OPTIMIZERS[optimizer]()

        def replica(batch):
            with tf.GradientTape() as tape:
                loss = mirrored.model_fn(lambda: batch) / 2
            gradients = tape.gradient(loss, [towers._tf_variable(v) for v in mirrored.variables])
            optimizer.apply_gradients([pair for pair in zip(gradients, mirrored.variables) if pair[0] is not None])

        run = tf.function(lambda batch: strategy.run(replica, args=(batch,)))
        for batches in steps:
            shards = [tf.nest.map_structure(tf.convert_to_tensor, batch) for batch in batches]
            run(
                strategy.experimental_distribute_values_from_function(lambda c, s=shards: s[c.replica_id_in_sync_group])
            )
        assert_close(got, [towers._tf_variable(v).numpy() for v in mirrored.variables], model.tolerance)


def test_batch_norm_normalises_by_tower_and_moves_its_averages_once_per_tower_in_order():
    """models#100, tensorflow#7439: averages updated by no tower, by the last, or in no defined order."""
    sizes = [5, 2, 7]
    model = build("batch norm")
    kernel, bias = values(model.variables)[:2]
    mean, variance = np.zeros(6), np.ones(6)
    steps = make_steps(model, sizes, count=1)
    train_step = parallel_step(model, OPTIMIZERS["SGD"](), steps)
    train_step()
    for x, _ in steps[0]:
        hidden = x @ kernel + bias
        mean = 0.8 * mean + 0.2 * hidden.mean(0)
        variance = 0.8 * variance + 0.2 * hidden.var(0)
    assert_close(values(model.state), [mean, variance], 1e-12)

    got = values(model.variables)
    reference = build("batch norm")
    with tf.GradientTape() as tape:
        losses = [len(x) * reference.model_fn(lambda x=x, y=y: (x, y)) for x, y in steps[0]]
        loss = sum(losses) / sum(sizes)
    OPTIMIZERS["SGD"]().apply_gradients(
        zip(tape.gradient(loss, [v.value for v in reference.variables]), reference.variables)
    )
    assert_close(got, values(reference.variables), 1e-12)


DIFFERENT = [name for name in MODELS if name not in EXACT]


@pytest.mark.parametrize(
    "name, optimizer",
    [(name, optimizer) for name in DIFFERENT for optimizer in OPTIMIZERS if name != "ResNet-50"]
    if THOROUGH
    else [("batch norm", "Adam"), ("dropout", "Adam"), ("dropout", "momentum")],
)
def test_where_the_mathematics_differ_a_step_is_its_towers_one_after_the_other(name, optimizer):
    """The definition: forward passes in tower order, each on its own batch, then one update by the mean.

    Averages, seeds, masks, weights, slots and losses, over several steps (models#100, tensorflow#7439).
    """
    kind, sizes = optimizer, [3, 1, 4]
    model, optimizer = build(name), OPTIMIZERS[kind]()
    steps = make_steps(model, sizes)
    train_step = parallel_step(model, optimizer, steps)
    losses = [float(train_step()) for _ in steps]
    got = values([*model.variables, *model.state]), values(slots(optimizer))

    model, optimizer = build(name), OPTIMIZERS[kind]()
    of_keras = isinstance(optimizer, keras.Optimizer)
    targets = model.variables if of_keras else [v.value for v in model.variables]
    if of_keras:
        optimizer.build(targets)
    expected = []
    for batches in steps:
        with tf.GradientTape() as tape:
            towers = [model.model_fn(lambda batch=batch: batch) for batch in batches]
            loss = sum(size * tower for size, tower in zip(sizes, towers)) / sum(sizes)
            scaled = optimizer.scale_loss(loss) if of_keras else loss
        optimizer.apply_gradients(zip(tape.gradient(scaled, [v.value for v in model.variables]), targets))
        expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=model.tolerance)
    assert_close(got[0], values([*model.variables, *model.state]), model.tolerance)
    assert_close(got[1], values(slots(optimizer)), model.tolerance)


@pytest.mark.parametrize("name", ["batch norm", "dropout"] + ["ResNet-50"] * THOROUGH)
def test_models_whose_mathematics_differ_are_deterministic_all_the_same(name):
    def train():
        model = build(name)
        steps = make_steps(model, [3, 3, 3])
        train_step = parallel_step(model, OPTIMIZERS["SGD"](), steps)
        return [float(train_step()) for _ in steps], values([*model.variables, *model.state])

    first, again = train(), train()
    np.testing.assert_allclose(first[0], again[0], rtol=1e-4 if name == "ResNet-50" else 1e-12)
    for a, b in zip(first[1], again[1]):
        np.testing.assert_allclose(a, b, rtol=1e-3 if name == "ResNet-50" else 1e-12, atol=1e-12)


LAYER = keras.layers.Dropout(0.5, seed=3)
MASKS = {
    "keras": lambda x: LAYER(x, training=True),
    "an op": lambda x: tf.nn.dropout(x, 0.5),
    "two ops": lambda x: tf.concat([tf.nn.dropout(x[:100], 0.5), tf.nn.dropout(x[100:], 0.5)], 0),
    "two ops with seeds": lambda x: tf.concat([tf.nn.dropout(x[i::2], 0.5, seed=i + 1) for i in range(2)], 0),
    "in a function": lambda x: tf.function(lambda y: tf.nn.dropout(y, 0.5))(x),
    "in a branch": lambda x: tf.cond(x[0] > 0, lambda: tf.nn.dropout(x, 0.5), lambda: x),
    "in a loop": lambda x: tf.while_loop(
        lambda i, _: i < 1, lambda i, _: (i + 1, tf.function(lambda: tf.nn.dropout(tf.ones([200]), 0.5))()), [0, x]
    )[1],
}


@pytest.mark.parametrize("kind", MASKS)
def test_each_tower_draws_its_own_mask_reproducibly_from_the_seed(kind):
    """And no tower draws in one place what another does in another."""

    def draw(seed=5):
        keras.utils.set_random_seed(seed)
        kept = [tf.Variable(tf.zeros([200]), name=f"w{i}") for i in range(3)]
        LAYER.seed_generator.state.assign([3, 0])

        def model_fn(input_fn):  # tower i trains variable i alone, by its mask
            (which,) = input_fn()
            return tf.reduce_sum(tf.reduce_sum(tf.stack(kept) * which[0][:, None], 0) * MASKS[kind](tf.ones([200])))

        towers = [(np.eye(3, dtype=np.float32)[i][None],) for i in range(3)]
        feed = iter(towers * 2)
        step = create_parallel_optimization(model_fn, lambda: next(feed), keras.optimizers.SGD(1.0), DEVICES[:3])
        drawn = []
        for _ in range(2):
            before = [v.numpy() for v in kept]
            step()
            drawn += [tuple(np.round(b - v.numpy(), 3)) for b, v in zip(before, kept)]
        return drawn

    masks = draw()
    assert all(set(mask) == {0.0, np.float32(0.667)} for mask in masks)
    assert len(set(masks)) == 6 and len({half for mask in masks for half in (mask[:100], mask[100:])}) == 12
    assert draw() == masks
    if kind not in ("keras", "two ops with seeds"):
        assert draw(seed=6) != masks


def counting_model(count):
    """A model whose one SGD step subtracts from `weight` the share of each example in the mean."""
    weight = tf.Variable(np.zeros(count), name="weight")

    def model_fn(input_fn):
        return tf.reduce_mean(tf.gather(weight, input_fn()[0]))

    return model_fn, weight


SEEN = {}


@given(st.lists(st.one_of(st.none(), st.integers(1, 9)), min_size=1, max_size=6), st.randoms())
def test_no_example_is_lost_none_counts_twice_and_all_count_the_same(sizes, random):
    """Every size from one example per tower upwards; towers without a batch sit out (tensorflow#41657, #36224)."""
    if len(sizes) not in SEEN:  # one step for each number of towers: new sizes need no new graph
        model_fn, weight = counting_model(60)
        feed = collections.deque()
        step = create_parallel_optimization(model_fn, feed.popleft, keras.optimizers.SGD(1.0), DEVICES[: len(sizes)])
        SEEN[len(sizes)] = feed, weight, step
    feed, weight, step = SEEN[len(sizes)]
    examples = random.sample(range(60), sum(size or 0 for size in sizes))
    expected = np.zeros(60)
    expected[examples] = 1 / max(len(examples), 1)
    rest = list(examples)
    for size in sizes:
        feed.append(None if size is None else (np.array([rest.pop() for _ in range(size)]),))
    weight.assign(np.zeros(60))
    if examples:
        step()
        np.testing.assert_allclose(-weight.numpy(), expected, rtol=1e-12, atol=1e-15)
    else:
        with pytest.raises(tf.errors.OutOfRangeError):
            step()
        np.testing.assert_array_equal(weight, np.zeros(60))
    assert not feed


@settings(max_examples=250 if THOROUGH else 4)  # each builds four models
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 999), st.randoms())
def test_neither_the_order_of_the_towers_nor_splitting_a_batch_matters(sizes, seed, random):
    """Nor joining all batches on one tower, which is serial training (see below)."""

    def train(batches):
        model = build("tf.Module")
        step = parallel_step(model, OPTIMIZERS["SGD"](), [batches])
        return float(step()), values(model.variables)

    batches = make_steps(build("tf.Module"), sizes, 1, seed)[0]
    loss, weights = train(batches)
    shuffled = list(batches)
    random.shuffle(shuffled)
    x, y = shuffled[0]
    cut = random.randint(1, len(x)) if len(x) > 1 else 1
    split = [part for part in ((x[:cut], y[:cut]), (x[cut:], y[cut:])) if len(part[0])]
    for other in (shuffled, split + shuffled[1:], [concatenate(batches)]):
        other_loss, other_weights = train(other)
        np.testing.assert_allclose(other_loss, loss, rtol=1e-12)
        assert_close(other_weights, weights, 1e-12)


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_rows_that_several_towers_look_up_are_as_several_slices_on_one_device(kind):
    """Which Keras's Adam squares one by one: it is not training on one device if a model makes its words unique."""
    words = [np.array([1, 1, 2]), np.array([2, 3])]

    def model_fn(input_fn):
        unique, where = tf.unique(input_fn())
        return tf.reduce_mean(tf.gather(tf.gather(table, unique), where) ** 2)

    def make():
        table = tf.Variable(np.arange(1.0, 5.0))
        return table, OPTIMIZERS[kind]()

    table, optimizer = make()
    feed = iter(words * 3)
    step = create_parallel_optimization(model_fn, lambda: next(feed), optimizer, DEVICES[:2])
    for _ in range(3):
        step()
    got = table.numpy()
    table, optimizer = make()
    for _ in range(3):  # 2 x for every example, of 5; one slice for each word of each tower
        values = [2 * table[word] * count / 5 for word, count in ((1, 2), (2, 1), (2, 1), (3, 1))]
        gradient = tf.IndexedSlices(tf.stack(values), tf.constant([1, 2, 2, 3], tf.int64), [4])
        optimizer.apply_gradients([(gradient, table)])
    np.testing.assert_allclose(got, table, rtol=1e-12)
    assert got[0] == 1.0


def test_one_tower_is_serial_training_bit_for_bit():
    model, optimizer = build("tf.Module"), OPTIMIZERS["Adam"]()
    steps = make_steps(model, [6])
    train_step = parallel_step(model, optimizer, steps)
    losses = [float(train_step()) for _ in steps]
    got = values([*model.variables, *model.state, *slots(optimizer)])
    model, optimizer = build("tf.Module"), OPTIMIZERS["Adam"]()
    step = one_device_step(model, optimizer)
    assert [float(step(batch)) for (batch,) in steps] == losses
    assert_same(got, values([*model.variables, *model.state, *slots(optimizer)]))


def test_the_loss_is_the_mean_over_all_examples_not_the_last_tower_s():
    """tensorflow#2994: the loss shown was the last tower's."""
    weight = tf.Variable(1.0)
    batches = iter([(np.float32([1, 2, 3]),), (np.float32([10]),)])
    step = create_parallel_optimization(
        lambda input_fn: tf.reduce_mean(weight * input_fn()[0]), lambda: next(batches), OPTIMIZERS["SGD"](), DEVICES[:2]
    )
    assert float(step()) == 4.0


def test_input_fn_is_called_once_per_tower_and_step_in_order():
    calls, seen = [], []

    def input_fn():
        calls.append(len(calls))
        return (np.float64([calls[-1]]),)

    weight = tf.Variable(np.float64(0))
    step = create_parallel_optimization(
        lambda input_fn: tf.reduce_mean(weight * input_fn()[0]), input_fn, keras.optimizers.SGD(1.0), DEVICES[:3]
    )
    for number in range(1, 4):
        before = float(weight)
        step()
        seen.append(before - float(weight))
        assert len(calls) == 3 * number
    np.testing.assert_allclose(seen, [1, 4, 7])


@pytest.mark.parametrize("sum_of", ["one step", "towers twice"])
def test_one_update_per_step(sum_of):
    weight, optimizer = tf.Variable(1.0), keras.optimizers.SGD(0.5)
    step = create_parallel_optimization(
        lambda input_fn: weight * tf.reduce_mean(input_fn()), lambda: np.ones(2, np.float32), optimizer, DEVICES[:4]
    )
    for count in range(1, 1 + (1 if sum_of == "one step" else 2)):
        step()
        assert float(weight) == 1 - 0.5 * count and int(optimizer.iterations) == count


# A failed step changes nothing


def fragile():
    """Batch norm, dropout, a counter that is written and never read, an assertion, labels that can be out of range."""
    keras.utils.set_random_seed(3)
    net = keras.Sequential(
        [keras.layers.Dense(5), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    )
    net.build((None, 4))
    net.counter = tf.Variable(0, trainable=False)
    optimizer = keras.optimizers.Adam()

    def model_fn(input_fn):
        x, y = input_fn()
        net.counter.assign_add(1)
        logits = net(x, training=True)
        tf.debugging.assert_less(tf.reduce_max(x), 100.0, "too large")
        return models.cross_entropy(y, logits)

    return model_fn, net, optimizer


GOOD = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32), np.array([0, 1, 2, 0])
X, Y = GOOD
FAILURES = {  # what tower 1 of 3 gets; the error; what it says
    "data at an end": (None, tf.errors.OutOfRangeError, "the data ended at tower 1 of 3"),
    "empty batch": ((X[:0], Y[:0]), ValueError, "tower 1 got an empty batch"),
    "other structure": ((X, Y, Y), ValueError, "the batch of tower 1 is .* but those before were"),
    "other dtype": ((X.astype(np.float64), Y), ValueError, "the batch of tower 1 is .*float64"),
    "other rank": ((X[None], Y), ValueError, "the batch of tower 1 is "),
    "no axis of examples": (
        (X[0, 0], Y),
        ValueError,
        "tower 1: the first leaf of its batch, .* has no axis of examples",
    ),
    "other width": ((X[:, :3], Y), (ValueError, tf.errors.InvalidArgumentError), "tower 1"),
    "fewer labels": ((X, Y[:2]), tf.errors.InvalidArgumentError, r"tower 1 \(/device:CPU:2\) failed"),
    "label out of range": (
        (X, Y + 7),
        tf.errors.InvalidArgumentError,
        r"tower 1 \(/device:CPU:2\) failed.*label value",
    ),
    "failed assertion": ((X + 1000, Y), tf.errors.InvalidArgumentError, r"tower 1 \(/device:CPU:2\) failed.*too large"),
}


FIRST = FAILURES if THOROUGH else ["data at an end", "other width", "failed assertion"]


@pytest.mark.parametrize("first, failure", [(False, name) for name in FAILURES] + [(True, name) for name in FIRST])
def test_a_failed_step_changes_nothing_and_the_next_one_works(first, failure):
    """Weights, slots, iteration count, moving averages and seeds, bit for bit, in repeated trials; it may be a race."""
    bad, kind, message = FAILURES[failure]
    model_fn, net, optimizer = fragile()
    feed = collections.deque()

    def input_fn():
        batch = feed.popleft()
        if batch is None:
            raise StopIteration
        return batch

    step = create_parallel_optimization(model_fn, input_fn, optimizer, DEVICES[:3])

    def state():
        return values([net.counter] + net.weights + net.layers[2].variables + optimizer.variables)

    def good():
        feed.extend([GOOD] * 3)
        return float(step())

    losses = [] if first else [good()]
    for _ in range(1 if first else 10):
        before = state()
        feed.extend([GOOD, bad, GOOD])
        with pytest.raises(kind, match=message):
            step()
        feed.clear()
        assert_same(state()[: len(before)], before)  # (slots may have been made meanwhile, as zeros)
    losses += [good(), good()]
    assert losses == pytest.approx(undisturbed()[: len(losses)], rel=1e-6)


@functools.cache
def undisturbed():
    model_fn, _, optimizer = fragile()
    step = create_parallel_optimization(model_fn, lambda: GOOD, optimizer, DEVICES[:3])
    return [float(step()) for _ in range(3)]


@pytest.mark.parametrize("optimizer", ["Adam", "v1 Adam", "EMA", "loss scale"])
@pytest.mark.parametrize("tower", [0, 2])
def test_a_failure_of_the_first_or_the_last_tower_changes_nothing_either(tower, optimizer):
    """With the state of every kind of optimizer: slots, powers, moving averages of weights, the scale of the loss."""
    model, optimizer = build("batch norm"), OPTIMIZERS[optimizer]()
    good = make_steps(model, [4] * 3, count=1)[0]
    x, y = good[tower]
    feed = collections.deque()
    step = create_parallel_optimization(model.model_fn, feed.popleft, optimizer, DEVICES[:3], variables=model.variables)

    def state():
        return values([*model.variables, *model.state, *slots(optimizer)])

    feed.extend(good)
    step()
    before = state()
    for _ in range(3):
        feed.extend(good[:tower] + [(x, y + 7)] + good[tower + 1 :])
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"tower {tower} \({DEVICES[tower]}\) failed.*label"):
            step()
        assert_same(state(), before)
        assert not feed
    feed.extend(good)
    step()
    assert not np.array_equal(state()[0], before[0])


WRITING = {
    "read back": lambda v: v.assign_add(1),
    "not read back": lambda v: v.assign_add(1, read_value=False),
    "a raw op": lambda v: tf.raw_ops.AssignAddVariableOp(resource=v.handle, value=1),
    "a branch": lambda v: tf.cond(tf.constant(True), lambda: (v.assign_add(1, read_value=False), 0)[1], lambda: 0),
    "a loop": lambda v: tf.while_loop(lambda i: i < 2, lambda i: i + 0 * v.assign_add(1) + 1, [0]),
    "a function": lambda v: tf.function(lambda: (v.assign_add(1, read_value=False), 0)[1])(),
}


@pytest.mark.parametrize("how", WRITING)
def test_what_a_model_writes_is_taken_back_however_it_writes(how):
    weight, written = tf.Variable(1.0), tf.Variable(5, trainable=False)
    feed = collections.deque()

    def model_fn(input_fn):
        x = input_fn()
        WRITING[how](written)
        tf.debugging.assert_less(tf.reduce_max(x), 100.0, "too large")
        return weight * tf.reduce_mean(x)

    step = create_parallel_optimization(model_fn, feed.popleft, OPTIMIZERS["SGD"](), DEVICES[:3])
    good, bad = np.ones(2, np.float32), np.full(2, 1000, np.float32)
    for trial in range(10):
        feed.extend([good, bad, good])
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"^tower 1 \(/device:CPU:2\) failed.*too large"):
            step()
        assert int(written) == 5, f"trial {trial}"
    feed.extend([good] * 3)
    step()
    assert int(written) == (11 if how == "a loop" else 8)


def test_a_model_may_write_to_a_lookup_table():
    """Which is no variable: what it writes stays, also if the step fails."""
    weight, table = tf.Variable(1.0), tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def model_fn(input_fn):
        x = input_fn()
        table.insert(tf.cast(x, tf.int64), x)
        return weight * tf.reduce_mean(x)

    feed = iter([np.float32([1, 2]), np.float32([2, 3])])
    step = create_parallel_optimization(model_fn, lambda: next(feed), OPTIMIZERS["SGD"](), DEVICES[:2])
    assert float(step()) == 2.0 and int(table.size()) == 3


@pytest.mark.parametrize("named", [True, False])
def test_the_tower_that_failed_is_named_whatever_the_error_says(named, monkeypatch):
    """The model counts its calls, and fails at the limit in its batch. The count is taken back."""
    if not named:  # as for an error that does not say which op it comes from
        blind = types.SimpleNamespace(search=lambda *args: None, split=re.split, MULTILINE=re.MULTILINE)
        monkeypatch.setattr(towers, "re", blind)
    weight, count = tf.Variable(1.0), tf.Variable(0, trainable=False)
    feed = collections.deque([9, 9, 9])

    def model_fn(input_fn):
        (limit,) = input_fn()
        tf.debugging.assert_less(count.assign_add(1), limit[0], "once too often")
        return weight

    step = create_parallel_optimization(
        model_fn, lambda: (np.int32([feed.popleft()]),), OPTIMIZERS["SGD"](), DEVICES[:3]
    )
    step()
    for _ in range(2):
        feed.extend([6, 3, 9])
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"tower 1 \(.*once too often"):
            step()
        assert int(count) == 3


def test_a_failure_that_does_not_come_again_is_told_all_the_same():
    """The model counts its calls and fails at the sixth, of tower 2 in the second step."""
    weight, count = tf.Variable(1.0), tf.Variable(0, trainable=False)

    def model_fn(input_fn):
        tf.debugging.assert_less(count.assign_add(1), 6, "once too often")
        return weight * tf.reduce_mean(input_fn())

    step = create_parallel_optimization(model_fn, lambda: np.ones(2, np.float32), OPTIMIZERS["SGD"](), DEVICES[:3])
    step()
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"tower 2 \(.*once too often"):
            step()
        assert int(count) == 3


def test_an_error_of_python_in_a_tower_is_one_line():
    """And it need not come again: the error says where it comes from."""
    failures = iter([None, OSError("no network")] + [None] * 9)

    def fetch(x):
        failure = next(failures)
        if failure:
            raise failure
        return x

    weight = tf.Variable(1.0)
    step = create_parallel_optimization(
        lambda input_fn: weight * tf.reduce_sum(tf.py_function(fetch, [input_fn()], tf.float32)),
        lambda: np.ones(2, np.float32),
        OPTIMIZERS["SGD"](),
        DEVICES[:3],
    )
    with pytest.raises(tf.errors.OpError) as error:
        step()
    assert error.value.message == ("tower 1 (/device:CPU:2) failed, and no variable was changed: OSError: no network")
    step()


def test_an_update_that_fails_says_so():
    def refuse(weight):
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(weight), 1e3, "too large")]):
            return tf.identity(weight)

    net = keras.layers.Dense(3, kernel_constraint=refuse)
    net.build((None, 4))
    step = create_parallel_optimization(
        lambda input_fn: tf.reduce_mean(net(input_fn()) ** 2),
        lambda: np.ones((2, 4), np.float32),
        keras.optimizers.SGD(1e6),
        DEVICES[:2],
    )
    with pytest.raises(tf.errors.OpError, match="^the update failed, when the towers were done, .*too large"):
        step()


def test_after_a_failed_step_of_a_large_model_the_next_one_works():
    """TensorFlow makes a sum of three or more into a temporary variable if the 256 MB seem short that
    it believes a CPU device to have. Left behind by a failed step, it is in the way of the next one."""
    weight = tf.Variable(tf.zeros([20_000_000]))
    feed = collections.deque()

    def late(x):
        if x.max() > 100:
            time.sleep(1)  # when the sum has begun, with the other towers' gradients
            raise OSError("too large")
        return x

    def model_fn(input_fn):
        x = tf.numpy_function(late, [input_fn()], tf.float32, stateful=False)
        return tf.reduce_mean(x) * tf.reduce_sum(weight)

    step = create_parallel_optimization(model_fn, feed.popleft, keras.optimizers.SGD(1.0), DEVICES[:3])
    batches = [np.full(size, 2, np.float32) for size in (1, 3, 2)]
    for failures in range(3):
        feed.extend([batches[0], 1000 * batches[1], batches[2]])
        with pytest.raises(tf.errors.OpError, match="tower 1 .*too large"):
            step()
        feed.extend(batches)
        step()
        assert weight[0].numpy() == pytest.approx(-2 * (failures + 1))


@pytest.mark.parametrize("end", [StopIteration, functools.partial(tf.errors.OutOfRangeError, None, None, "end")])
def test_the_end_of_the_data_is_out_of_range(end):
    def input_fn():
        raise end()

    step = create_parallel_optimization(lambda input_fn: input_fn(), input_fn, OPTIMIZERS["SGD"](), DEVICES[:2])
    with pytest.raises(tf.errors.OutOfRangeError, match="the data ended at tower 0 of 2"):
        step()


# Sharing


def test_variables_are_those_of_one_tower_and_on_the_controller():
    created = []

    def watch(next_creator, **kwargs):
        created.append(next_creator(**kwargs))
        return created[-1]

    counts = []
    for count in (1, 2, 5):
        created.clear()
        layer = keras.layers.Dense(3)
        with tf.variable_creator_scope(watch):
            step = create_parallel_optimization(
                lambda input_fn, layer=layer: tf.reduce_mean(layer(input_fn()) ** 2),
                lambda: np.ones((2, 4), np.float32),
                keras.optimizers.Adam(),
                DEVICES[:count],
                "/CPU:7",
            )
            step(), step()
        assert {v.device.split("device:")[-1] for v in created if v.shape.rank} == {"CPU:7"}
        assert any(v is layer.kernel.value for v in created)
        counts.append(len(created))
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("kind", ["Keras layer", "plain variable", "next to layers that are kept"])
def test_a_model_that_makes_its_variables_anew_is_refused_by_name(kind):
    """The classic failure: layers made inside the model function are not shared."""
    kept = {}

    def model_fn(input_fn):
        x, beside = input_fn(), 0.0
        if kind == "plain variable":
            factor = tf.Variable(1.0, name="factor")
            if "others" not in kept:  # of the same shape, and of the same name
                kept["others"] = [tf.Variable(2.0, name="kept/a"), tf.Variable([1.0], name="kept/factor")]
            return tf.reduce_mean(x) * factor * kept["others"][0] * kept["others"][1][0]
        if kind == "next to layers that are kept":
            if "layer" not in kept:
                kept["layer"] = keras.layers.Dense(3, name="kept")
            beside = kept["layer"](x)
        return tf.reduce_mean(beside + keras.layers.Dense(3, name="anew")(x))

    optimizer = keras.optimizers.SGD()
    step = create_parallel_optimization(model_fn, lambda: np.ones((2, 4), np.float32), optimizer, DEVICES[:2])
    with pytest.raises(ValueError, match="makes new variables at every call") as error:
        step()
    text = str(error.value)
    assert ("factor:0 ()" if kind == "plain variable" else "anew/kernel:0 (4, 3), anew/bias:0 (3,)") in text
    assert "kept/" not in text and "\n" not in text and int(optimizer.iterations) == 0


def test_frozen_layers_and_variables_are_not_trained_by_default():
    net = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(3)])
    net.build((None, 4))
    net.layers[0].trainable = False
    constant = tf.Variable(2.0, trainable=False)
    optimizer = keras.optimizers.SGD(0.1)
    before = values(net.weights)
    step = create_parallel_optimization(
        lambda input_fn: constant * tf.reduce_mean(net(input_fn()) ** 2),
        lambda: np.ones((2, 4), np.float32),
        optimizer,
        DEVICES[:2],
    )
    step()
    after = values(net.weights)
    assert [np.array_equal(a, b) for a, b in zip(before, after)] == [True, True, False, False]
    assert float(constant) == 2.0


@pytest.mark.parametrize("frozen", [True, False])
def test_layers_that_are_frozen_later_are_not_trained_on_unnoticed(frozen):
    net = keras.Sequential([keras.layers.Dense(4, name="first"), keras.layers.Dense(3)])
    net.build((None, 4))
    net.layers[0].trainable = frozen  # until then

    def make(**options):
        return create_parallel_optimization(
            lambda input_fn: tf.reduce_mean(net(input_fn()) ** 2),
            lambda: np.ones((2, 4), np.float32),
            keras.optimizers.SGD(0.1),
            DEVICES[:2],
            **options,
        )

    step, chosen = make(), make(variables=net.layers[1].trainable_variables)
    step(), chosen()
    net.layers[0].trainable = not frozen
    before = values(net.weights)
    with pytest.raises(ValueError) as error:
        step()
    assert str(error.value).endswith(
        "first/kernel was frozen after the first step: make a new step"
        if frozen
        else "was unfrozen after the first step: make a new step, and an optimizer that is built for all variables"
    )
    assert_same(values(net.weights), before)
    chosen(), make()()
    assert np.array_equal(before[0], values(net.weights)[0]) == frozen


@pytest.mark.parametrize("form", ["list", "function"])
def test_the_variables_to_train_may_be_given(form):
    layers = {}

    def model_fn(input_fn):
        x = input_fn()
        for name in ("a", "b"):
            if name not in layers:
                layers[name] = keras.layers.Dense(4)
            x = layers[name](x)
        return tf.reduce_mean(x**2)

    if form == "list":
        model_fn(lambda: np.ones((2, 4), np.float32))
    variables = layers["b"].trainable_variables if form == "list" else lambda: layers["b"].trainable_variables
    step = create_parallel_optimization(
        model_fn, lambda: np.ones((2, 4), np.float32), keras.optimizers.SGD(0.1), DEVICES[:2], variables=variables
    )
    first = None
    for _ in range(2):
        step()
        weights = values(layers["a"].weights + layers["b"].weights)
        if first:
            assert [np.array_equal(a, b) for a, b in zip(first, weights)] == [True, True, False, False]
        first = weights


def test_two_models_that_share_layers_are_trained_in_turn():
    """A GAN's pattern: each step trains its own variables with its own optimizer; equal to one device."""

    def train(parallel):
        keras.utils.set_random_seed(4)
        maker = keras.Sequential(
            [keras.layers.Dense(5, "tanh", dtype="float64"), keras.layers.Dense(2, dtype="float64")]
        )
        judge = keras.Sequential(
            [keras.layers.Dense(5, "tanh", dtype="float64"), keras.layers.Dense(1, dtype="float64")]
        )
        maker.build((None, 3)), judge.build((None, 2))

        def judge_fn(input_fn):
            noise, real = input_fn()
            return tf.reduce_mean(tf.nn.softplus(judge(maker(noise))) + tf.nn.softplus(-judge(real)))

        def maker_fn(input_fn):
            return tf.reduce_mean(tf.nn.softplus(-judge(maker(input_fn()[0]))))

        rng = np.random.default_rng(0)
        steps = [[(rng.normal(size=(n, 3)), rng.normal(size=(n, 2))) for n in (2, 4)] for _ in range(6)]
        made = []
        for number, (model_fn, net) in enumerate([(judge_fn, judge), (maker_fn, maker)]):
            model = models.Model(model_fn, net.trainable_variables, [], None)
            optimizer = keras.optimizers.Adam(0.05)
            if parallel:
                made.append(parallel_step(model, optimizer, steps[number::2]))
            else:
                step = one_device_step(model, optimizer)
                feed = iter(steps[number::2])
                made.append(lambda step=step, feed=feed: step(concatenate(next(feed))))
        for number in range(6):
            made[number % 2]()
        return values(judge.weights + maker.weights)

    assert_close(train(parallel=True), train(parallel=False), 1e-8)


# What cannot be done is refused


def test_what_is_no_mean_loss_is_refused():
    weight = tf.Variable(tf.ones([3]))
    for model_fn, message in (
        (lambda input_fn: weight * input_fn()[0], r"must return a scalar, the mean loss, not float32 of shape \(3,\)"),
        (lambda input_fn: tf.cast(tf.reduce_sum(weight), tf.int32), "not int32 of shape"),
        (lambda input_fn: tf.reduce_mean(input_fn()), "depends on none of the variables"),
        (lambda input_fn: tf.reduce_mean(tf.stop_gradient(weight)), "depends on none of the variables"),
    ):
        step = create_parallel_optimization(
            model_fn, lambda: np.ones((2, 3), np.float32), OPTIMIZERS["SGD"](), DEVICES[:2]
        )
        with pytest.raises(ValueError, match=message):
            step()
    np.testing.assert_array_equal(weight, np.ones(3))


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_a_model_that_python_cannot_run_is_named_with_its_batch(kind):
    def model_fn(input_fn):
        raise kind("no such thing")

    step = create_parallel_optimization(model_fn, lambda: GOOD, OPTIMIZERS["SGD"](), DEVICES[:2])
    with pytest.raises(ValueError, match=r"(?s)^tower 0: model_fn fails on its batch, .*float32.*: .*no such thing"):
        step()


@pytest.mark.parametrize("error", [TypeError, KeyError])
@pytest.mark.parametrize("kind", ["Keras layer", "plain variable"])
def test_a_first_call_that_fails_leaves_layers_that_can_be_used(kind, error):
    """A `tf.function` gives the variables made in it their values at its end: they would never have them."""
    kept, failures = [], iter([error("not yet")])

    def model_fn(input_fn):
        x = input_fn()
        if not kept:
            kept.append(keras.layers.Dense(1) if kind == "Keras layer" else tf.Variable(lambda: tf.ones([3, 1])))
        loss = tf.reduce_mean((kept[0](x) if kind == "Keras layer" else x @ kept[0]) ** 2)
        for failure in failures:
            raise failure
        return loss

    step = create_parallel_optimization(model_fn, lambda: np.ones((2, 3), np.float32), OPTIMIZERS["SGD"](), DEVICES[:2])
    with pytest.raises((ValueError, KeyError), match="not yet"):
        step()
    losses = [float(step()) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_a_value_that_is_lost_with_a_failed_first_call_is_named():
    kept = []

    def model_fn(input_fn):
        kept.append(tf.Variable(tf.reduce_mean(input_fn(), 0), name="from_data"))
        raise TypeError("not yet")

    step = create_parallel_optimization(model_fn, lambda: GOOD[0], OPTIMIZERS["SGD"](), DEVICES[:2])
    with pytest.raises(ValueError, match="(?s)not yet.*leaves from_data:0 without a value: make it anew"):
        step()


def test_what_is_no_batch_no_optimizer_and_no_place_for_a_step_is_refused():
    weight, optimizer = tf.Variable(1.0), OPTIMIZERS["SGD"]()

    def make(batch=GOOD[0], optimizer=optimizer, model_fn=lambda input_fn: weight * tf.reduce_mean(input_fn())):
        return create_parallel_optimization(model_fn, lambda: batch, optimizer, DEVICES[:2])

    with pytest.raises(TypeError, match="'adam' is no optimizer: take one of keras.optimizers or tf.compat.v1.train"):
        make(optimizer="adam")
    with pytest.raises(ValueError, match=r"tower 0: the first leaf of its batch, \(\), has no axis of examples"):
        make(())()
    with pytest.raises(ValueError, match="tower 0 got a batch that is not all tensors: .*None"):
        make((GOOD[0], None))()
    with pytest.raises(ValueError, match="must return a scalar, the mean loss, not a dict"):
        make(model_fn=lambda input_fn: {"loss": weight})()
    with pytest.raises(RuntimeError, match="a step is a graph of its own: call it from Python, not in a tf.function"):
        tf.function(make())()
    assert float(weight) == 1.0


def test_devices_that_do_not_exist_are_refused_at_once():
    """ "Code that never used the second device": with soft placement TensorFlow would quietly use another."""
    for options in ({"devices": ["/GPU:0"]}, {"devices": DEVICES, "controller": ["/CPU:0", "/GPU:0"]}):
        with pytest.raises(ValueError, match="there is no device /GPU:0; there are /device:CPU:0, "):
            create_parallel_optimization(None, None, None, **options)
    for options in ({"devices": []}, {"devices": DEVICES, "controller": []}):
        with pytest.raises(ValueError, match="must each name at least one device"):
            create_parallel_optimization(None, None, None, **options)


# Placement as executed, and at the same time


def executed(first_call, folder):
    """The nodes of the executed partitions: (name, op, device). TensorFlow records them when a graph runs first."""
    writer = tf.summary.create_file_writer(str(folder))
    with writer.as_default():
        for name, call in (("earlier", lambda: None), ("step", first_call)):  # once asked to, it records for ever
            tf.summary.trace_on(graph=True)
            try:
                call()
            finally:
                tf.summary.trace_export(name, 0)
    writer.close()
    nodes = []
    for path in folder.iterdir():
        for record in tf.data.TFRecordDataset(str(path)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                if value.tag == "step":
                    metadata = tf.compat.v1.RunMetadata.FromString(value.tensor.string_val[0])
                    for graph in (g for f in metadata.function_graphs for g in f.partition_graphs):
                        nodes += [(n.name, n.op, n.device.split("device:")[-1]) for n in graph.node]
    return nodes


PLUMBING = {"NoOp", "_Send", "_Recv", "_HostSend", "_HostRecv", "_Arg", "_Retval", "Const", "Identity"}
PLUMBING |= {"Enter", "Exit", "NextIteration", "Switch", "Merge", "LoopCond"}  # of a loop: where values enter it


@pytest.mark.parametrize("controllers", [["/CPU:0"], ["/CPU:7", "/CPU:8"]])
@pytest.mark.parametrize(
    "name",
    # (a lookup table is looked up where it is, see placement.py)
    [name for name in MODELS if name != "lookup table"]
    if THOROUGH
    else [
        *("dense with L2", "inner device", "inner functions", "batch norm", "embedding", "embedding layer"),
        *("tied embedding", "GRU"),
    ],
)
def test_placement_as_executed(name, controllers, tmp_path):
    """tensorflow#33688, #2441: all gradients were computed on one device. Soft placement is off."""
    from placement import assign_to_device

    tf.config.set_soft_device_placement(False)
    try:
        with assign_to_device(DEVICES[0], controllers):
            model, optimizer = build(name), keras.optimizers.Adam()
        step = parallel_step(model, optimizer, make_steps(model, [2, 3]), controller=controllers)
        nodes = executed(step, tmp_path)
    finally:
        tf.config.set_soft_device_placement(True)
    holders = {controller.split("/")[-1] for controller in controllers}
    work = collections.Counter()
    for node, op, device in nodes:
        tower = node.split("/")[0]
        if "ariableOp" in op or op in ("ResourceGather", "VariableShape"):
            assert device in holders, (node, op, device)
            work["variables", device] += 1
        elif tower in ("tower_0", "tower_1") and op not in PLUMBING:
            assert device in (DEVICES[int(tower[-1])].split(":", 1)[1], "CPU:7" if name == "inner device" else ""), (
                node,
                op,
            )
            work[tower] += 1
            work[tower, device] += 1
        elif (tower in ("average", "update") or tower.startswith("adam")) and op not in PLUMBING:
            assert device in holders, (node, op, device)
            work["controller"] += 1
            work[tower, device] += op in ("AddN", "Add", "AddV2")
    assert work["tower_0"] == work["tower_1"] > 10 and work["controller"] > 5
    assert all(work["variables", holder] for holder in holders)
    if name == "inner device":
        assert work["tower_0", "CPU:7"] == work["tower_1", "CPU:7"] > 0
    if name == "dense with L2":  # sums: one for each gradient, where its variable lives; the loss; the weights
        held = collections.Counter(v.value.device.split("device:")[-1] for v in model.variables)
        held[controllers[0].split("/")[-1]] += 2
        assert {holder: work["average", holder] for holder in holders} == held
    assert any("gradient_tape" in node and "tower_1" in node and device == "CPU:2" for node, _, device in nodes)


def test_towers_that_sit_out_leave_the_others_on_their_own_devices(tmp_path):
    weight, batch = tf.Variable(1.0), np.ones(3, np.float32)
    feed = collections.deque([batch, batch, None, batch, None, batch])
    step = create_parallel_optimization(
        lambda input_fn: weight * tf.reduce_mean(input_fn() ** 2), feed.popleft, OPTIMIZERS["SGD"](), DEVICES[:3]
    )
    step()
    nodes = executed(step, tmp_path)
    squares = {(node.split("/")[0], device) for node, op, device in nodes if op in ("Square", "Pow")}
    assert squares == {("tower_0", "CPU:1"), ("tower_2", "CPU:3")}


def test_the_gradients_of_filters_and_biases_stay_apart(tmp_path):
    """oneDNN fuses them into an op that takes longer than both (on processors where it is used)."""
    model = build("convnet")
    ops = collections.Counter(
        op for _, op, _ in executed(parallel_step(model, OPTIMIZERS["SGD"](), make_steps(model, [2, 2])), tmp_path)
    )
    assert not [op for op in ops if op.endswith("BackpropFilterWithBias")]
    assert ops["BiasAddGrad"] >= 4


@pytest.mark.parametrize("towers", [2, 4])
@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_the_towers_run_at_the_same_time(towers, where):
    """tensorflow#56880: devices that take turns. A rendezvous in the forward pass, met only if all towers are there."""
    barrier = threading.Barrier(towers)
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(2)]

    def meet(x):
        barrier.wait(timeout=30)
        return x

    def model_fn(input_fn):
        x = input_fn()
        for number, layer in enumerate([*layers, None]):
            if number == {"before": 0, "between": 1, "after": 3}[where]:
                x = x + 0 * tf.ensure_shape(tf.numpy_function(meet, [x], tf.float32, stateful=False), x.shape)
            if layer:
                x = layer(x, training=True) if number < 2 else layer(x)
        return tf.reduce_mean(x**2)

    step = create_parallel_optimization(
        model_fn, lambda: np.ones((3, 4), np.float32), OPTIMIZERS["SGD"](), DEVICES[:towers]
    )
    for _ in range(3):
        step()


SEVERAL = MODELS if THOROUGH else ["dropout", "embedding layer", "two inputs, two outputs", "inner functions"]


@pytest.mark.parametrize("name", SEVERAL)
def test_the_laws_of_a_step_hold_for_every_model(name):
    """Towers at the same time, one tracing whatever the sizes, and a step that fails in one of them changes nothing."""
    model, optimizer = build(name), OPTIMIZERS["momentum"]()
    barrier, traced, feed, rng = threading.Barrier(3), [], collections.deque(), np.random.default_rng(0)
    together = True

    def meet(x):
        if together:  # if one fails, they may be run again, one by one
            barrier.wait(timeout=60)
        return x

    def model_fn(input_fn):
        batch, fault = input_fn()
        traced.append(1)
        loss = model.model_fn(lambda: batch)
        met = tf.numpy_function(meet, [fault], tf.int32, stateful=False)
        with tf.control_dependencies([loss]):
            zero = tf.cast(tf.reduce_sum(tf.numpy_function(meet, [met], tf.int32, stateful=False)), loss.dtype)
        tf.debugging.assert_equal(zero, tf.zeros([], loss.dtype), "on purpose")
        return loss + zero

    def state():
        return values([*model.variables, *model.state, *optimizer.variables])

    def run(sizes, bad=None):
        nonlocal together
        together = bad is None
        feed.extend((model.batch(rng, size), np.int32([number == bad])) for number, size in enumerate(sizes))
        return float(step())

    variables = model.variables
    step = create_parallel_optimization(model_fn, feed.popleft, optimizer, DEVICES[:3], variables=variables)
    run([2, 2, 2]), run([1, 3, 2])
    before = state()
    for bad in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"tower {bad} \(.*on purpose"):
            run([2, 1, 1], bad)
        assert_same(state(), before)
    assert np.isfinite(run([3, 1, 1])) and int(optimizer.iterations) == 3
    assert any(not np.array_equal(a, b) for a, b in zip(state(), before))
    assert len(traced) == 1


# Tracing and memory


def test_the_model_is_traced_a_bounded_number_of_times(monkeypatch):
    """And a step is built once for all towers, once if their batches differ in size, and for each that sit out."""
    built = []
    build_step = towers._build_step
    monkeypatch.setattr(towers, "_build_step", lambda *args: built.append(1) or build_step(*args))
    for lazy, expected in ((False, 1), (True, 2)):
        for count in (1, 4):
            calls, feed = [], collections.deque()
            built.clear()
            layer = keras.layers.Dense(2)
            if not lazy:
                layer.build((None, 3))

            def model_fn(input_fn, layer=layer, calls=calls):
                calls.append(1)
                return tf.reduce_mean(layer(input_fn()) ** 2)

            step = create_parallel_optimization(model_fn, feed.popleft, OPTIMIZERS["SGD"](), DEVICES[:count])
            for size in (4, 4, 1, 7, 2):
                feed.extend(np.ones((size + i, 3), np.float32) for i in range(count))
                step()
            feed.extend([np.ones((2, 3), np.float32)] + [None] * (count - 1))
            step()
            assert len(calls) == expected and len(built) == (1 if count == 1 else 2)


def test_changing_lengths_are_traced_once_more_and_then_no_more():
    calls = []
    cell = keras.layers.GRU(2)
    cell.build((None, None, 3))
    lengths = iter([5, 5, 6, 4, 9, 9, 2, 7, 1, 3])

    def model_fn(input_fn):
        calls.append(1)
        return tf.reduce_mean(cell(input_fn()) ** 2)

    step = create_parallel_optimization(
        model_fn, lambda: np.ones((2, next(lengths), 3), np.float32), OPTIMIZERS["SGD"](), DEVICES[:2]
    )
    for _ in range(5):
        step()
    assert len(calls) == 2


def test_ragged_and_sparse_batches_are_batches_too():
    weight = tf.Variable(2.0)
    ragged = iter([tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.ragged.constant([[6.0]])])
    step = create_parallel_optimization(
        lambda input_fn: weight * tf.reduce_sum(input_fn().to_tensor()) / 2,
        lambda: next(ragged),
        OPTIMIZERS["SGD"](),
        DEVICES[:2],
    )
    assert float(step()) == pytest.approx((2 * 6 + 1 * 6) / 3)
    sparse = iter([tf.sparse.from_dense([[1.0, 0.0], [0.0, 3.0]]), tf.sparse.from_dense([[8.0, 0.0]])])
    weight = tf.Variable(2.0)
    step = create_parallel_optimization(
        lambda input_fn: weight * tf.sparse.reduce_sum(input_fn()) / 2,
        lambda: next(sparse),
        OPTIMIZERS["SGD"](),
        DEVICES[:2],
    )
    assert float(step()) == pytest.approx((2 * 4 + 1 * 8) / 3)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in models.SLOW] if THOROUGH else ["batch norm"])
def test_memory_does_not_grow_with_the_steps(name):
    """By what is resident now: the peak that `getrusage` knows was set by larger tests long before."""
    model = build(name)
    batch = model.batch(np.random.default_rng(0), 400)

    def input_fn():
        return tf.nest.map_structure(np.copy, batch)

    step = create_parallel_optimization(model.model_fn, input_fn, OPTIMIZERS["momentum"](), DEVICES[:2])

    def run(steps):
        for _ in range(steps):
            step()
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    before = run(200)
    assert run(1000) - before < 10 * 2**20  # 10 kB per step: its two batches have 31
