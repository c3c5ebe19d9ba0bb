"""Laws of placement: variables on the controller, everything else on the device, inner scopes respected."""

import os
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from hypothesis import given
from hypothesis import strategies as st

import placement
from placement import CONTROLLER, assign_to_device, check_devices, device_options, get_available_gpus, tower_devices

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEVICE, INNER = DEVICES[1], DEVICES[3]


def place(thing):
    """The logical device of a tensor or variable, e.g. CPU:0."""
    return (thing.value if isinstance(thing, keras.Variable) else thing).device.split("device:")[-1]


class Scale(tf.Module):
    """Makes its variable in the first call."""

    scale = None

    def __call__(self, x):
        if self.scale is None:
            self.scale = tf.Variable(2.0)
        return self.scale * x


def plain_variable():
    kept = []

    def run(x):
        kept.append(kept[0] if kept else tf.Variable(2.0))
        return kept[0] * x

    return run, lambda: kept[:1]


def module():
    scale = Scale()
    return scale, lambda: scale.variables


def lazy_layer():
    layer = keras.layers.Dense(2)
    return layer, lambda: layer.weights


def lazy_model_with_state():
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
    return lambda x: model(x, training=True), lambda: model.weights


def built_layer():
    with assign_to_device(INNER, "/CPU:7"):  # for another tower
        layer = keras.layers.Dense(2)
        layer.build((None, 2))
    return layer, lambda: layer.weights


def recurrent_layer():
    layer = keras.layers.GRU(2)
    return lambda x: layer(x[:, None]), lambda: layer.weights


KINDS = {
    "plain variable": plain_variable,
    "tf.Module": module,
    "Keras layer, built before": built_layer,
    "Keras layer, built lazily": lazy_layer,
    "Keras model with state": lazy_model_with_state,
    "recurrent layer": recurrent_layer,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["eager", "scope inside a tf.function", "scope around a tf.function"])
def test_variables_are_on_the_controller_and_ops_on_the_device(kind, how):
    """tensorflow#35952, DeepRec#932: placement functions that missed resource variables."""
    run, variables = KINDS[kind]()
    places = []

    def placed(x):  # a tf.function hands its results to the caller's device, so look at them inside
        with assign_to_device(DEVICE, "/CPU:7"):
            result = run(x)
        places.append(place(result))
        return result

    x = tf.ones([3, 2])
    if how == "eager":
        placed(x)
    elif how == "scope inside a tf.function":
        tf.function(placed)(x)
    else:
        with assign_to_device(DEVICE, "/CPU:7"):
            places.append(place(tf.function(run)(x)))
    assert variables() and {place(variable) for variable in variables()} == {"CPU:7"}
    assert set(places) == {DEVICE.split("device:")[-1]}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("how", ["eager", "scope inside a tf.function", "scope around a tf.function"])
def test_optimizer_slots_are_on_the_controller(legacy, how):
    with assign_to_device(DEVICE, "/CPU:7"):
        optimizer = tf.compat.v1.train.AdamOptimizer() if legacy else keras.optimizers.Adam()
        variable = tf.Variable(1.0)
        if not legacy and how != "eager":  # made in a tf.function, Keras's slots follow the op: tf.device is lost there
            optimizer.build([variable])

    def update():
        optimizer.apply_gradients([(tf.constant(1.0), variable)])

    def placed():
        with assign_to_device(DEVICE, "/CPU:7"):
            (tf.function(update) if how == "scope around a tf.function" else update)()

    (tf.function(placed) if how == "scope inside a tf.function" else placed)()
    assert variable < 1
    slots = optimizer.variables() if legacy else optimizer.variables
    assert len(slots) >= 3 and {place(slot) for slot in [variable, *slots]} == {"CPU:7"}


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_lookup_tables_work_and_are_looked_up_where_they_are(how):
    places = []

    def look_up(keys):
        with assign_to_device(DEVICE):
            values, other = table.lookup(keys) + 1, keys + 1
        places.append(place(other))
        return values

    initializer = tf.lookup.KeyValueTensorInitializer([1, 2], [10, 20])
    with assign_to_device(INNER):
        table = tf.lookup.StaticHashTable(initializer, -1)
    assert place(table.resource_handle) == INNER.split("device:")[-1]
    values = (tf.function(look_up) if how == "graph" else look_up)(tf.constant([2, 3]))
    np.testing.assert_array_equal(values, [21, 0])
    assert set(places) == {DEVICE.split("device:")[-1]}


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_lookup_tables_that_change_stay_where_they_are_made(how):
    with assign_to_device(DEVICE, "/CPU:7"):
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    assert place(table.resource_handle) == DEVICE.split("device:")[-1]

    def count(keys):
        with assign_to_device(INNER, "/CPU:7"):
            table.insert(keys, table.lookup(keys) + 2)
            return table.lookup(keys)

    run = tf.function(count) if how == "graph" else count
    np.testing.assert_array_equal(run(tf.constant([5, 6], tf.int64)), [1, 1])
    np.testing.assert_array_equal(run(tf.constant([6, 7], tf.int64)), [3, 1])


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_layer_that_places_itself_is_built_where_it_says(how):
    layers = [keras.layers.Dense(2), keras.layers.Dense(2)]

    def run(x):
        with assign_to_device(DEVICE, "/CPU:7"):
            with tf.device(INNER):
                x = layers[0](x)
            return layers[1](x)

    (tf.function(run) if how == "graph" else run)(tf.ones([3, 2]))
    assert [place(weight) for layer in layers for weight in layer.weights] == ["CPU:4"] * 2 + ["CPU:7"] * 2


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_an_inner_scope_has_the_last_word(how):
    """DeepRec#932, tensorflow#35952: placement functions that overrode inner device scopes."""
    kept, places = [], set()

    def run():
        with assign_to_device(DEVICE):
            with tf.device(INNER):
                if not kept:
                    kept.append(tf.Variable(1.0))
                inside = kept[0] + 1
            if len(kept) == 1:
                kept.append(tf.Variable(1.0))
            places.add((place(inside), place(kept[1] + 1)))

    (tf.function(run) if how == "graph" else run)()
    names = [device.split("device:")[-1] for device in (INNER, DEVICE)]
    assert places == {tuple(names)}
    assert [place(variable) for variable in kept] == [names[0], "CPU:0"]


def test_scopes_nest_and_end():
    with assign_to_device(DEVICE, "/CPU:7"):
        with assign_to_device(INNER, "/CPU:6"):
            inner = tf.Variable(1.0)
            assert place(inner + 1) == INNER.split("device:")[-1]
        outer = tf.Variable(1.0)
        assert place(outer + 1) == DEVICE.split("device:")[-1]
    with pytest.raises(KeyError), assign_to_device(DEVICE, "/CPU:7"):
        raise KeyError
    after = tf.Variable(1.0)
    assert [place(v) for v in (inner, outer, after)] == ["CPU:6", "CPU:7", "CPU:0"]
    assert place(after + 1) == "CPU:0"


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([tf.float16, tf.float32, tf.float64])), max_size=12),
    st.integers(1, 4),
)
def test_several_controllers_are_filled_least_loaded_by_bytes_first(variables, count):
    controllers = DEVICES[:count]
    load, expected = [0] * count, []
    for size, dtype in variables:
        least = load.index(min(load))
        load[least] += size * dtype.size
        expected.append(controllers[least].split("device:")[-1])
    with assign_to_device(DEVICES[7], controllers):
        made = [tf.Variable(tf.zeros([size], dtype)) for size, dtype in variables]
    assert [place(variable) for variable in made] == expected
    largest = max([size * dtype.size for size, dtype in variables], default=0)
    assert max(load) - min(load) <= largest


def test_a_variable_of_nothing_is_no_load():
    with assign_to_device(DEVICE, ["/CPU:7", "/CPU:8"]):
        made = [tf.Variable(tf.zeros(shape)) for shape in ([0], [], [])]
    assert [place(v) for v in made] == ["CPU:7", "CPU:7", "CPU:8"]


def test_what_an_inner_scope_places_is_no_load_on_the_controllers():
    with assign_to_device(DEVICE, ["/CPU:6", "/CPU:7"]):
        with tf.device(INNER):
            inside = tf.Variable(tf.zeros([100]))
        made = [tf.Variable(tf.zeros([size])) for size in (1, 2, 3)]
    assert [place(v) for v in (inside, *made)] == ["CPU:4", "CPU:6", "CPU:7", "CPU:6"]


def test_the_weights_of_a_model_are_spread_over_the_controllers():
    with assign_to_device(DEVICE, ["/CPU:6", "/CPU:7"]):
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2)])
        model(tf.ones([3, 8]))  # 8 x 4, 4, 4 x 2, 2
    assert [place(weight) for weight in model.weights] == ["CPU:6", "CPU:7", "CPU:7", "CPU:7"]


def test_no_controller_at_all_is_refused():
    with pytest.raises(ValueError, match="controller is an empty list"), assign_to_device(DEVICE, []):
        pass


def test_devices_that_do_not_exist_are_named():
    check_devices(["/CPU:0", "/device:CPU:8", "CPU:1", "/job:localhost/replica:0/task:0/device:CPU:2", "/cpu:3"])
    with pytest.raises(ValueError, match=r"there is no device /GPU:0; there are /device:CPU:0, .*CPU:8$"):
        check_devices(["/CPU:0", "/GPU:0"])
    with pytest.raises(ValueError, match="there is no device /CPU:9;"):
        check_devices(["/CPU:9"])


def test_devices_of_other_machines_that_do_not_exist_are_named(monkeypatch):
    there = [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(2)]
    devices = [types.SimpleNamespace(name=name) for name in there]
    monkeypatch.setattr(placement.tf.config, "list_logical_devices", lambda kind=None: devices)
    check_devices(["/job:worker/task:0", "/job:worker/task:1/device:CPU:0", *there])
    for absent in ("/job:worker/task:2", "/job:ps/task:0", "/job:worker/task:0/device:CPU:1"):
        with pytest.raises(ValueError, match=f"there is no device {absent}; there are {', '.join(there)}$"):
            check_devices([there[0], absent])


def test_a_machine_that_is_not_connected_has_no_devices():
    with pytest.raises(ValueError, match="there is no device /job:worker/task:0; there are /device:CPU:0, "):
        check_devices(["/job:worker/task:0"])
    check_devices(["/job:localhost/task:0/device:CPU:1", "/device:CPU:1", "/CPU:1", "/job:localhost"])


@pytest.mark.parametrize("name", ["/CPU:x", "CPU/0/1:", "/nonsense", 3])
def test_what_is_no_device_name_is_named(name):
    with pytest.raises(ValueError, match="is not the name of a device: write, for instance, /CPU:0 or /GPU:1"):
        check_devices([name])


def test_in_a_graph_an_inner_scope_is_told_from_none():
    """With no device for the ops, as towers are traced; the inner scope names the device that eager ops have anyway."""
    made = []

    @tf.function
    def make():
        with assign_to_device(None, "/CPU:7"):
            if not made:
                made.append(tf.Variable(1.0))
                with tf.device("/CPU:0"):
                    made.append(tf.Variable(1.0))

    make()
    assert [place(v) for v in made] == ["CPU:7", "CPU:0"]


@pytest.mark.parametrize("inner", [DEVICES[0], DEVICES[7]])
def test_an_inner_scope_is_respected_whatever_its_number(inner):
    with assign_to_device(DEVICES[3]), tf.device(inner):
        assert place(tf.Variable(1.0)) == inner.split("device:")[-1]


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_a_number_of_towers_is_a_whole_number_of_at_least_one(count):
    with pytest.raises(ValueError, match=f"^the number of towers must be .* at least 1, not {count!r}$"):
        tower_devices(count)
    with pytest.raises(ValueError, match=f"^threads must be .* at least 1, not {count!r}$"):
        device_options(threads=count)


def test_towers_on_the_cpu_are_beside_the_controller():
    assert get_available_gpus() == []
    assert tower_devices() == ["/device:CPU:1", "/device:CPU:2"]
    assert tower_devices(5) == DEVICES[:5]
    assert CONTROLLER == "/CPU:0" and not any(device.endswith("CPU:0") for device in DEVICES)
    with pytest.raises(RuntimeError, match="too late: 9 CPU towers asked for and there are 8 beside the controller"):
        tower_devices(9)


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that there are three GPUs, the last one split in two, by the public functions that tell."""
    devices = [types.SimpleNamespace(name=f"/physical_device:GPU:{i}", device_type="GPU") for i in range(3)]
    state = types.SimpleNamespace(visible=devices, split={devices[2].name: [1, 2]}, growth={}, started=False)
    real = types.SimpleNamespace(**vars(tf.config))

    def per_gpu(device):
        return state.split.get(device.name) if device in devices else real.get_logical_device_configuration(device)

    def before_start():
        if state.started:
            raise RuntimeError("cannot be modified after being initialized")

    def show(visible, kind):
        before_start()
        state.visible = list(visible)

    def grow(gpu, on):
        before_start()
        state.growth[gpu.name] = on

    def logical(kind=None):
        count = sum(len(per_gpu(gpu) or [1]) for gpu in state.visible)
        return [types.SimpleNamespace(name=f"/device:GPU:{i}") for i in range(count)]

    fake = {
        "list_physical_devices": lambda kind=None: devices,
        "get_visible_devices": lambda kind=None: state.visible if kind == "GPU" else real.get_visible_devices(kind),
        "set_visible_devices": show,
        "get_logical_device_configuration": per_gpu,
        "list_logical_devices": logical,
    }
    for name, function in fake.items():
        monkeypatch.setattr(placement.tf.config, name, function)
    monkeypatch.setattr(placement.tf.config.experimental, "set_memory_growth", grow)
    return state


def test_towers_are_on_all_gpus(gpus):
    assert get_available_gpus() == tower_devices() == [f"/device:GPU:{i}" for i in range(4)]


@pytest.mark.parametrize("count, visible", [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_gpus_that_are_not_asked_for_are_left_alone(gpus, count, visible):
    """tensorflow#31410: memory taken on GPUs that were not asked for."""
    assert tower_devices(count) == [f"/device:GPU:{i}" for i in range(count)]
    assert len(gpus.visible) == visible


@pytest.mark.parametrize("count, visible", [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_the_parts_of_a_gpu_are_used_before_another_gpu_is_taken(gpus, count, visible):
    gpus.split = {gpus.visible[0].name: [1, 2]}
    assert tower_devices(count) == [f"/device:GPU:{i}" for i in range(count)]
    assert len(gpus.visible) == visible


def test_gpus_that_the_user_has_hidden_are_not_used(gpus):
    gpus.visible = gpus.visible[1:]
    assert tower_devices() == get_available_gpus() == [f"/device:GPU:{i}" for i in range(3)]
    device_options()
    assert gpus.growth == {"/physical_device:GPU:1": True}
    gpus.visible = []
    assert tower_devices() == ["/device:CPU:1", "/device:CPU:2"] and get_available_gpus() == []


def test_after_the_start_all_gpus_can_be_had_but_none_can_be_hidden(gpus):
    gpus.started = True
    assert len(tower_devices()) == 4 and len(tower_devices(3)) == 3
    with pytest.raises(RuntimeError) as error:
        tower_devices(1)
    assert str(error.value).startswith("too late: 1 of 4 GPUs asked for") and "\n" not in str(error.value)
    with pytest.raises(RuntimeError, match="^too late: memory growth asked for"):
        device_options()
    assert len(gpus.visible) == 3 and not gpus.growth


def test_more_towers_than_gpus_is_an_error_that_says_how_many_there_are(gpus):
    with pytest.raises(ValueError, match="5 towers asked for, but there are 4 GPUs"):
        tower_devices(5)
    assert len(gpus.visible) == 3


def test_memory_growth_is_set_on_every_whole_gpu(gpus):
    device_options()
    assert gpus.growth == {"/physical_device:GPU:0": True, "/physical_device:GPU:1": True}
    device_options(memory_growth=False)
    assert gpus.growth == {"/physical_device:GPU:0": False, "/physical_device:GPU:1": False}


def in_a_fresh_process(code):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"}
    code = "import tensorflow as tf\nfrom placement import *\nfrom placement import tower_devices as towers\n" + code
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_before_the_start_the_number_of_towers_can_still_change():
    in_a_fresh_process("""
import os
assert get_available_gpus() == []  # which starts nothing
assert towers() == ["/device:CPU:1", "/device:CPU:2"]
assert tf.config.threading.get_inter_op_parallelism_threads() == max(2, os.cpu_count())
assert len(towers(4)) == 4
assert tf.config.threading.get_inter_op_parallelism_threads() == max(4, os.cpu_count())
assert tf.config.threading.get_intra_op_parallelism_threads() == max(1, os.cpu_count() // 4)
assert len(towers(3)) == 3
assert len(tf.config.list_logical_devices()) == 5
assert len(towers(3)) == 3 and len(towers(4)) == 4  # late, but they are there
try:
    towers(5)
except RuntimeError as error:
    assert str(error).startswith("too late: 5 CPU towers asked for and there are 4 beside the controller"), error
else:
    raise SystemExit("no error")
""")


def test_towers_share_the_cores_and_there_is_a_device_for_each():
    in_a_fresh_process("""
import os
for count, cores in (1, 2), (3, 2), (2, 8), (3, 8), (1, None):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, f"{count} towers on {cores} cores"
        continue
    os.cpu_count = lambda: cores
    assert len(towers(count)) == count
    assert tf.config.threading.get_intra_op_parallelism_threads() == max(1, (cores or 1) // count)
    assert tf.config.threading.get_inter_op_parallelism_threads() == max(count, cores or 1)
    assert len(tf.config.list_logical_devices()) == count + 1
    assert len(towers(count)) == count  # late, but they are there
    os._exit(0)
(cpu,) = tf.config.get_visible_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(3)])
assert len(towers(2)) == 2  # who has made the devices has settled their threads
assert tf.config.threading.get_intra_op_parallelism_threads() == 0
""")


def test_a_late_call_is_a_clear_error():
    in_a_fresh_process("""
tf.constant(1.0)
late = {"2 CPU towers asked for and there are 0": towers, "2 threads asked for": lambda: device_options(threads=2)}
for what, call in late.items():
    try:
        call()
    except RuntimeError as error:
        assert str(error).startswith(f"too late: {what}") and "\\n" not in str(error), error
        assert "call tower_devices() and device_options() first" in str(error)
    else:
        raise SystemExit("no error")
""")


def test_device_options_take_effect():
    done = in_a_fresh_process("""
import os
os.cpu_count = lambda: 8
device_options(threads=1)
assert len(towers(1)) == 1
assert tf.config.threading.get_intra_op_parallelism_threads() == 1
device_options(soft_placement=False, log_placement=True, threads=3)
towers(2)
assert tf.config.threading.get_intra_op_parallelism_threads() == 3
assert not tf.config.get_soft_device_placement()
with assign_to_device("/CPU:2"):
    tf.constant(1.0) + 1
device_options()
assert tf.config.get_soft_device_placement() and not tf.debugging.get_log_device_placement()
""")
    assert any("AddV2" in line and "CPU:2" in line for line in done.stderr.splitlines())


@pytest.mark.parametrize("outer", [(DEVICE, "/CPU:7"), (None, "/CPU:7")])
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_the_innermost_scope_places_even_on_the_device_of_an_outer_one(outer, how):
    kept = []

    def run():
        with assign_to_device(*outer), assign_to_device(INNER, outer[0] or "/CPU:0"):
            kept.append(kept[0] if kept else tf.Variable(1.0))

    (tf.function(run) if how == "graph" else run)()
    assert place(kept[0]) == "CPU:" + (outer[0] or "/CPU:0")[-1]
