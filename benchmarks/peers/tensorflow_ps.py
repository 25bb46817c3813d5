"""TensorFlow's ParameterServerStrategy: python tensorflow_ps.py dense|small|small_cluster|sparse.

The script needs `pip install tensorflow-cpu`.

The project received this script together with the measurements on which the project's targets are based. The project
has added only `small_cluster`. The pattern is that of TensorFlow's guide "Parameter server training with
ParameterServerStrategy". Within a step, TensorFlow sends the gradient of one variable while it fetches the value of the
next one.
"""

import json
import os
import socket
import subprocess
import sys

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", GRPC_FAIL_FAST="use_caller")
import workload as wl

kind, role = sys.argv[1], (sys.argv[2:] or ["chief"])[0]
count = 2 if kind == "small_cluster" else 1  # of servers, and of workers
children = []


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if role == "chief":
    counts = {"ps": count, "worker": count, "chief": 1}
    cluster = {r: [f"127.0.0.1:{free_port()}" for _ in range(n)] for r, n in counts.items()}
    for r in ("ps", "worker"):
        for i in range(count):
            config = json.dumps({"cluster": cluster, "task": {"type": r, "index": i}})
            command = [sys.executable, __file__, kind, r]
            children.append(subprocess.Popen(command, env=dict(os.environ, TF_CONFIG=config)))
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})

import tensorflow as tf  # noqa: E402 - the chief starts the others first

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if role != "chief":
    tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc", start=True
    ).join()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

if kind != "sparse":
    with strategy.scope():
        variables = [tf.Variable(tf.zeros(s)) for s in wl.shapes(kind)]

    @tf.function
    def step():
        def replica():
            total = 0.0
            for v in variables:
                w = tf.identity(v)
                with tf.device(v.device):
                    lr = tf.constant(1e-3)
                tf.raw_ops.ResourceApplyGradientDescent(var=v.handle, alpha=lr, delta=w * 1e-6 + 1e-3)
                total += tf.reshape(w, [-1])[0]
            return total

        return strategy.run(replica)

    def run_steps(n):
        for _ in range(n):
            coordinator.schedule(step)
        coordinator.join()

else:
    with strategy.scope():
        table = tf.Variable(tf.zeros((wl.ROWS, wl.DIM)))
        accumulator = tf.Variable(tf.fill((wl.ROWS, wl.DIM), 0.1))
    batches = [tf.constant(b) for b in wl.id_batches()]

    @tf.function
    def step(ids):
        def replica():
            unique, index = tf.unique(ids)
            rows = tf.gather(table, unique)
            grad = tf.gather(rows, index) * 1e-3 + 1e-3
            summed = tf.math.unsorted_segment_sum(grad, index, tf.size(unique))
            with tf.device(table.device):
                tf.raw_ops.ResourceSparseApplyAdagrad(
                    var=table.handle, accum=accumulator.handle, lr=0.01, grad=summed, indices=unique
                )
            return tf.reduce_sum(rows[:1])

        return strategy.run(replica)

    def run_steps(n):
        for i in range(n):
            coordinator.schedule(step, args=(batches[i % len(batches)],))
        coordinator.join()


wl.report("tensorflow ParameterServerStrategy", kind, wl.measure(run_steps))
for child in children:
    child.kill()
os._exit(0)
