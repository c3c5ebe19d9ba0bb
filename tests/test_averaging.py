"""Laws of averaging. The oracle is TensorFlow on one device, in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from hypothesis import given
from hypothesis import strategies as st

from averaging import average_gradients, weighted_mean

FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
V = [tf.Variable(tf.zeros([4, 3]), name="kernel"), tf.Variable(tf.zeros([3]), name="bias")]

sizes = st.lists(st.integers(1, 7), min_size=1, max_size=6)
seeds = st.integers(0, 2**31)


def random_gradient(rng, kind, dtype=tf.float64):
    """A gradient of a 4 x 3 variable: dense, sparse (rows may repeat), or none."""
    if kind == "none":
        return None
    if kind == "dense":
        return tf.constant(rng.normal(size=(4, 3)), dtype)
    rows = rng.integers(0, 4, rng.integers(1, 6))
    index_dtype = tf.int32 if rng.integers(2) else tf.int64
    return tf.IndexedSlices(
        tf.constant(rng.normal(size=(len(rows), 3)), dtype), tf.constant(rows, index_dtype), tf.constant([4, 3])
    )


def dense(gradient):
    """As a numpy array; none is zero."""
    if gradient is None:
        return np.zeros((4, 3))
    if isinstance(gradient, tf.IndexedSlices):
        array = np.zeros((4, 3))
        np.add.at(array, gradient.indices.numpy(), tf.cast(gradient.values, tf.float64).numpy())
        return array
    return tf.cast(gradient, tf.float64).numpy()


def average_of(gradients, weights=None):
    return average_gradients([[(gradient, V[0])] for gradient in gradients], weights)[0][0]


@given(sizes, seeds)
def test_the_averaged_gradient_is_the_gradient_of_the_mean_loss_over_all_examples(sizes, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(sum(sizes), 4)), rng.normal(size=(sum(sizes), 3))
    kernel, bias = tf.Variable(rng.normal(size=(4, 3))), tf.Variable(rng.normal(size=3))

    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum((tf.tanh(x @ kernel + bias) - y) ** 2, 1))
        return list(zip(tape.gradient(loss, [kernel, bias]), [kernel, bias]))

    cuts = np.cumsum(sizes)[:-1]
    towers = [gradients(*part) for part in zip(np.split(x, cuts), np.split(y, cuts))]
    average, whole = average_gradients(towers, sizes), gradients(x, y)
    for (gradient, variable), (expected, of) in zip(average, whole):
        assert variable is of
        np.testing.assert_allclose(gradient, expected, rtol=1e-11, atol=1e-13)


@given(sizes, seeds)
def test_the_law_holds_for_an_embedding_and_for_one_that_is_tied_to_a_dense_layer(sizes, seed):
    """tensorflow#2283, #5252, as a tape gives them: sparse for a lookup, dense if it is tied as well."""
    rng = np.random.default_rng(seed)
    rows, x = rng.integers(0, 4, sum(sizes)), rng.normal(size=(sum(sizes), 3))
    kernel = tf.Variable(rng.normal(size=(4, 3)))
    tied = [bool(rng.integers(2)) for _ in sizes]

    def gradient(parts):
        """Of the mean over all examples of the parts: each is (rows, x, tied)."""
        with tf.GradientTape() as tape:
            losses = []
            for rows, x, tied in parts:
                losses.append(tf.reduce_sum((tf.gather(kernel, rows) - x) ** 2, 1))
                if tied:
                    losses[-1] += tf.reduce_sum((x @ tf.transpose(kernel)) ** 2, 1)
            loss = tf.reduce_mean(tf.concat(losses, 0))
        return tape.gradient(loss, kernel)

    cuts = np.cumsum(sizes)[:-1]
    parts = list(zip(np.split(rows, cuts), np.split(x, cuts), tied))
    average = average_of([gradient([part]) for part in parts], sizes)
    assert isinstance(average, tf.IndexedSlices) == (not any(tied))
    np.testing.assert_allclose(dense(average), dense(gradient(parts)), rtol=1e-11, atol=1e-13)


kinds = st.lists(st.sampled_from(["dense", "sparse", "none"]), min_size=1, max_size=5)


@given(kinds, seeds, st.booleans())
def test_none_counts_as_zero_sparse_stays_sparse_and_mixed_becomes_dense(kinds, seed, weighted):
    """tensorflow#2283, #5252: `IndexedSlices` crashed the average or were averaged wrongly."""
    rng = np.random.default_rng(seed)
    gradients = [random_gradient(rng, kind) for kind in kinds]
    weights = [float(w) for w in rng.integers(1, 100, len(kinds))] if weighted else None
    average = average_of(gradients, weights)
    present = set(kinds) - {"none"}
    assert (average is None) == (not present)
    assert isinstance(average, tf.IndexedSlices) == (present == {"sparse"})
    expected = np.average([dense(gradient) for gradient in gradients], axis=0, weights=weights)
    np.testing.assert_allclose(dense(average), expected, rtol=1e-12, atol=1e-15)
    if present == {"sparse"}:
        rows = [gradient.indices.numpy() for gradient in gradients if gradient is not None]
        np.testing.assert_array_equal(average.indices, np.concatenate(rows))
        np.testing.assert_array_equal(average.dense_shape, [4, 3])


@given(kinds, seeds, st.randoms())
def test_the_order_of_the_towers_does_not_matter(kinds, seed, random):
    rng = np.random.default_rng(seed)
    towers = [(random_gradient(rng, kind), int(rng.integers(1, 50))) for kind in kinds]
    before = average_of(*zip(*towers))
    random.shuffle(towers)
    np.testing.assert_allclose(dense(average_of(*zip(*towers))), dense(before), rtol=1e-12, atol=1e-15)


@given(kinds, seeds, st.integers(2, 5))
def test_splitting_a_tower_into_several_changes_nothing(kinds, seed, parts):
    rng = np.random.default_rng(seed)
    gradients = [random_gradient(rng, kind) for kind in kinds]
    weights = [int(w) for w in rng.integers(1, 50, len(kinds))]
    split = average_of([gradients[0]] * parts + gradients[1:], [weights[0] / parts] * parts + weights[1:])
    np.testing.assert_allclose(dense(split), dense(average_of(gradients, weights)), rtol=1e-12, atol=1e-15)


@given(kinds, seeds, st.floats(1e-6, 1e6))
def test_only_the_ratios_of_the_weights_matter_and_no_weights_means_equal(kinds, seed, factor):
    rng = np.random.default_rng(seed)
    gradients = [random_gradient(rng, kind) for kind in kinds]
    equal = average_of(gradients, [factor] * len(kinds))
    np.testing.assert_allclose(dense(equal), dense(average_of(gradients)), rtol=1e-12, atol=1e-15)


@given(kinds, seeds, st.floats(1e-6, 1e6))
def test_scaling_all_weights_changes_nothing(kinds, seed, factor):
    rng = np.random.default_rng(seed)
    gradients = [random_gradient(rng, kind) for kind in kinds]
    weights = rng.integers(1, 50, len(kinds))
    np.testing.assert_allclose(
        dense(average_of(gradients, weights * factor)), dense(average_of(gradients, weights)), rtol=1e-12, atol=1e-15
    )


@given(kinds, kinds, seeds)
def test_the_average_of_two_averages_is_the_average_of_all(left, right, seed):
    rng = np.random.default_rng(seed)
    towers = [(random_gradient(rng, kind), int(rng.integers(1, 50))) for kind in left + right]
    halves = [zip(*towers[: len(left)]), zip(*towers[len(left) :])]
    averages = [(average_of(gradients, weights), sum(weights)) for gradients, weights in halves]
    np.testing.assert_allclose(
        dense(average_of(*zip(*averages))), dense(average_of(*zip(*towers))), rtol=1e-12, atol=1e-15
    )


@given(st.sampled_from(["dense", "sparse"]), seeds)
def test_one_tower_is_the_identity(kind, seed):
    gradient = random_gradient(np.random.default_rng(seed), kind)
    for weights in (None, [7]):
        np.testing.assert_array_equal(dense(average_of([gradient], weights)), dense(gradient))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kinds", [["dense"] * 3, ["sparse"] * 3, ["dense", "sparse", "none"]])
@pytest.mark.parametrize("weights", [None, [1, 2, 3]])
def test_dtypes_are_kept_and_sums_are_exact_to_their_rounding(dtype, kinds, weights):
    rng = np.random.default_rng(0)
    gradients = [random_gradient(rng, kind, dtype) for kind in kinds]
    average = average_of(gradients, weights)
    assert average.dtype == dtype
    expected = np.average([dense(gradient) for gradient in gradients], axis=0, weights=weights)
    # slices that repeat a row are summed by whoever uses them, one rounding each
    np.testing.assert_allclose(
        dense(average),
        expected,
        atol=2 * np.abs(expected).max() * float(tf.experimental.numpy.finfo(dtype.as_numpy_dtype).eps),
    )


@pytest.mark.parametrize("weights", [None, [60000, 60000, 1]])
def test_the_sum_may_overflow_float16_as_long_as_the_mean_does_not(weights):
    gradients = [tf.fill([4, 3], tf.constant(60000, tf.float16))] * 3
    np.testing.assert_array_equal(average_of(gradients, weights), gradients[0])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize("weights", [None, [3] * 16])
def test_small_gradients_are_not_lost_beside_a_large_one(dtype, weights):
    large = 2 / float(tf.experimental.numpy.finfo(dtype.as_numpy_dtype).eps)  # here large + 1 == large in 16 bits
    average = average_of([tf.fill([4, 3], tf.cast(g, dtype)) for g in [large] + [1] * 15], weights)
    np.testing.assert_array_equal(average, tf.fill([4, 3], tf.cast((large + 15) / 16, dtype)))


def test_slices_need_not_know_their_dense_shape():
    bare = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 2]))
    np.testing.assert_array_equal(dense(average_of([bare, bare])), dense(bare))
    expected = np.full((4, 3), 0.5)
    expected[1:3] = 1
    np.testing.assert_array_equal(
        average_of([None, bare, bare, tf.ones([4, 3]), tf.ones([4, 3])], [0, 1, 1, 1, 1]), expected
    )


@pytest.mark.parametrize(
    "weights",
    [
        (1, 3),
        [1.0, 3.0],
        np.array([1, 3]),
        np.array([1, 3], np.float16),
        [np.int64(1), np.float32(3)],
        tf.constant([1, 3]),
        tf.constant([1, 3], tf.float64),
        [tf.constant(1), tf.constant(3)],
        [1, tf.constant(3.0)],
    ],
)
def test_weights_may_be_numbers_or_tensors(weights):
    np.testing.assert_allclose(average_of([tf.zeros([4, 3]), tf.ones([4, 3])], weights), np.full((4, 3), 0.75))


@pytest.mark.parametrize("weight", ["many", None, [1, 2], np.ones(3)])
def test_a_weight_that_is_no_number_is_named(weight):
    with pytest.raises(ValueError, match="^the weight of tower 1 is .*: it must be one number"):
        average_of([tf.zeros([4, 3]), tf.ones([4, 3])], [1, weight])


def test_a_tower_of_weight_zero_does_not_count():
    """Not even if its mean over no examples is no number."""
    for nothing in (9 * tf.ones([4, 3]), tf.fill([4, 3], float("nan"))):
        for weights in ([5, 0], tf.constant([5, 0])):
            np.testing.assert_array_equal(average_of([tf.ones([4, 3]), nothing], weights), np.ones((4, 3)))


def test_weights_may_be_unknown_until_the_graph_runs():
    @tf.function
    def average(weights):
        return average_of([tf.zeros([4, 3]), tf.ones([4, 3])], tf.unstack(weights))

    np.testing.assert_allclose(average(tf.constant([1, 3])), np.full((4, 3), 0.75))
    with pytest.raises(tf.errors.InvalidArgumentError, match="weight is negative"):
        average(tf.constant([-1, 3]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="sum to zero"):
        average(tf.constant([0, 0]))


@given(kinds, seeds)
def test_weights_known_and_unknown_before_the_graph_runs_give_the_same(kinds, seed):
    rng = np.random.default_rng(seed)
    gradients = [random_gradient(rng, kind) for kind in kinds]
    weights = rng.integers(1, 50, len(kinds))
    signature = [tf.TensorSpec([len(kinds)], tf.int64)]  # the tensor as it is, not unstacked
    average = tf.function(lambda weights: average_of(gradients, weights), signature)(weights)
    np.testing.assert_allclose(dense(average), dense(average_of(gradients, weights)), rtol=1e-12, atol=1e-15)


def test_weights_of_which_one_is_unknown_are_checked_as_far_as_they_are_known():
    @tf.function
    def average(last, first):
        return average_of([tf.zeros([4, 3]), tf.ones([4, 3])], [first, last])

    np.testing.assert_allclose(average(tf.constant(3), 1), np.full((4, 3), 0.75))
    np.testing.assert_allclose(average(tf.constant(3), 0), np.ones((4, 3)))
    with pytest.raises(ValueError, match="weight of tower 0 is -1"):
        average(tf.constant(3), -1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="weight is negative"):
        average(tf.constant(-1), 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="weight is negative"):  # nan is not 0 or more
        average(tf.constant(float("nan")), 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="sum to zero"):
        average(tf.constant(0), 0)


def test_towers_may_be_iterators_and_variables_keras_ones():
    variable = keras.Variable(np.zeros([4, 3]))
    average = average_gradients(iter([zip([tf.ones([4, 3])], [variable]) for _ in range(2)]))
    assert len(average) == 1 and average[0][1] is variable
    np.testing.assert_array_equal(average[0][0], np.ones((4, 3)))


def test_each_gradient_is_averaged_where_its_variable_lives():
    with tf.device(DEVICES[5]):
        far = tf.Variable(tf.zeros([3]))
    towers = [[(tf.ones([3]), far), (tf.ones([3]), V[1]), (tf.ones([3]), keras.Variable(np.zeros(3)))]] * 2
    average = average_gradients([[*tower] for tower in towers], [1, 2])
    assert average[0][0].device == far.device
    assert average[1][0].device == V[1].device


def holder(make, device):
    with tf.device(device):
        return make(np.zeros((4, 3), np.float32))


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable])
@pytest.mark.parametrize("kinds", [["dense"] * 2, ["sparse"] * 2, ["sparse", "dense"]])
@pytest.mark.parametrize("weights", [None, [1, 2]])
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_two_controllers_each_average_the_gradients_of_their_own_variables(make, kinds, weights, how):
    rng = np.random.default_rng(0)
    variables = [holder(make, device) for device in (DEVICES[5], DEVICES[6])]
    places = []

    def run():
        towers = [[(random_gradient(rng, kind, tf.float32), variable) for variable in variables] for kind in kinds]
        with tf.device(DEVICES[0]):
            for gradient, _ in average_gradients(towers, weights):
                parts = [gradient.values, gradient.indices] if kinds == ["sparse"] * 2 else [gradient]
                places.append({part.device.split("device:")[-1] for part in parts})

    (tf.function(run) if how == "graph" else run)()
    assert places == [{"CPU:6"}, {"CPU:7"}]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6), seeds)
def test_the_weighted_mean_of_scalars(values, seed):
    weights = np.random.default_rng(seed).integers(1, 100, len(values))
    expected = np.average(values, weights=weights)
    mean = weighted_mean([tf.constant(value, tf.float64) for value in values], weights)
    np.testing.assert_allclose(mean, expected, rtol=1e-11, atol=1e-12)


TWINS = [keras.Variable(np.zeros(3), name="twin") for _ in range(2)]  # a layer that was rebuilt: same name, not shared


def pairs(*variables):
    return [(tf.zeros(variable.shape), variable) for variable in variables]


@pytest.mark.parametrize(
    "towers, weights, message",
    [
        ([], None, "there is no tower"),
        (
            [pairs(*V), pairs(V[1], V[0])],
            None,
            "tower 1 has a gradient for variable 'bias:0' where tower 0 has one for variable 'kernel:0'",
        ),
        (
            [pairs(*V), pairs(*V), pairs(V[0])],
            None,
            "tower 2 has 1 gradients and tower 0 has 2: variable 'bias:0' is missing from tower 2",
        ),
        (
            [pairs(V[0]), pairs(*V)],
            None,
            "tower 1 has 2 gradients and tower 0 has 1: variable 'bias:0' is missing from tower 0",
        ),
        (
            [pairs(*V), pairs(*V), pairs(V[0], TWINS[0])],
            None,
            "tower 2 has a gradient for variable 'twin' where tower 0 has one for variable 'bias:0'",
        ),
        ([pairs(TWINS[0]), pairs(TWINS[1])], None, "tower 1 has a gradient for variable 'twin' where tower 0 has one"),
        ([pairs(*V), pairs()], None, "tower 1 has 0 gradients and tower 0 has 2: variable 'kernel:0' is missing"),
        ([pairs(*V), pairs(*V)], tf.constant([1.0, -2.0]), "weight of tower 1 is -2.0"),
        ([pairs(*V), pairs(*V)], [], "there are 2 towers but 0 weights"),
        ([pairs(*V), pairs(*V)], [1, 2, 3], "there are 2 towers but 3 weights"),
        ([pairs(*V), pairs(*V)], [1], "there are 2 towers but 1 weights"),
        ([pairs(*V), pairs(*V)], [1, -0.5], "weight of tower 1 is -0.5"),
        ([pairs(*V), pairs(*V)], [1, float("nan")], "weight of tower 1 is nan"),
        ([pairs(*V), pairs(*V)], [float("inf"), 1], "weight of tower 0 is inf"),
        ([pairs(*V), pairs(*V)], [0, 0], "weights of all 2 towers sum to zero"),
    ],
)
def test_what_cannot_be_averaged_is_refused_by_name(towers, weights, message):
    with pytest.raises(ValueError) as error:
        average_gradients(towers, weights)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_layer_with_a_path_is_named_by_it():
    layers = [keras.layers.Dense(3, name="logits") for _ in range(2)]
    for layer in layers:
        layer.build((None, 4))
    with pytest.raises(ValueError, match=r"^tower 1 has a gradient for variable 'logits/bias' .* 'logits/kernel':"):
        average_gradients([pairs(*layers[0].weights), pairs(*layers[0].weights[::-1])])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize("weights", [None, [1, 1]])
def test_rows_that_repeat_are_summed_wide_where_slices_become_dense(dtype, weights):
    rows = tf.IndexedSlices(tf.fill([2, 3], tf.cast(40000, dtype)), tf.constant([1, 1]), tf.constant([4, 3]))
    average = average_of([rows, tf.zeros([4, 3], dtype)], weights)
    np.testing.assert_array_equal(average[1], tf.fill([3], tf.cast(40000, dtype)))
    small = tf.IndexedSlices(tf.ones([6000, 3], dtype), tf.zeros([6000], tf.int32), tf.constant([4, 3]))
    average = average_of([small, tf.zeros([4, 3], dtype)], weights)
    np.testing.assert_array_equal(average[0], tf.fill([3], tf.cast(3000, dtype)))


def test_a_weight_that_turns_out_not_finite_is_an_error():
    average = tf.function(lambda weights: average_of([tf.zeros([4, 3]), tf.ones([4, 3])], weights))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        average(tf.constant([float("inf"), 1.0]))
