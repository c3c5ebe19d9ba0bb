"""Watch: a run as it happens, on the terminal and in TensorBoard.

`train.py` reports through it, and with --logdir writes what TensorBoard shows: the curves, the settings, and the graph
in which each tower stands with its device.
"""

import glob
import json
import os
import sys
import types

import keras
import tensorflow as tf

EVERY = 10  # steps from one point of a curve to the next


def progress(total, unit="images"):
    """Tells how far a run is: on a terminal a bar with the time left, elsewhere a line every 100 steps.

    Args:
      total: Number of steps of the run; None if unknown.
      unit: What `rate` counts per second.

    Returns:
      `show(step, loss, rate)`.
    """
    if sys.stdout.isatty():
        bar = keras.utils.Progbar(total, stateful_metrics=["loss", f"{unit}/s"], unit_name="step")

        def show(step, loss, rate):
            if step % EVERY == 0 or step == total:
                bar.update(step, [("loss", float(loss)), (f"{unit}/s", rate)])
    else:

        def show(step, loss, rate):
            if step % 100 == 0:
                of = f"/{total}" if total else ""
                print(f"step {step}{of}  loss {float(loss):.4f}  {rate:.0f} {unit}/s", flush=True)

    return show


def board(folder, settings, first_step=None):
    """Writes for TensorBoard. A resumed run goes on in the curves of the run before, which lose what came after its
    checkpoint: no jump, and nothing twice.

    Args:
      folder: TensorBoard's --logdir.
      settings: A dict, shown as text.
      first_step: The number of steps already done, by a run that may have written here; None for a run of its own.

    Returns:
      A namespace of functions: `scalars(step, **values)` adds a point to each curve, `graph(graph)` shows a graph,
      `flush()` sees that all is written.

    Raises:
      ValueError: if the folder cannot be written, or a run of its own finds another's events there.
    """
    before = glob.glob(os.path.join(glob.escape(folder), "events.out.tfevents.*"))
    if before and first_step is None:
        raise ValueError(f"{folder} holds the events of another run: name another folder, or remove them")
    try:
        os.makedirs(folder, exist_ok=True)
        for path in before:
            _drop_events(path, first_step)
        writer = tf.summary.create_file_writer(folder)
        if not first_step:
            with writer.as_default(step=0):
                tf.summary.text("settings", "```\n" + json.dumps(settings, indent=1) + "\n```")
        writer.flush()
    except (OSError, tf.errors.OpError) as error:
        raise ValueError(f"{folder}: events cannot be written there: {getattr(error, 'strerror', error)}") from error

    def scalars(step, **values):
        with writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name.replace("_", " "), value)

    def graph(graph):
        with writer.as_default(step=0):
            tf.summary.graph(graph)

    return types.SimpleNamespace(scalars=scalars, graph=graph, flush=writer.flush)


def _drop_events(path, last_step):
    """Rewrites an events file without the points after `last_step`, and without a last record cut short by a kill."""
    kept = []
    try:
        for record in tf.data.TFRecordDataset(path):
            event = tf.compat.v1.Event.FromString(record.numpy())
            if not event.HasField("summary") or (0 < event.step <= last_step) or (event.step == 0 and last_step):
                kept.append(record.numpy())
    except tf.errors.DataLossError:
        pass
    with tf.io.TFRecordWriter(path + ".new") as file:
        for record in kept:
            file.write(record)
    os.replace(path + ".new", path)
