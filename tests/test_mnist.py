"""Laws of the data, the model and its loss."""

import gzip
import hashlib
import os
import re

import idx
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import THOROUGH
from hypothesis import given
from hypothesis import strategies as st

import mnist

counts = st.integers(1, 60)
batch_sizes = st.integers(1, 9)
tower_counts = st.integers(1, 5)
PARTS = [(split, kind) for split in ("train", "t10k") for kind in ("images", "labels")]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that gives a folder with that many numbered examples, made once."""
    folders = {}

    def get(count):
        if count not in folders:
            folders[count] = str(tmp_path_factory.mktemp(f"examples{count}"))
            for split in ("train", "t10k"):
                idx.write(folders[count], split, *idx.numbered(count), compress=bool(count % 2))
        return folders[count]

    return get


def batches(dataset):
    """The numbers of the examples of each batch, after a look at the labels and types."""
    result = []
    for image, label in dataset:
        assert image.dtype == tf.uint8 and label.dtype == tf.int32 and image.shape[1:] == (28, 28)
        result.append(idx.numbers(image))
        np.testing.assert_array_equal(label, np.array(result[-1]) % 10)
    return result


def steps(batches, count, batch_size, towers):
    """Joins tower batches into steps: each has a batch per tower, but for a last one with too few examples."""
    result, batches = [], list(batches)
    while batches:
        for size in [batch_size * towers] * (count // (batch_size * towers)) + [count % (batch_size * towers)]:
            if size:
                active = min(towers, size)
                result.append(batches[:active])
                del batches[:active]
                assert sum(map(len, result[-1])) == size
    return result


@given(counts, batch_sizes, tower_counts, st.integers(1, 3), st.integers(0, 99))
def test_every_example_exactly_once_per_epoch(folder_of, count, batch_size, towers, epochs, seed):
    """tensorflow#41657, #36224: and never an empty batch; the parts of a step differ by one example at the most."""
    seen = batches(mnist.training_dataset(epochs, batch_size, towers, folder_of(count), seed))
    assert all(1 <= len(batch) <= batch_size for batch in seen)
    flat = [number for batch in seen for number in batch]
    for epoch in range(epochs):
        assert sorted(flat[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert len(flat) == epochs * count
    for step in steps(seen, count, batch_size, towers):
        assert max(map(len, step)) - min(map(len, step)) <= 1


@given(counts, st.sampled_from([(1, 2), (2, 4), (3, 6), (1, 5), (4, 8)]), st.integers(1, 3), st.integers(0, 99))
def test_a_step_has_the_same_examples_however_many_towers_share_it(folder_of, count, towers, size, seed):
    few, many = towers
    size *= many
    orders = [
        [sum(step, []) for step in steps(batches(data), count, size // n, n)]
        for n in (1, few, many)
        for data in [mnist.training_dataset(2, size // n, n, folder_of(count), seed)]
    ]
    if size % few == 0:
        assert orders[0] == orders[1]
    assert orders[0] == orders[2]


@given(counts, batch_sizes, tower_counts, st.integers(0, 99), st.integers(0, 40))
def test_a_run_that_starts_at_a_later_step_is_the_tail_of_the_whole_run(
    folder_of, count, batch_size, towers, seed, first_step
):
    """keras-hub#204: a resumed run started the data from the beginning."""
    whole = steps(
        batches(mnist.training_dataset(3, batch_size, towers, folder_of(count), seed)), count, batch_size, towers
    )
    tail = batches(mnist.training_dataset(3, batch_size, towers, folder_of(count), seed, first_step))
    assert tail == [batch for step in whole[first_step:] for batch in step]


def test_the_order_is_that_of_the_seed_and_another_one_in_each_epoch(folder_of):
    def order(seed):
        flat = sum(batches(mnist.training_dataset(2, 7, 2, folder_of(60), seed)), [])
        return flat[:60], flat[60:]

    assert order(3) == order(3)
    assert len({tuple(part) for seed in (3, 4) for part in order(seed)} | {tuple(range(60))}) == 5


@given(counts, batch_sizes, tower_counts)
def test_the_test_data_come_once_and_in_file_order(folder_of, count, batch_size, towers):
    seen = batches(mnist.test_dataset(batch_size, towers, folder_of(count)))
    assert sum(seen, []) == list(range(count)) and all(1 <= len(batch) <= batch_size for batch in seen)
    steps(seen, count, batch_size, towers)


BOUNDARIES = [59900, 59901, 59902, 59949, 59950, 59951, 59999, 60000]


@pytest.mark.parametrize("count", BOUNDARIES if THOROUGH else BOUNDARIES[1::3])
def test_at_the_boundaries_of_the_last_step_no_example_is_lost(tmp_path, count):
    """tensorflow#41657, #36224: two towers of 50; the last step has from 1 example to 100."""
    idx.write(tmp_path, "train", *idx.numbered(count), compress=False)
    seen = batches(mnist.training_dataset(1, 50, 2, str(tmp_path)))
    assert sorted(sum(seen, [])) == list(range(count))
    rest = count % 100 or 100
    assert [len(batch) for batch in steps(seen, count, 50, 2)[-1]] == [n for n in (rest // 2, rest - rest // 2) if n]


@pytest.mark.parametrize("argument", ["epochs", "batch_size", "towers"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "2", True])
def test_arguments_out_of_range_are_named(folder_of, argument, value):
    with pytest.raises(ValueError, match=f"^{argument} must be a whole number of at least 1, not {value!r}$"):
        mnist.training_dataset(**{"data": folder_of(5), argument: value})
    if argument != "epochs":
        with pytest.raises(ValueError, match=f"^{argument} must be a whole number of at least 1, not {value!r}$"):
            mnist.test_dataset(**{"data": folder_of(5), argument: value})


def test_what_is_not_said_is_as_in_the_article(folder_of):
    """Five passes, 128 examples per batch, one tower, seed 0."""
    data = folder_of(300)
    assert batches(mnist.training_dataset(data=data)) == batches(mnist.training_dataset(5, 128, 1, data, 0, 0))
    assert batches(mnist.test_dataset(data=data)) == batches(mnist.test_dataset(128, 1, data))


def test_the_first_step_is_not_negative(folder_of):
    with pytest.raises(ValueError, match="^first_step must be a whole number of at least 0, not -1$"):
        mnist.training_dataset(data=folder_of(5), first_step=-1)


FAULTS = {
    "missing": (lambda path: os.remove(path), "no such file"),
    "a folder": (lambda path: (os.remove(path), os.mkdir(path)), "no such file"),
    "empty": (lambda path: open(path, "wb").close(), "begins with 0x00000000|cannot be read"),
    "not gzip": (lambda path: overwrite(path, b"hello, world"), "cannot be read, Not a gzipped file"),
    "truncated gzip": (lambda path: overwrite(path, read(path)[:-9]), "cannot be read, Compressed file ended"),
    "corrupt gzip": (lambda path: overwrite(path, flip(read(path), -6)), "cannot be read, CRC check failed"),
    "corrupt deflate": (lambda path: overwrite(path, flip(read(path), -12, 0xFF)), "cannot be read, "),
    "wrong magic": (
        lambda path: change(path, lambda data: flip(data, 2)),
        r"begins with 0x0000090\d, not with 0x0000080",
    ),
    "other axes": (
        lambda path: change(path, lambda data: flip(data, 3, 4)),
        r"begins with 0x0000080\d, not with 0x0000",
    ),
    "one byte short": (
        lambda path: change(path, lambda data: data[:-1]),
        r"has \d+ bytes, but its header announces \d+",
    ),
    "one byte over": (lambda path: change(path, lambda data: data + b"0"), r"has \d+ bytes, but its header announces"),
    "huge header": (
        lambda path: change(path, lambda data: flip(data, 4, 0xFF)),
        r"has \d+ bytes, but its header announces \d{10}",
    ),
    "only a header": (lambda path: change(path, lambda data: data[:6]), "bytes, but its header announces"),
    "no examples": (lambda path: change(path, lambda data: none_of(data)), "there are no (images|labels) in it"),
    "one example less": (
        lambda path: change(path, lambda data: one_less(data)),
        r"has \d+ images, but .* has \d+ labels",
    ),
}


def read(path):
    with open(path, "rb") as file:
        return file.read()


def overwrite(path, data):
    with open(path, "wb") as file:
        file.write(data)


def change(path, how):
    overwrite(path, gzip.compress(how(gzip.decompress(read(path)))))


def flip(data, position, bits=1):
    data = bytearray(data)
    data[position] ^= bits
    return bytes(data)


def none_of(data):
    return data[:4] + bytes(4) + data[8 : 4 + 4 * data[3]]


def one_less(data):
    count = int.from_bytes(data[4:8], "big")
    size = (len(data) - 4 - 4 * data[3]) // count
    return data[:4] + (count - 1).to_bytes(4, "big") + data[8:-size]


def check_fault(folder, split, path, message):
    """The message is one line that names the file and the fault; the other split is fine."""
    load = {"train": lambda: mnist.training_dataset(data=folder), "t10k": lambda: mnist.test_dataset(data=folder)}
    with pytest.raises(mnist.DataError) as error:
        load.pop(split)()
    text = str(error.value)
    assert path in text and re.search(message, text) and "\n" not in text, text
    load.popitem()[1]()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("split, kind", PARTS)
def test_a_damaged_file_is_named_with_its_fault(tmp_path, fault, split, kind):
    for each in ("train", "t10k"):
        idx.write(tmp_path, each, *idx.numbered(12))
    path = str(tmp_path / f"{split}-{idx.NAMES[kind]}.gz")
    spoil, message = FAULTS[fault]
    spoil(path)
    check_fault(str(tmp_path), split, path.removesuffix(".gz"), message)


@given(data=st.data())
def test_a_file_with_any_bytes_changed_or_cut_is_read_right_or_refused(tmp_path_factory, data):
    folder = str(tmp_path_factory.mktemp("fuzz"))
    idx.write(folder, "train", *idx.numbered(6), compress=data.draw(st.booleans(), "compressed"))
    name = data.draw(st.sampled_from(sorted(os.listdir(folder))), "file")
    path = os.path.join(folder, name)
    content = read(path)
    content = content[: data.draw(st.integers(0, len(content)), "length")]
    for _ in range(data.draw(st.integers(0, 3), "changes") if content else 0):
        content = flip(content, data.draw(st.integers(0, min(len(content) - 1, 30))), data.draw(st.integers(1, 255)))
    overwrite(path, content)
    try:
        images, labels = mnist.load(folder)
    except mnist.DataError as error:
        assert folder in str(error) and "\n" not in str(error)
    else:
        assert images.shape == (6, 28, 28) and labels.shape == (6,) and 0 <= labels.min() <= labels.max() < 10


def test_labels_out_of_range_are_refused_unless_there_are_more_classes(tmp_path):
    images, labels = idx.numbered(12)
    labels[7] = 10
    idx.write(tmp_path, "train", images, labels)
    with pytest.raises(
        mnist.DataError, match=r"train-labels-idx1-ubyte.gz: label 10 at position 7 is not from 0 to 9$"
    ):
        mnist.training_dataset(data=str(tmp_path))
    mnist.training_dataset(data=str(tmp_path), num_classes=11)


def test_images_of_another_size_are_refused(tmp_path):
    idx.write(tmp_path, "train", np.zeros((3, 32, 32)), np.zeros(3))
    with pytest.raises(
        mnist.DataError, match=r"train-images-idx3-ubyte.gz: its images have 32 x 32 pixels, not 28 x 28"
    ):
        mnist.training_dataset(data=str(tmp_path))


def test_plain_files_go_before_compressed_ones_and_changed_files_are_read_again(tmp_path):
    idx.write(tmp_path, "train", *idx.numbered(5))
    assert mnist.count_examples(str(tmp_path)) == 5
    idx.write(tmp_path, "train", *idx.numbered(7), compress=False)
    assert mnist.count_examples(str(tmp_path)) == 7
    idx.write(tmp_path, "train", *idx.numbered(8), compress=False)
    assert mnist.count_examples(str(tmp_path)) == 8
    with pytest.raises(mnist.DataError, match="t10k-images-idx3-ubyte: no such file, plain or with .gz"):
        mnist.count_examples(str(tmp_path), "t10k")


def test_the_files_in_the_repository_are_mnist():
    with open(os.path.join(mnist.DATA, "README.md")) as file:
        sums = dict(reversed(line.split()) for line in file if re.match(r"^[0-9a-f]{64}  ", line))
    assert len(sums) == 4
    for name, expected in sums.items():
        assert hashlib.sha256(gzip.decompress(read(os.path.join(mnist.DATA, name + ".gz")))).hexdigest() == expected
    assert mnist.count_examples() == 60000 and mnist.count_examples(split="t10k") == 10000


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_the_model_is_the_article_s(policy):
    keras.config.set_dtype_policy(policy)
    try:
        core = mnist.core_model()
        again = mnist.core_model(62)
    finally:
        keras.config.set_dtype_policy("float32")
    assert core.count_params() == 3_274_634
    shapes = [(layer.name, [tuple(w.shape) for w in layer.weights]) for layer in core.layers if layer.weights]
    assert shapes == [
        ("conv2d_1", [(5, 5, 1, 32), (32,)]),
        ("conv2d_2", [(5, 5, 32, 64), (64,)]),
        ("dense_1", [(3136, 1024), (1024,)]),
        ("dense_2", [(1024, 10), (10,)]),
    ]
    for images in (np.zeros((2, 28, 28), np.float32), np.zeros((2, 28, 28, 1), np.float32)):
        logits = core(images)
        assert logits.shape == (2, 10) and logits.dtype == tf.float32
    assert again(images).shape == (2, 62) and again.layers[-1].name == "dense_2"
    activations = [layer.activation.__name__ for layer in core.layers if hasattr(layer, "activation")]
    assert activations == ["relu", "relu", "relu", "linear"]


def test_the_loss_is_the_mean_cross_entropy_and_bytes_are_as_good_as_floats():
    core = mnist.core_model()
    images, labels = idx.bars(9)
    images = images.astype(np.uint8)
    floats = (images / 255).astype(np.float32)
    logits = core(floats).numpy().astype(np.float64)
    expected = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(9), labels])
    for image in (images, floats):
        loss = mnist.training_model(core)(lambda image=image: (tf.constant(image), tf.constant(labels)))
        assert loss.shape == () and loss.dtype == tf.float32
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_the_model_is_called_for_training():
    calls = []

    def core(image, training=False):
        calls.append(training)
        return tf.zeros([image.shape[0], 10])

    mnist.training_model(core)(lambda: (tf.zeros([2, 28, 28]), tf.constant([1, 2])))
    assert calls == [True]
