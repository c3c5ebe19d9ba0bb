"""The table of models and the table of optimizers that every law is tested on: one entry adds one to all tests."""

import collections
import re

import keras
import numpy as np
import tensorflow as tf
from conftest import DEVICES

import mnist

layers = keras.layers

# model_fn and the variables to train; all other state; batch(rng, n) makes n examples. `exact`: N towers are one device
# on the joined batch, to `tolerance` (relative and absolute); otherwise the mathematics differ by definition.
Model = collections.namedtuple("Model", "model_fn variables state batch exact tolerance", defaults=[True, 1e-7])


def cross_entropy(labels, logits):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def floats_and_labels(width=4, classes=3, dtype=np.float64):
    def batch(rng, n):
        return rng.normal(size=(n, width)).astype(dtype), rng.integers(0, classes, n)

    return batch


def words_and_labels(rng, n):
    return rng.integers(0, 20, (n, 5)), rng.integers(0, 3, n)


def classifier(net, **options):
    """A Keras model of floats to three classes."""
    net.build((None, 4))

    def model_fn(input_fn):
        x, y = input_fn()
        return cross_entropy(y, net(x, training=True)) + sum(net.losses)

    return Model(model_fn, net.trainable_variables, net.non_trainable_variables, floats_and_labels(), **options)


def dense_with_l2():
    penalty = keras.regularizers.L2(0.1)
    return classifier(
        keras.Sequential(
            [
                layers.Dense(8, "tanh", kernel_regularizer=penalty, dtype="float64"),
                layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(1.0), dtype="float64"),
            ]
        )
    )


def convnet():
    core = mnist.core_model()

    def batch(rng, n):
        return rng.integers(0, 256, (n, 28, 28)).astype(np.uint8), rng.integers(0, 10, n).astype(np.int32)

    return Model(mnist.training_model(core), core.trainable_variables, [], batch, tolerance=1e-3)


def batch_norm():
    net = [layers.Dense(6, dtype="float64"), layers.BatchNormalization(momentum=0.8, dtype="float64")]
    return classifier(keras.Sequential([*net, layers.Dense(3, dtype="float64")]), exact=False)


def dropout():
    net = [layers.Dense(64, "tanh", dtype="float64"), layers.Dropout(0.5, seed=7, dtype="float64")]
    return classifier(keras.Sequential([*net, layers.Dense(3, dtype="float64")]), exact=False)


def embedding():
    table, head = layers.Embedding(20, 4, dtype="float64"), layers.Dense(3, dtype="float64")
    table.build(), head.build((None, 4))

    def model_fn(input_fn):
        words, y = input_fn()
        return cross_entropy(y, head(tf.reduce_mean(tf.gather(table.embeddings.value, words), 1)))

    return Model(model_fn, table.trainable_variables + head.trainable_variables, [], words_and_labels)


def embedding_layer():
    """Keras's own layer, as most people use it: it asks for ops beside the variable, which lives elsewhere."""
    table, head = layers.Embedding(20, 4, dtype="float64"), layers.Dense(3, dtype="float64")
    net = keras.Sequential([table, layers.Flatten(), head])
    net.build((None, 5))

    def model_fn(input_fn):
        words, y = input_fn()
        return cross_entropy(y, net(words))

    return Model(model_fn, net.trainable_variables, [], words_and_labels)


def tied_embedding():
    """The same matrix looks words up (a sparse gradient) and scores the next word (a dense one)."""
    rng = np.random.default_rng(1)
    matrix = tf.Variable(rng.normal(size=(12, 4)), name="tied")

    def model_fn(input_fn):
        words, following = input_fn()
        return cross_entropy(following, tf.tanh(tf.nn.embedding_lookup(matrix, words)) @ tf.transpose(matrix))

    return Model(model_fn, [matrix], [], lambda rng, n: (rng.integers(0, 12, n), rng.integers(0, 12, n)))


def recurrent(layer):
    def build():
        cell, head = layer(4, dtype="float64"), layers.Dense(3, dtype="float64")
        cell.build((None, 5, 2)), head.build((None, 4))

        def model_fn(input_fn):
            x, y = input_fn()
            return cross_entropy(y, head(cell(x)))

        def batch(rng, n):
            return rng.normal(size=(n, 5, 2)), rng.integers(0, 3, n)

        return Model(model_fn, cell.trainable_variables + head.trainable_variables, [], batch)

    return build


def two_inputs_and_two_outputs():
    shared = layers.Dense(6, "tanh", dtype="float64")
    first, second = layers.Dense(3, dtype="float64"), layers.Dense(1, dtype="float64")
    shared.build((None, 5)), first.build((None, 6)), second.build((None, 6))

    def model_fn(input_fn):
        batch = input_fn()
        hidden = shared(tf.concat([batch["left"], batch["right"]], 1))
        error = second(hidden)[:, 0] - batch["number"]
        return cross_entropy(batch["label"], first(hidden)) + 0.3 * tf.reduce_mean(error**2)

    def batch(rng, n):
        return {
            "left": rng.normal(size=(n, 2)),
            "right": rng.normal(size=(n, 3)),
            "label": rng.integers(0, 3, n),
            "number": rng.normal(size=n),
        }

    variables = [v for layer in (shared, first, second) for v in layer.trainable_variables]
    return Model(model_fn, variables, [], batch)


def frozen_and_unreached():
    """A frozen layer is not trained; a variable that the loss does not reach has no gradient (None)."""
    net = keras.Sequential([layers.Dense(5, "tanh", dtype="float64"), layers.Dense(3, dtype="float64")])
    model = classifier(net)
    net.layers[0].trainable = False
    unreached = tf.Variable(tf.ones([2], tf.float64), name="unreached")
    return model._replace(variables=net.layers[1].trainable_variables + [unreached], state=net.layers[0].weights)


def lookup_table():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant([3, 5, 8], tf.int64), tf.constant([0, 1, 2], tf.int64)), -1
    )
    net = layers.Dense(3, dtype="float64")
    net.build((None, 4))

    def model_fn(input_fn):
        x, code = input_fn()
        return cross_entropy(table.lookup(code), net(x))

    def batch(rng, n):
        return rng.normal(size=(n, 4)), np.array([3, 5, 8])[rng.integers(0, 3, n)]

    return Model(model_fn, net.trainable_variables, [], batch)


class Perceptron(tf.Module):
    """Plain variables; `seen` counts calls, as state that the model itself updates."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(2)
        self.kernels = [tf.Variable(rng.normal(size=shape), name="kernel") for shape in ((4, 5), (5, 3))]
        self.bias = tf.Variable(np.zeros(5), name="bias")
        self.seen = tf.Variable(0, trainable=False, dtype=tf.int64, name="seen")

    def __call__(self, input_fn):
        x, y = input_fn()
        self.seen.assign_add(tf.shape(x, tf.int64)[0])
        return cross_entropy(y, tf.tanh(x @ self.kernels[0] + self.bias) @ self.kernels[1])


def module():
    net = Perceptron()
    return Model(net, net.trainable_variables, [net.seen], floats_and_labels())


def inner_device():
    net = [layers.Dense(5, "tanh", dtype="float64"), layers.Dense(3, dtype="float64")]
    net[0].build((None, 4)), net[1].build((None, 5))

    def model_fn(input_fn):
        x, y = input_fn()
        with tf.device(DEVICES[6]):
            hidden = net[0](x)
        return cross_entropy(y, net[1](hidden))

    return Model(model_fn, net[0].trainable_variables + net[1].trainable_variables, [], floats_and_labels())


def inner_functions():
    """Functions and loops inside the model are graphs of their own."""
    table, head = layers.Embedding(20, 4, dtype="float64"), layers.Dense(3, dtype="float64")
    table.build(), head.build((None, 4))
    look_up = tf.function(lambda words: table(words))

    def model_fn(input_fn):
        words, y = input_fn()
        return cross_entropy(y, head(tf.map_fn(lambda rows: tf.reduce_mean(rows, 0), look_up(words))))

    return Model(model_fn, table.trainable_variables + head.trainable_variables, [], words_and_labels)


def of_dtype(dtype, tolerance):
    def build():
        net = keras.Sequential([layers.Dense(8, "tanh", dtype=dtype), layers.Dense(3, dtype=dtype)])
        net.build((None, 4))

        def model_fn(input_fn):
            x, y = input_fn()
            return cross_entropy(y, tf.cast(net(x), tf.float32))

        return Model(model_fn, net.trainable_variables, [], floats_and_labels(dtype=np.float32), tolerance=tolerance)

    return build


def resnet50():
    net = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None)

    def model_fn(input_fn):
        x, y = input_fn()
        return cross_entropy(y, net(x, training=True))

    def batch(rng, n):
        return rng.normal(size=(n, 32, 32, 3)).astype(np.float32), rng.integers(0, 10, n)

    return Model(model_fn, net.trainable_variables, net.non_trainable_variables, batch, exact=False, tolerance=1e-3)


MODELS = {
    "dense with L2": dense_with_l2,
    "convnet": convnet,
    "batch norm": batch_norm,
    "dropout": dropout,
    "embedding": embedding,
    "embedding layer": embedding_layer,
    "tied embedding": tied_embedding,
    "LSTM": recurrent(layers.LSTM),
    "GRU": recurrent(layers.GRU),
    "two inputs, two outputs": two_inputs_and_two_outputs,
    "frozen and unreached": frozen_and_unreached,
    "lookup table": lookup_table,
    "tf.Module": module,
    "inner device": inner_device,
    "inner functions": inner_functions,
    "float16": of_dtype("float16", 2e-2),
    "mixed_float16": of_dtype("mixed_float16", 2e-2),
    "mixed_bfloat16": of_dtype("mixed_bfloat16", 2e-2),
    "ResNet-50": resnet50,
}
SLOW = {"convnet", "ResNet-50"}

sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam
OPTIMIZERS = {
    "SGD": lambda: sgd(0.1),
    "momentum": lambda: sgd(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    "schedule": lambda: adam(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)),
    "clipnorm": lambda: sgd(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: sgd(0.1, global_clipnorm=0.05),
    "EMA": lambda: adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "v1 Adam": lambda: tf.compat.v1.train.AdamOptimizer(0.01),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(adam(0.01), initial_scale=256.0, dynamic_growth_steps=2),
}


def build(name):
    """The model of that name, with the same weights and seeds every time."""
    keras.utils.set_random_seed(11)
    return MODELS[name]()


def values(variables):
    return [np.array(v.value if isinstance(v, keras.Variable) else v) for v in variables]


def slots(optimizer):
    """The optimizer's variables; those of `tf.compat.v1.train` by name, Adam_9 before Adam_10: they count through."""
    if isinstance(optimizer, keras.Optimizer):
        return optimizer.variables
    return sorted(
        optimizer.variables(), key=lambda v: ("power" in v.name, re.sub(r"\d+", lambda n: n[0].zfill(9), v.name))
    )
