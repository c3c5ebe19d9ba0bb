"""MNIST: the model, its loss, its data.

Every example once per epoch, in an order that depends on the seed alone, shared out evenly among the towers.
`train.py` feeds the tower batches made here to the towers; this file knows nothing of devices.
"""

import functools
import gzip
import math
import os
import zlib

import keras
import numpy as np
import tensorflow as tf

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")


class DataError(ValueError):
    """A data file is missing or damaged; the message names the file and the fault in one line."""


def core_model(num_classes=10):
    """The article's classifier: two convolutions, two dense layers; 3,274,634 parameters for ten classes.

    Args:
      num_classes: Number of classes.

    Returns:
      A `keras.Model` from grey images, floats from 0 to 1 of shape (batch, 28, 28) or (batch, 28, 28, 1), to logits of
      shape (batch, num_classes), float32 under every dtype policy.
    """
    layers = keras.layers
    image = keras.Input((28, 28), name="image")
    x = layers.Reshape((28, 28, 1))(image)
    x = layers.Conv2D(32, 5, padding="same", activation="relu", name="conv2d_1")(x)
    x = layers.MaxPooling2D(2)(x)
    x = layers.Conv2D(64, 5, padding="same", activation="relu", name="conv2d_2")(x)
    x = layers.MaxPooling2D(2)(x)
    x = layers.Flatten()(x)
    x = layers.Dense(1024, activation="relu", name="dense_1")(x)
    logits = layers.Dense(num_classes, dtype="float32", name="dense_2")(x)
    return keras.Model(image, logits, name="mnist")


def training_model(core):
    """Completes the model for training: the mean cross-entropy of a batch.

    Args:
      core: The classifier, e.g. `core_model()`.

    Returns:
      `model_fn(input_fn) -> loss`, a scalar. `input_fn()` returns (image, label): images of shape (batch, 28, 28),
      either bytes, which the tower turns into floats itself (a quarter of the traffic), or floats from 0 to 1; labels
      (batch,).
    """

    def model_fn(input_fn):
        image, label = input_fn()
        logits = core(tf.image.convert_image_dtype(image, tf.float32), training=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits))

    return model_fn


def training_dataset(
    epochs=5, batch_size=128, towers=1, data=DATA, seed=0, first_step=0, num_classes=10, global_batch=None
):
    """The training data, one tower batch per element.

    Step s of an epoch trains on examples s·B to (s + 1)·B of that epoch's permutation, B = batch_size · towers being
    the global batch, however many towers share them. Each gets a run of them; the runs differ by at most one example.
    The last step of an epoch has what is left: if fewer examples than towers, then fewer batches, of one example each.

    Args:
      epochs: Passes over the data.
      batch_size: Examples per tower and step.
      towers: Number of towers.
      data: Folder of the files train-images-idx3-ubyte and train-labels-idx1-ubyte, as they are or with .gz.
      seed: The order of epoch e depends on (seed, e) alone.
      first_step: The step to begin with, counted from the start of the first epoch: what a resumed run passes.
      num_classes: Labels must be below it.
      global_batch: Examples per step, instead of `batch_size` for each tower; at least one for each.

    Returns:
      A `tf.data.Dataset` of (image, label): uint8 (batch, 28, 28) and int32 (batch,).

    Raises:
      ValueError: if an argument is out of range; `DataError` if a file is missing or damaged.
    """
    _check_arguments(epochs=(epochs, 1), towers=(towers, 1), first_step=(first_step, 0))
    if global_batch is None:
        _check_arguments(batch_size=(batch_size, 1))
        global_batch = batch_size * towers
    _check_arguments(global_batch=(global_batch, towers))
    images, labels = map(tf.constant, load(data, "train", num_classes))
    count, steps = len(labels), math.ceil(len(labels) / global_batch)
    first_epoch, skipped = divmod(first_step, steps)

    def one_epoch(epoch):
        order = tf.random.experimental.stateless_shuffle(
            tf.range(count), seed=tf.stack([tf.cast(seed, tf.int64), epoch])
        )
        start = tf.where(epoch == first_epoch, tf.cast(skipped, tf.int64), 0)
        parts = _tower_batches(count, global_batch, towers, start)
        return parts.map(
            lambda low, high: (tf.gather(images, order[low:high]), tf.gather(labels, order[low:high])),
            num_parallel_calls=2,
        )

    return _prefetched(tf.data.Dataset.range(first_epoch, epochs).flat_map(one_epoch), towers)


def test_dataset(batch_size=128, towers=1, data=DATA, num_classes=10):
    """The test data, one pass in file order, shared out like the training data; arguments and errors as there."""
    _check_arguments(batch_size=(batch_size, 1), towers=(towers, 1))
    images, labels = map(tf.constant, load(data, "t10k", num_classes))
    parts = _tower_batches(len(labels), batch_size * towers, towers)
    return _prefetched(parts.map(lambda low, high: (images[low:high], labels[low:high])), towers)


def _tower_batches(count, global_batch, towers, first_step=0):
    """The bounds [low, high) of each tower batch of an epoch, from step `first_step` on; none is empty."""
    steps = math.ceil(count / global_batch)

    def bounds(number):
        step, tower = number // towers, number % towers
        start = step * global_batch
        size = tf.minimum(tf.cast(global_batch, tf.int64), count - start)
        return start + size * tower // towers, start + size * (tower + 1) // towers

    numbers = tf.data.Dataset.range(first_step * towers, steps * towers)
    return numbers.map(bounds).filter(lambda low, high: low < high)


def _prefetched(dataset, towers):
    """Two steps ahead of the training, in order. Autotuning would gain nothing, and its thread ends up to 10 s late."""
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    return dataset.prefetch(2 * towers).with_options(options)


def _check_arguments(**arguments):
    for name, (value, least) in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


def count_examples(data=DATA, split="train"):
    """The number of examples in `data`; split is "train" or "t10k"."""
    return len(load(data, split)[1])


def load(data=DATA, split="train", num_classes=10):
    """Reads and checks the images and labels of a split, once per process unless the files change.

    Args:
      data: Folder of the files.
      split: "train" or "t10k".
      num_classes: Labels must be below it.

    Returns:
      (images, labels): uint8 (count, 28, 28) and int32 (count,).

    Raises:
      DataError: if a file is missing or damaged.

    Source: the IDX format, as described where MNIST was first published.
    """
    paths = [_find(data, f"{split}-{name}") for name in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    return _load(*paths, num_classes, *((os.stat(path).st_mtime_ns, os.stat(path).st_size) for path in paths))


@functools.lru_cache(maxsize=4)
def _load(image_path, label_path, num_classes, *_versions):
    images, labels = _read_idx(image_path, ("images", 28, 28)), _read_idx(label_path, ("labels",))
    if len(images) != len(labels):
        raise DataError(f"{image_path} has {len(images)} images, but {label_path} has {len(labels)} labels")
    if labels.max() >= num_classes:
        first = int(np.argmax(labels >= num_classes))
        raise DataError(f"{label_path}: label {labels[first]} at position {first} is not from 0 to {num_classes - 1}")
    return images, labels.astype(np.int32)


def _find(data, name):
    for path in (os.path.join(data, name), os.path.join(data, name + ".gz")):
        if os.path.isfile(path):
            return path
    raise DataError(f"{os.path.join(data, name)}: no such file, plain or with .gz")


def _read_idx(path, shape):
    """Reads IDX: 0, 0, 8 for unsigned bytes, the number of axes, each axis as a big-endian int32, the data."""
    try:
        with open(path, "rb") as file:
            content = file.read()
        if path.endswith(".gz"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read, {' '.join(str(error).split())}") from error
    axes, header = len(shape), 4 + 4 * len(shape)
    magic = 0x0800 + axes
    found = int.from_bytes(content[:4], "big")
    if len(content) < 4 or found != magic:
        raise DataError(f"{path}: begins with {found:#010x}, not with {magic:#010x}: these are not IDX {shape[0]}")
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4)]
    if len(content) != header + math.prod(sizes):
        raise DataError(f"{path}: has {len(content)} bytes, but its header announces {header + math.prod(sizes)}")
    if sizes[0] == 0:
        raise DataError(f"{path}: there are no {shape[0]} in it")
    if tuple(sizes[1:]) != shape[1:]:
        raise DataError(f"{path}: its {shape[0]} have {' x '.join(map(str, sizes[1:]))} pixels, not 28 x 28")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)
