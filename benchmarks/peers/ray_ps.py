"""Ray's parameter-server pattern, one server and one worker: python ray_ps.py dense|small (pip install ray numpy).

The project received this script together with the measurements on which the project's targets are based. Its code has
not been changed. The pattern is that of Ray's sample "Parameter Server".
"""

import sys

import numpy as np
import ray
import workload as wl

kind = sys.argv[1]
ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, object_store_memory=4 << 30)


@ray.remote
class Server:
    def __init__(self, kind):
        self.weights = [np.zeros(s, np.float32) for s in wl.shapes(kind)]

    def pull(self):
        return self.weights

    def push(self, *grads):
        for w, g in zip(self.weights, grads, strict=True):
            w -= np.float32(1e-3) * g  # noqa: PLW2901 - in place


@ray.remote
class Worker:
    def run(self, server, n):
        for _ in range(n):
            weights = ray.get(server.pull.remote())
            ray.get(server.push.remote(*[w * np.float32(1e-6) + np.float32(1e-3) for w in weights]))


server, worker = Server.remote(kind), Worker.remote()
wl.report("ray actors", kind, wl.measure(lambda n: ray.get(worker.run.remote(server, n))))
