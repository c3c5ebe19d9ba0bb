"""Averaging: many gradients become one.

The mean over all examples of the step, exactly, however unequally they were shared out: Σ wᵢ gᵢ / Σ wᵢ.
`towers.py` calls it once per step; this file knows neither models nor devices beyond "where the variable lives".
"""

import keras
import tensorflow as tf


def average_gradients(tower_grads, weights=None):
    """Averages each variable's gradient over the towers, on the device that holds the variable.

    With gᵢ the gradient of tower i's mean loss over its wᵢ examples, the gradient of the mean loss over all examples is
    Σ wᵢ gᵢ / Σ wᵢ. A tower without a gradient (None) counts as zero: its loss does not depend on the variable. So does
    a tower of weight 0, whatever its gradient.

    Slices of several towers may have the same index, as those of one may. Keras's optimizers do not add these up: Adam
    and others square each by itself. They do so on one device as well; but a model that makes the indices of its batch
    unique (`tf.unique`) has none twice there, and some twice here, where towers share them.

    Args:
      tower_grads: One list of (gradient, variable) per tower, the same variables in the same order. A gradient has its
        variable's shape; it is a tensor, a `tf.IndexedSlices`, or None.
      weights: One number or scalar tensor per tower, its number of examples. None means equal.

    Returns:
      A list of (gradient, variable). The gradient is None if every tower's is None; `tf.IndexedSlices` if all that are
      not None are (values scaled, indices concatenated); dense otherwise. Dtypes are kept; 16-bit gradients are summed
      in float32, so that a sum may pass 65,504 as long as the mean does not.

    Raises:
      ValueError: if there is no tower, if towers disagree on the variables or their number, or if weights are missing,
        negative, not finite or sum to zero. (Weights unknown before the graph runs: `tf.errors.InvalidArgumentError`
        then.)

    Source: the CIFAR-10 multi-GPU tutorial's function of this name, less its faults: tensorflow#2283 and #5252
      (`IndexedSlices`), and a mean of means that over-weights the smaller batch.
    """
    towers = [list(grads_and_vars) for grads_and_vars in tower_grads]
    _check_same_variables(towers)
    shares = _shares(weights, len(towers))
    average = []
    for pairs in zip(*towers):
        gradients, variable = [gradient for gradient, _ in pairs], pairs[0][1]
        with tf.device(_device(variable)):
            average.append((_mean(gradients, shares), variable))
    return average


def weighted_mean(values, weights=None):
    """Averages one tensor per tower: Σ wᵢ xᵢ / Σ wᵢ. Arguments and errors as for `average_gradients`."""
    return _mean(list(values), _shares(weights, len(values)))


def _mean(gradients, shares):
    """Σ shareᵢ gᵢ, where the shares sum to one; None for `shares` means 1/n each, None for a gradient means zero."""
    count = len(gradients)
    shares = [None] * count if shares is None else shares
    present = [(gradient, share) for gradient, share in zip(gradients, shares) if gradient is not None]
    if not present:
        return None
    dtype = present[0][0].dtype
    wide = tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype

    def scaled(tensor, share):
        tensor = tf.cast(tensor, wide)
        if share is None:
            return tensor / tf.cast(count, wide)
        return tf.math.multiply_no_nan(tensor, tf.cast(share, wide))  # the mean of no examples, NaN, counts nothing

    if all(isinstance(gradient, tf.IndexedSlices) for gradient, _ in present):
        return tf.IndexedSlices(
            values=tf.cast(tf.concat([scaled(gradient.values, share) for gradient, share in present], 0), dtype),
            indices=tf.concat([tf.cast(gradient.indices, tf.int64) for gradient, _ in present], 0),
            dense_shape=present[0][0].dense_shape,
        )
    dense = [(_dense(gradient, present, wide), share) for gradient, share in present]
    if shares[0] is None:  # one division after the sum, not one per tower
        return tf.cast(scaled(tf.add_n([tf.cast(gradient, wide) for gradient, _ in dense]), None), dtype)
    return tf.cast(tf.add_n([scaled(gradient, share) for gradient, share in dense]), dtype)


def _dense(gradient, present, wide):
    """The gradient as a tensor; slices take the number of rows from a tower whose gradient is dense."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = next(tf.shape(other)[0] for other, _ in present if not isinstance(other, tf.IndexedSlices))
    return tf.math.unsorted_segment_sum(tf.cast(gradient.values, wide), gradient.indices, rows)


def _shares(weights, count):
    """wᵢ / Σ wᵢ for each tower, in float64; None for equal weights."""
    if weights is None:
        return None
    weights = list(weights) if not tf.is_tensor(weights) else tf.unstack(weights)
    if len(weights) != count:
        raise ValueError(
            f"there are {count} towers but {len(weights)} weights: give one per tower, its number of examples"
        )
    weights = [_weight(weight, i) for i, weight in enumerate(weights)]
    known = [tf.get_static_value(weight) for weight in weights]
    for i, weight in enumerate(known):
        if weight is not None and not 0 <= weight < float("inf"):
            raise ValueError(f"the weight of tower {i} is {weight}: it must be a number of examples, 0 or more")
    if None not in known and sum(known) == 0:
        raise ValueError(f"the weights of all {count} towers sum to zero: there is no example to average over")
    total = tf.add_n(weights)
    if None in known:
        tf.debugging.assert_non_negative(weights, "a tower's weight is negative")
        tf.debugging.assert_positive(total, "the towers' weights sum to zero")
        tf.debugging.assert_less(total, tf.constant(float("inf"), tf.float64), "a tower's weight is not finite")
    return [weight / total for weight in weights]


def _weight(weight, i):
    try:  # a Python number is not cast: that would make a float32 of it first
        tensor = tf.cast(weight, tf.float64) if tf.is_tensor(weight) else tf.constant(weight, tf.float64)
        tensor.shape.assert_is_compatible_with([])
        return tensor
    except (TypeError, ValueError) as error:
        raise ValueError(f"the weight of tower {i} is {weight!r}: it must be one number, its examples") from error


def _check_same_variables(towers):
    if not towers:
        raise ValueError("there is no tower to average over: tower_grads is empty")
    for i, tower in enumerate(towers[1:], start=1):
        for (_, first), (_, other) in zip(towers[0], tower):
            if first is not other:
                raise ValueError(
                    f"tower {i} has a gradient for {_name(other)} where tower 0 has one for {_name(first)}: "
                    "every tower must list the same variables in the same order"
                )
        if len(tower) != len(towers[0]):
            longer = max(towers[0], tower, key=len)
            _, variable = longer[min(len(towers[0]), len(tower))]
            raise ValueError(
                f"tower {i} has {len(tower)} gradients and tower 0 has {len(towers[0])}: "
                f"{_name(variable)} is missing from tower {i if longer is towers[0] else 0}"
            )


def _name(variable):
    return f"variable {getattr(variable, 'path', None) or getattr(variable, 'name', variable)!r}"


def _device(variable):
    variable = variable.value if isinstance(variable, keras.Variable) else variable
    return getattr(variable, "device", "")
