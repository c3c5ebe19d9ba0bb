"""The contenders of the benchmarks: the towers, and each peer in the form that its documentation recommends.

    python tests/contenders.py NAME    serves one of them: reads numbers of steps, answers with seconds (see serve)

Each runs in a process of its own, because devices and threads are set once per process. All train from the same
initial weights, on the same images step by step, from the same kind of data set, with the same optimizer: the losses
that they report must agree. Names end in the threads per op where a peer has a choice (0: TensorFlow's default).
"""

import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import keras
import numpy as np
import tensorflow as tf

import mnist
from explain import explain
from fused_adam import FusedAdam
from placement import tower_devices
from towers import create_parallel_optimization

BATCHES = 20  # of a whole step each, held in memory, used in turn


def mnist_data(batch_size):
    return tuple(array[: BATCHES * batch_size] for array in mnist.load())


def mnist_model():
    keras.utils.set_random_seed(0)
    core = mnist.core_model()
    return mnist.training_model(core), core.trainable_variables


def resnet_data(batch_size):
    rng = np.random.default_rng(0)
    return rng.normal(size=(2 * batch_size, 32, 32, 3)).astype(np.float32), np.zeros(2 * batch_size, np.int32)


def resnet_model():
    keras.utils.set_random_seed(0)
    net = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None)

    def model_fn(input_fn):
        image, label = input_fn()
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(label, net(image, training=True)))

    return model_fn, net.trainable_variables


def tiny_data(batch_size):
    rng = np.random.default_rng(0)
    return rng.normal(size=(2 * batch_size, 10)).astype(np.float32), np.zeros(2 * batch_size, np.int32)


def tiny_model():
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(10)
    layer.build((None, 10))

    def model_fn(input_fn):
        x, label = input_fn()
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(label, layer(x)))

    return model_fn, layer.trainable_variables


MODELS = {"mnist": (mnist_model, mnist_data), "resnet": (resnet_model, resnet_data), "tiny": (tiny_model, tiny_data)}


def dataset(arrays, batch_size, ahead):
    """What feeds every contender. There is nothing here to tune, and autotuning delays the end of a process."""
    options = tf.data.Options()
    options.autotune.enabled = False
    batches = tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size, drop_remainder=True)
    return batches.cache().repeat().prefetch(ahead).with_options(options)


def towers(name, count, batch_size):
    devices = tower_devices(count)
    model, data = MODELS[name]
    model_fn, variables = model()
    feed = iter(dataset(data(count * batch_size), batch_size, 2 * count))
    step = create_parallel_optimization(model_fn, lambda: next(feed), FusedAdam(), devices, variables=variables)
    return repeat(step)


def serial(name, batch_size):
    model, data = MODELS[name]
    model_fn, variables = model()
    feed, optimizer = iter(dataset(data(batch_size), batch_size, 2)), FusedAdam()
    optimizer.build(variables)

    @tf.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = model_fn(lambda: batch)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return repeat(lambda: step(next(feed)))


def strategy(kind, create_optimizer, name, count, batch_size, steps_per_call, threads):
    """`MirroredStrategy`, `CentralStorageStrategy`: distributed dataset, `tf.function`, one or several steps a call."""
    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    logical_cpus(count)
    devices = [f"/cpu:{i}" for i in range(count)]
    if kind == "mirrored":
        distribution = tf.distribute.MirroredStrategy(devices)
    else:
        distribution = tf.distribute.experimental.CentralStorageStrategy(devices, "/cpu:0")
    model, data = MODELS[name]
    with distribution.scope():
        model_fn, variables = model()
        optimizer = create_optimizer()
        optimizer.build(variables)
    size = count * batch_size
    feed = iter(distribution.experimental_distribute_dataset(dataset(data(size), size, 2)))

    def replica(batch):
        with tf.GradientTape() as tape:
            loss = model_fn(lambda: batch) / count
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    @tf.function
    def several(feed):
        for _ in tf.range(steps_per_call - 1):
            distribution.run(replica, args=(next(feed),))
        return distribution.reduce("sum", distribution.run(replica, args=(next(feed),)), axis=None)

    @tf.function
    def single(batch):
        return distribution.reduce("sum", distribution.run(replica, args=(batch,)), axis=None)

    return repeat(lambda: single(next(feed))) if steps_per_call == 1 else repeat(lambda: several(feed), steps_per_call)


def legacy(count, batch_size, threads):
    """The graph-mode program of 2017, on `tf.compat.v1`: device functions, reused variables, a session."""
    v1 = tf.compat.v1
    initial = [variable.numpy() for variable in mnist_model()[1]]
    graph = tf.Graph()

    def place(device):
        variables = ("VariableV2", "VarHandleOp", "Variable")
        return lambda op: "/cpu:0" if op.type in variables else device

    def layer(x, number, convolution=False):
        kernel, bias = (
            v1.get_variable(name, value.shape, initializer=v1.constant_initializer(value))
            for name, value in zip((f"kernel_{number}", f"bias_{number}"), initial[2 * number : 2 * number + 2])
        )
        return tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME") if convolution else x @ kernel, bias)

    with graph.as_default():
        v1.disable_resource_variables()
        iterator = v1.data.make_initializable_iterator(dataset(mnist_data(count * batch_size), batch_size, 2 * count))
        optimizer, tower_grads, losses = v1.train.AdamOptimizer(epsilon=1e-7), [], []
        for number in range(count):
            with graph.device(place(f"/cpu:{number + 1}")), v1.variable_scope("model", reuse=number > 0):
                image, label = iterator.get_next()
                x = tf.reshape(tf.image.convert_image_dtype(image, tf.float32), [-1, 28, 28, 1])
                x = tf.nn.max_pool2d(tf.nn.relu(layer(x, 0, True)), 2, 2, "SAME")
                x = tf.nn.max_pool2d(tf.nn.relu(layer(x, 1, True)), 2, 2, "SAME")
                x = tf.nn.relu(layer(tf.reshape(x, [-1, 3136]), 2))
                logits = layer(x, 3)
                losses.append(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)))
                tower_grads.append(optimizer.compute_gradients(losses[-1]))
        with graph.device("/cpu:0"):
            average = [
                (tf.reduce_mean(tf.stack([gradient for gradient, _ in pairs]), 0), pairs[0][1])
                for pairs in zip(*tower_grads)
            ]
            with v1.variable_scope("train", reuse=v1.AUTO_REUSE):
                train = optimizer.apply_gradients(average)
            loss = tf.reduce_mean(tf.stack(losses))
        options = v1.ConfigProto(device_count={"CPU": count + 1}, allow_soft_placement=True)
        options.intra_op_parallelism_threads = threads
        session = v1.Session(graph=graph, config=options)
        session.run([v1.global_variables_initializer(), iterator.initializer])
    return repeat(lambda: session.run([loss, train])[0])


def matmul(dtype):
    """How fast the processor multiplies matrices, with all cores: a 'step' is one product of 2,048 x 2,048."""
    a = tf.cast(tf.random.normal([2048, 2048]), dtype)
    step = tf.function(lambda: tf.reduce_sum(tf.cast((a @ a)[0, :1], tf.float32)))
    return repeat(step)


def convolution(dtype):
    """How fast the model's second convolution is, forward and backward, on a batch of 128 with all cores."""
    x, kernel = (tf.cast(tf.random.normal(shape), dtype) for shape in ([128, 14, 14, 32], [5, 5, 32, 64]))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = tf.nn.conv2d(x, kernel, 1, "SAME")
        return tf.add_n([tf.cast(tf.reshape(g, [-1])[0], tf.float32) for g in tape.gradient(y, [x, kernel])])

    return repeat(step)


def prediction(name, batch_size):
    """What `--explain` expects of 4 towers when it has measured 2, over what 4 towers reach; no seconds, a ratio."""
    devices = tower_devices(4)
    model, data = MODELS[name]

    def build():
        model_fn, variables = model()
        return model_fn, variables, FusedAdam()

    def explained(count):
        feed = lambda towers: iter(dataset(data(towers * batch_size), batch_size, 2 * towers))  # noqa: E731
        return explain(build, feed, devices[:count], ["/CPU:0"], lambda line: None)

    def run(_):
        expected, reached = explained(2)["expected"][4], explained(4)["reached"]
        print(f"with 4 towers {name} x {batch_size}: expected {expected:.2f}, reached {reached:.2f}", file=sys.stderr)
        return expected / reached, 0.0

    return run


def pipeline(towers, batch_size):
    """The input alone: a 'step' pulls what a training step pulls."""
    feed = iter(mnist.training_dataset(1000, batch_size, towers))
    return repeat(lambda: [next(feed) for _ in range(towers)][0][1][0])


def logical_cpus(count):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)])


def repeat(call, steps_per_call=1):
    """A function that does at least so many steps and returns the seconds per step and the last loss."""

    def run(steps):
        started = time.perf_counter()
        calls = max(1, steps // steps_per_call)
        for _ in range(calls):
            result = call()
        loss = float(result)  # waits for it
        return (time.perf_counter() - started) / (calls * steps_per_call), loss

    return run


def bfloat16(*arguments):
    keras.config.set_dtype_policy("mixed_bfloat16")
    return towers(*arguments)


KINDS = {
    "towers": towers,
    "bfloat16": bfloat16,
    "serial": serial,
    "mirrored": lambda *a: strategy("mirrored", FusedAdam, *a),
    "mirrored_keras": lambda *a: strategy("mirrored", keras.optimizers.Adam, *a),
    "central": lambda *a: strategy("central", FusedAdam, *a),
    "legacy": legacy,
    "matmul": matmul,
    "convolution": convolution,
    "prediction": prediction,
    "pipeline": pipeline,
}


def serve(name):
    """Builds the contender, e.g. "towers mnist 2 128"; then answers each number of steps with the seconds per step.

    The first answer is the time from the first line of the program's work to the end of the first steps. Each tells the
    last loss and the peak memory of the process so far as well, in bytes.
    """
    kind, *arguments = name.split()
    arguments = [int(argument) if argument.isdigit() else argument for argument in arguments]
    started = time.perf_counter()
    run = KINDS[kind](*arguments)
    first = True
    for line in sys.stdin:
        seconds, loss = run(int(line))
        if first and kind != "prediction":
            seconds = time.perf_counter() - started
        first = False
        with open("/proc/self/status") as status:
            peak = next(int(row.split()[1]) * 1024 for row in status if row.startswith("VmHWM"))
        print("answer", seconds, loss, peak, flush=True)


if __name__ == "__main__":
    serve(" ".join(sys.argv[1:]))
