"""The laws of asynchronous towers. Gates in the model, not the clock, decide which tower is done when."""

import collections
import contextlib
import os
import re
import signal
import threading

import idx
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES, THOROUGH
from hypothesis import given, settings
from hypothesis import strategies as st
from models import OPTIMIZERS, Model, build, floats_and_labels, slots, values
from test_towers import assert_close, assert_same, counting_model, make_steps

import asynchronous
import towers
import train

EXAMPLES = settings.get_profile("thorough").max_examples // 5 if THOROUGH else 8
BATCHES = 60


def asynchronous_step(model_fn, feed, optimizer, count, **options):
    return towers.create_asynchronous_optimization(model_fn, feed, optimizer, DEVICES[:count], **options)


GATES = []


@pytest.fixture(autouse=True)
def open_gates_in_the_end():
    """A test that fails leaves no tower waiting."""
    yield
    open_gates()


def open_gates():
    while GATES:
        GATES.pop().set()


def gated(model_fn):
    """The model, which begins to read its weights when the gate of its batch is opened; batches carry their number."""
    open_gates()
    gates = [threading.Event() for _ in range(BATCHES)]
    GATES.extend(gates)

    def wait(number):
        assert gates[number[0]].wait(30), "a gate was never opened"
        return np.float32(1)

    def gated_model(input_fn):
        *batch, number = input_fn()
        with tf.control_dependencies([tf.numpy_function(wait, [number], tf.float32)]):
            return model_fn(lambda: tuple(batch))

    return gated_model, gates


def numbered(batches):
    """An `input_fn` of these batches, with their numbers, and the list of those it has given away."""
    taken = []

    def input_fn():
        if len(taken) == len(batches):
            raise StopIteration
        taken.append(len(taken))
        return (*batches[taken[-1]], np.full(len(batches[taken[-1]][0]), taken[-1]))

    return input_fn, taken


def alive():
    return {thread for thread in threading.enumerate() if thread.name.startswith("tower_")}


def assert_no_thread_is_left(but):
    """But those of other tests."""
    for thread in alive() - but:
        thread.join(10)
    assert alive() <= but


def projection():
    """A model that writes to a variable it trains: it keeps the kernel at length one."""
    kernel = tf.Variable(np.random.default_rng(3).normal(size=(4, 3)), name="kernel")

    def model_fn(input_fn):
        x, y = input_fn()
        kernel.assign(kernel / tf.norm(kernel))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ kernel))

    return Model(model_fn, [kernel], [], floats_and_labels())


SERIAL = [("tf.Module", name) for name in (OPTIMIZERS if THOROUGH else ("Adam", "EMA", "loss scale"))]
SERIAL += [("LSTM", "v1 Adam"), ("embedding", "Adam"), ("dropout", "AdamW"), ("batch norm", "momentum")]
SERIAL += [("float16", "loss scale"), ("a model that writes its weights", "SGD")]


@pytest.mark.parametrize("name, kind", SERIAL)
def test_one_tower_is_one_synchronous_tower_bit_for_bit(name, kind):
    """Losses, weights, state, slots; no update is stale."""

    def run(create):
        model, optimizer = projection() if name.startswith("a model") else build(name), OPTIMIZERS[kind]()
        feed = iter([batch for step in make_steps(model, [5], 4) for batch in step])
        step = create(model.model_fn, lambda: next(feed), optimizer, DEVICES[:1], variables=model.variables)
        losses = [float(step()) for _ in range(4)]
        with pytest.raises(tf.errors.OutOfRangeError):
            step()
        return step, losses, values([*model.variables, *model.state, *slots(optimizer)])

    step, losses, got = run(towers.create_asynchronous_optimization)
    _, expected_losses, expected = run(towers.create_parallel_optimization)
    assert losses == expected_losses
    assert_same(got, expected)
    assert step.staleness == {0: 4} and step.updates == [4]


def test_three_updates_by_hand():
    """Tower 0 gets the weights, tower 1 gets them and updates twice, then tower 0 updates: its update is two late."""
    weight = tf.Variable(1.0, dtype=tf.float64)
    model_fn, gates = gated(lambda input_fn: tf.reduce_mean(input_fn()[0]) * weight**2 / 2)  # gradient: batch * weight
    input_fn, taken = numbered([(np.float64([value]),) for value in (2, 3, 5)])
    step = asynchronous_step(model_fn, input_fn, keras.optimizers.SGD(0.1), 2)
    gates[1].set()
    assert float(step()) == 1.5 and float(weight) == pytest.approx(1 - 0.1 * 3 * 1)
    gates[2].set()
    assert float(step()) == pytest.approx(5 * 0.7**2 / 2) and float(weight) == pytest.approx(0.7 - 0.1 * 5 * 0.7)
    gates[0].set()
    assert float(step()) == 1.0 and float(weight) == pytest.approx(0.35 - 0.1 * 2 * 1)
    assert step.staleness == {0: 2, 2: 1} and step.updates == [1, 2] and taken == [0, 1, 2]
    with pytest.raises(tf.errors.OutOfRangeError):
        step()


@settings(max_examples=EXAMPLES)
@given(st.sampled_from(sorted(OPTIMIZERS)), st.integers(1, 4), st.lists(st.integers(0, 99), min_size=1, max_size=8))
def test_every_run_is_its_replay_one_update_at_a_time(kind, count, choices):
    """Whichever tower is done first: the gradients are of the weights that its tower got, applied to those of now.

    Staleness is how far the two are apart; the learning rate is as it is, and an update is one batch's gradient, whole.
    """
    model, optimizer = build("tf.Module"), OPTIMIZERS[kind]()
    batches = [batch for step in make_steps(model, [3], len(choices) + count) for batch in step]
    model_fn, gates = gated(model.model_fn)
    input_fn, taken = numbered(batches)
    step = asynchronous_step(model_fn, input_fn, optimizer, count, variables=model.variables)
    at_work, schedule, losses = {}, [], []  # tower -> (batch, updates seen)
    for done, choice in enumerate(choices):
        for tower in range(count):
            if tower not in at_work:
                at_work[tower] = len(schedule) + len(at_work), done
        tower = sorted(at_work)[choice % count]
        batch, seen = at_work.pop(tower)
        gates[batch].set()
        before = step.staleness.copy(), list(step.updates)
        losses.append(float(step()))
        schedule.append((batch, seen))
        assert list(step.staleness - before[0]) == [done - seen]
        assert [b - a for a, b in zip(before[1], step.updates)] == [int(i == tower) for i in range(count)]
        assert taken == list(range(done + count))
    got = values([*model.variables, *slots(optimizer)])
    open_gates()
    step.close()

    model, optimizer = build("tf.Module"), OPTIMIZERS[kind]()
    of_keras = isinstance(optimizer, keras.Optimizer)
    if of_keras:
        optimizer.build(model.variables)
    history, expected = [values(model.variables)], []
    for batch, seen in schedule:
        for variable, value in zip(model.variables, history[seen]):
            variable.assign(value)
        with tf.GradientTape() as tape:
            loss = model.model_fn(lambda batch=batch: batches[batch])
            scaled = optimizer.scale_loss(loss) if of_keras else loss
        gradients = tape.gradient(scaled, model.variables)
        if kind == "loss scale":  # the scale that it divides by: that of now
            gradients = [g * float(optimizer.dynamic_scale) / float(scaled / loss) for g in gradients]
        for variable, value in zip(model.variables, history[-1]):
            variable.assign(value)
        optimizer.apply_gradients(zip(gradients, model.variables))
        history.append(values(model.variables))
        expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    assert_close(got, values([*model.variables, *slots(optimizer)]), 1e-9)


def test_a_scale_of_the_loss_that_others_changed_does_not_change_the_gradient():
    weight = tf.Variable(np.float64(0))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 256.0, dynamic_growth_steps=2)
    model_fn, gates = gated(lambda input_fn: tf.reduce_mean(input_fn()[0]) * weight)
    input_fn, _ = numbered([(np.float64([value]),) for value in (2, 3, 5)])
    step = asynchronous_step(model_fn, input_fn, optimizer, 2, variables=[weight])
    for batch, expected in ((1, -3), (2, -8), (0, -10)):
        gates[batch].set()
        step()
        assert float(weight) == expected
        assert float(optimizer.dynamic_scale) == (256 if batch == 1 else 512)


@pytest.mark.parametrize("name", ["LSTM", "embedding layer", "inner device", "batch norm"])
def test_no_weight_of_the_controller_is_in_the_graph_of_a_tower(name):
    """However deep in a loop it is read; what the model itself writes to is shared."""
    model = build(name)
    feed = iter([batch for step in make_steps(model, [3], 3) for batch in step])
    step = asynchronous_step(model.model_fn, lambda: next(feed), OPTIMIZERS["SGD"](), 2, variables=model.variables)
    step()
    captured = {id(outer) for outer, _ in step.graph().captures}
    assert not captured & {id(v.value.handle) for v in model.variables}
    products = [op.device for op in step.graph().get_operations() if op.type == "MatMul"]
    assert products and all(device.endswith((DEVICES[0][1:], DEVICES[6][1:])) for device in products)
    assert captured >= {id(v.value.handle) for v in model.state}
    assert all(v.value.device.endswith(towers.CONTROLLER[1:]) for v in model.variables)
    step.close()


@settings(max_examples=EXAMPLES * 5)
@given(
    st.integers(1, 4),
    st.lists(st.one_of(st.none(), st.integers(1, 4)), max_size=12),
    st.sampled_from(["stop", "range"]),
)
def test_every_batch_is_applied_once_and_those_before_a_rest_come_first(count, sizes, end):
    """Updates are steps; None has all towers finish; the end comes after the last update, and then the data go on."""
    if count not in FREE:
        model_fn, weight = counting_model(60)
        feed = collections.deque()
        step = asynchronous_step(model_fn, lambda: feed.popleft()(), keras.optimizers.SGD(1.0), count)
        FREE[count] = feed, weight, step
    feed, weight, step = FREE[count]
    weight.assign(np.zeros(60))
    applied = []  # the number of updates done, whenever data are asked for after a rest

    def give(batch):
        return lambda: batch

    def give_after_rest(batch, first):
        def check():
            applied.append((sum(step.updates) - already, first))
            return batch

        return check

    def stop():
        raise StopIteration if end == "stop" else tf.errors.OutOfRangeError(None, None, "end")

    already, examples, before, rested = sum(step.updates), iter(range(60)), 0, False
    for previous, size in zip([1, *sizes], sizes):
        rested = rested or previous is None
        if size is None:
            if previous is not None:  # more in a row than there are towers would be an end
                feed.append(give(None))
            continue
        batch = (np.array([next(examples) for _ in range(size)]),)
        feed.append(give_after_rest(batch, before) if previous is None else give(batch))
        before += 1
    feed.append(stop)
    for _ in range(before):
        step()
    with pytest.raises(tf.errors.OutOfRangeError):
        step()
    assert not feed and sum(step.updates) - already == before
    assert all(done == first for done, first in applied)
    expected = [1 / size for size in sizes if size for _ in range(size)]
    np.testing.assert_allclose(-weight.numpy(), expected + [0] * (60 - len(expected)), rtol=1e-12)
    feed.extend([give((np.array([0]),)), stop])
    step()
    with pytest.raises(tf.errors.OutOfRangeError):
        step()


FREE = {}


@pytest.mark.parametrize("count", [1, 3])
def test_none_for_every_tower_is_the_end(count):
    step = asynchronous_step(lambda input_fn: input_fn(), lambda: None, OPTIMIZERS["SGD"](), count)
    with pytest.raises(tf.errors.OutOfRangeError):
        step()


def test_at_rest_every_batch_taken_has_been_applied():
    model_fn, weight = counting_model(BATCHES)
    model_fn, gates = gated(model_fn)
    input_fn, taken = numbered([(np.array([number]),) for number in range(BATCHES)])
    step = asynchronous_step(model_fn, input_fn, keras.optimizers.SGD(1.0), 3)
    for batch in (2, 1, 4):  # tower 0 is slow
        gates[batch].set()
        step()
    assert taken == [0, 1, 2, 3, 4] and not step.at_rest()
    for batch in (3, 0):
        assert not step.at_rest()
        gates[batch].set()
        step()
    assert step.at_rest() and len(taken) == 5
    np.testing.assert_array_equal(weight, [-1.0] * 5 + [0.0] * (BATCHES - 5))
    gates[6].set()
    step()
    assert taken == list(range(8)) and -weight.numpy()[6] == 1 and not step.at_rest()
    open_gates()
    step.close()


def test_nothing_is_updated_between_two_calls():
    """A tower that is done waits for the caller; the weights stand still, whole, for a checkpoint or a test."""
    model_fn, weight = counting_model(BATCHES)
    model_fn, gates = gated(model_fn)
    input_fn, taken = numbered([(np.array([number]),) for number in range(6)])
    step = asynchronous_step(model_fn, input_fn, keras.optimizers.SGD(1.0), 3)
    gates[0].set()
    step()
    open_gates()
    step.close()  # waits until all towers are done
    assert weight.numpy().sum() == -1 and taken == [0, 1, 2] and step.updates == [1, 0, 0]


def failing_model():
    """Trains one weight per batch; an example of 50 or more fails."""
    model_fn, weight = counting_model(BATCHES)

    def model(input_fn):
        (examples,) = input_fn()
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(examples), np.int64(50), "too large")]):
            return model_fn(lambda: (tf.identity(examples),))

    return model, weight


def test_an_error_in_one_tower_stops_all_and_names_it(monkeypatch):
    others = alive()
    model_fn, weight = failing_model()
    model_fn, gates = gated(model_fn)
    input_fn, taken = numbered([(np.array([value]),) for value in (0, 1, 2, 50, 4, 5)])
    step = asynchronous_step(model_fn, input_fn, keras.optimizers.SGD(1.0), 3)
    gates[1].set()
    step()  # tower 1 gets batch 3 now, which fails while towers 0 and 2 are at work
    plain = asynchronous._reason

    def others_go_on(error):
        gates[0].set(), gates[2].set()
        return plain(error)

    monkeypatch.setattr(asynchronous, "_reason", others_go_on)
    gates[3].set()
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"^tower 1 \(/device:CPU:2\) failed: .*too large"):
            step()
        assert_no_thread_is_left(others)
        assert taken == [0, 1, 2, 3] and np.flatnonzero(weight) == [1] and step.updates == [0, 1, 0]


@pytest.mark.parametrize(
    "bad, message",
    [
        ((np.array([], np.int64),), "tower 1 got an empty batch"),
        ((np.array([1.5]),), "the batch of tower 1 is .*float64.*, but those before were"),
        ((np.array([1]), np.array([1])), "the batch of tower 1 is"),
        ((np.int64(1),), "tower 1: the first leaf of its batch, .* has no axis of examples"),
    ],
)
def test_a_bad_batch_is_refused_by_tower_and_the_others_go_on(bad, message):
    model_fn, weight = counting_model(BATCHES)
    feed = iter([(np.array([0]),), bad, (np.array([2]),), (np.array([3]),)])
    step = asynchronous_step(model_fn, lambda: next(feed), keras.optimizers.SGD(1.0), 2)
    with pytest.raises(ValueError, match=message):
        step()
    for _ in range(3):
        step()
    with pytest.raises(tf.errors.OutOfRangeError):
        step()
    np.testing.assert_array_equal(np.flatnonzero(weight), [0, 2, 3])


def test_batches_of_another_kind_are_traced_while_towers_are_at_work():
    """Variable length after a fixed one: the towers at work finish what they began with."""
    weight = tf.Variable(np.zeros(1))
    model_fn, gates = gated(lambda input_fn: tf.reduce_sum(weight) * tf.reduce_mean(input_fn()[0]))
    input_fn, _ = numbered([(np.ones((1, width)),) for width in (2, 2, 3, 4)])
    step = asynchronous_step(model_fn, input_fn, keras.optimizers.SGD(1.0), 2)
    for batch in (1, 2, 0, 3):
        gates[batch].set()
        step()
    assert float(weight[0]) == -4 and step.staleness == {0: 2, 1: 1, 2: 1}


def test_an_interrupted_caller_loses_nothing_and_can_go_on():
    """Ctrl-C while it waits for a tower."""
    model_fn, weight = counting_model(BATCHES)
    model_fn, gates = gated(model_fn)
    input_fn, _ = numbered([(np.array([number]),) for number in range(4)])
    step = asynchronous_step(model_fn, input_fn, keras.optimizers.SGD(1.0), 2)
    gates[0].set()
    step()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            step()
    finally:
        signal.signal(signal.SIGINT, before)
    open_gates()
    for _ in range(3):
        step()
    with pytest.raises(tf.errors.OutOfRangeError):
        step()
    np.testing.assert_array_equal(weight[:5], [-1, -1, -1, -1, 0])


@pytest.mark.parametrize("how", ["closed", "forgotten", "ended", "failed in the caller"])
def test_no_thread_is_left_behind(how):
    def run():
        model_fn, _ = counting_model(BATCHES)
        feed = iter([(np.array([number]),) for number in range(6)])
        step = asynchronous_step(model_fn, lambda: next(feed), keras.optimizers.SGD(1.0), 3)
        step()
        assert alive() - others
        if how == "closed":
            step.close()
            assert not alive() - others
            with pytest.raises(ValueError, match="this step was closed, its threads have ended: make a new one"):
                step()
        if how == "ended":
            train.do_training(step)
        if how == "failed in the caller":
            raise ZeroDivisionError

    others = alive()
    with pytest.raises(ZeroDivisionError) if how == "failed in the caller" else contextlib.nullcontext():
        run()
    assert_no_thread_is_left(others)


def test_what_synchronous_towers_refuse_is_refused():
    net = keras.layers.Dense(3)
    net.build((None, 4))

    def make(optimizer):
        return asynchronous_step(
            lambda input_fn: tf.reduce_mean(net(input_fn()) ** 2), lambda: np.ones((2, 4), np.float32), optimizer, 2
        )

    with pytest.raises(TypeError, match="'adam' is no optimizer"):
        make("adam")
    with contextlib.closing(make(keras.optimizers.SGD(0.1))) as step:
        with pytest.raises(RuntimeError, match="call it from Python, not in a tf.function"):
            tf.function(step)()
        step()
        net.trainable = False
        with pytest.raises(ValueError, match="kernel was frozen after the first step: make a new step"):
            for _ in range(3):
                step()


# The command line


def run(capsys, *arguments):
    code = train.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_line_reports_staleness_and_one_tower_is_serial(capsys, tmp_path):
    options = ("--data", idx.write_bars(tmp_path, 41), "--epochs", 3, "--batch-size", 8)
    code, out, err = run(capsys, *options, "--parallel", "--towers", 3, "--asynchronous")
    assert (code, err) == (0, "")
    last = r"\nstaleness: mean (\d\.\d\d), max (\d+)\nfinal loss: \d+\.\d{4}\nimages/s: \d+\ntest accuracy: .*\n$"
    mean, most = re.search(last, out).groups()
    assert 0 < float(mean) < 2 and int(most) >= 2  # each epoch begins and ends with less than three at work
    _, alone, _ = run(capsys, *options, "--parallel", "--towers", 1, "--asynchronous")
    _, serial, _ = run(capsys, *options)
    assert "staleness: mean 0.00, max 0" in alone
    losses = [[float(loss) for loss in re.findall(r"loss:? (\d+\.\d+)", text)] for text in (alone, serial)]
    np.testing.assert_allclose(*losses, atol=2e-3)


@pytest.mark.parametrize(
    "arguments, culprit",
    [
        (["--asynchronous"], "--asynchronous needs --parallel"),
        (["--asynchronous", "--parallel", "--deterministic"], "--deterministic is for towers that wait"),
        (["--asynchronous", "--parallel", "--explain"], "--explain is for towers that wait"),
    ],
)
def test_what_does_not_go_together_is_refused(capsys, arguments, culprit):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and culprit in err.splitlines()[-1]


def test_a_run_that_is_stopped_and_resumed_sees_every_example_once_per_epoch(capsys, tmp_path, monkeypatch):
    """Checkpoints are taken at rest: what has been computed by then has been applied, and nothing else."""
    others = alive()
    count, epochs, seen, order, saves = 41, 4, collections.Counter(), [], []
    images, _ = idx.numbered(count)
    idx.write(tmp_path, "train", images, np.arange(count) % 10)
    idx.write(tmp_path, "t10k", *idx.bars(20))
    plain_model, plain_restore = train.mnist.training_model, train.resume.restore

    def recording_model(core):
        model_fn = plain_model(core)

        def record(image):
            seen.update(idx.numbers(image))
            order.extend(idx.numbers(image))
            return np.float32(0)

        def model(input_fn):
            image, label = input_fn()
            with tf.control_dependencies([tf.numpy_function(record, [image], tf.float32)]):
                return model_fn(lambda: (tf.identity(image), label))

        return model

    def recording_restore(*arguments):
        first_step, loss, save = plain_restore(*arguments)

        def recording_save(step, loss):
            saves.append((step, len(order)))
            return save(step, loss)

        return first_step, loss, recording_save

    monkeypatch.setattr(train.mnist, "training_model", recording_model)
    monkeypatch.setattr(train.resume, "restore", recording_restore)
    options = ["--data", tmp_path, "--parallel", "--towers", 3, "--asynchronous", "--batch-size", 4]
    options += ["--epochs", epochs, "--checkpoint-dir", tmp_path / "run", "--checkpoint-every", 5]
    stops = iter([4, 7, 1])  # signals that come so many steps after a start

    def progress(_):
        left = next(stops, None)

        def show(step, loss, rate):
            nonlocal left
            if left is not None:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGTERM)

        return show

    monkeypatch.setattr(train.watch, "progress", progress)
    codes = []
    while not codes or codes[-1] == 128 + signal.SIGTERM:
        code, out, err = run(capsys, *options)
        codes.append(code)
    assert codes == [143, 143, 143, 0] and err == ""
    assert seen == dict.fromkeys(range(count), epochs)
    for epoch in range(epochs):
        assert sorted(order[epoch * count : (epoch + 1) * count]) == list(range(count))
    full, rest = divmod(saves[-1][0], -(-count // 4))
    assert (full, rest) == (epochs, 0) and len(saves) >= 8
    for step, examples in saves:
        epoch, step = divmod(step, 11)
        assert examples == epoch * count + min(4 * step, count)
    code, _, err = run(capsys, *[option for option in options if option != "--asynchronous"])
    assert code == 2 and "another" in err
    assert_no_thread_is_left(others)


def test_a_tower_that_fails_ends_the_run_with_1_and_is_named(capsys, tmp_path, monkeypatch):
    others, plain = alive(), train.mnist.training_model

    def failing(core):
        model_fn = plain(core)

        def model(input_fn):
            image, label = input_fn()
            with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(label), 9, "too large")]):
                return model_fn(lambda: (tf.identity(image), label))

        return model

    monkeypatch.setattr(train.mnist, "training_model", failing)
    data = idx.write_bars(tmp_path, 40)
    code, out, err = run(capsys, "--data", data, "--parallel", "--asynchronous", "--batch-size", 4)
    assert code == 1 and "final loss" not in out
    assert re.fullmatch(r"train.py: tower [01] \(/device:CPU:[12]\) failed: .*too large.*\n", err)
    assert_no_thread_is_left(others)
