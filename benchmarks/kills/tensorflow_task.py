"""A task of TensorFlow's ParameterServerStrategy: TF_CONFIG=... python tensorflow_task.py FOLDER.

The pattern is that of TensorFlow's guide "Parameter server training with ParameterServerStrategy". A
`ClusterCoordinator` schedules steps. If a worker is lost, the `ClusterCoordinator` gives its step to another worker. If
a parameter server is lost, `fetch`, `schedule` or `save` raises an error. The chief then ends, and is started again: it
creates the variables again and restores the newest checkpoint.
"""

import os
import sys
import time
from collections import deque
from pathlib import Path

import tensorflow as tf
import update_log
from tensorflow.python.data.experimental.ops import testing

folder = Path(sys.argv[1])
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc", start=True
    ).join()

# Scheduled steps at a time. Many, because the chief fetches results in order, and no worker should wait for that.
OUTSTANDING = 64

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    count = tf.Variable(0, dtype=tf.int64)  # batches in the model
    variables = [tf.Variable(tf.zeros(shape)) for shape in update_log.SHAPES]
checkpoint = tf.train.Checkpoint(count=count, variables=variables)
manager = tf.train.CheckpointManager(checkpoint, str(folder / "checkpoints"), max_to_keep=3)
if manager.latest_checkpoint:
    checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()


def compute(values):
    """Waits on the worker, as if it computed, and returns the gradients."""
    waiting = tf.data.Dataset.from_tensors(values[0][0, 0]).apply(testing.sleep(int(1e6 * update_log.COMPUTE_S)))
    waited = waiting.take(1).reduce(tf.constant(0.0), lambda total, value: total + value)
    return [tf.ones_like(value) + 0 * waited for value in values]


@tf.function
def step():
    """Trains one batch on a worker. Returns the number of batches in the model."""

    def replica():
        for gradient, variable in zip(compute([tf.identity(it) for it in variables]), variables, strict=True):
            variable.assign_add(gradient)
        return count.assign_add(1, read_value=True)

    return strategy.run(replica)


def train():
    """Trains until an error, and saves checkpoints."""
    log = update_log.UpdateLog(folder / "chief.updates")
    scheduled, saved_at = deque(), time.monotonic()
    while True:
        while len(scheduled) < OUTSTANDING:
            scheduled.append(coordinator.schedule(step))
        log.append(int(scheduled.popleft().fetch()))
        if time.monotonic() - saved_at >= update_log.CHECKPOINT_S:
            manager.save()
            saved_at = time.monotonic()


try:
    train()
except BaseException as error:
    print(f"{time.monotonic():.1f}: the chief ends: {type(error).__name__}: {str(error)[:2000]}", flush=True)
    os._exit(1)  # its threads wait for tasks that are lost
