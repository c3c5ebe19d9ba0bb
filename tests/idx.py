"""Writes small data folders in MNIST's format."""

import gzip
import os

import numpy as np

NAMES = {"images": "images-idx3-ubyte", "labels": "labels-idx1-ubyte"}


def encode(values):
    """A uint8 array in IDX format."""
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return header + values.astype(np.uint8).tobytes()


def write(folder, split, images, labels, compress=True):
    for kind, values in (("images", images), ("labels", labels)):
        path = os.path.join(folder, f"{split}-{NAMES[kind]}")
        with gzip.open(path + ".gz", "wb", compresslevel=1) if compress else open(path, "wb") as file:
            file.write(encode(values))


def numbered(count):
    """Images that carry their own number in their first four pixels, and labels that follow from it."""
    images = np.zeros((count, 28, 28), np.uint8)
    images[:, 0, :4] = np.arange(count, dtype=">u4").view(np.uint8).reshape(-1, 4)
    return images, np.arange(count) % 10


def numbers(images):
    return [int.from_bytes(bytes(image[0, :4]), "big") for image in np.asarray(images)]


def bars(count, seed=0, classes=10):
    """Images that can be learned: each class is a bright bar in a row of its own, in noise."""
    labels = np.arange(count) % classes
    images = np.random.default_rng(seed).integers(0, 100, (count, 28, 28))
    images[np.arange(count), 2 * labels + 3] = 255
    return images, labels


def write_bars(folder, count, test_count=50):
    write(folder, "train", *bars(count))
    write(folder, "t10k", *bars(test_count, seed=1))
    return str(folder)
