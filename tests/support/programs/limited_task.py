"""A model of 113 MB of variables, trained while the process may allocate `LIMIT_MB` more; it prints the outcome.

If TF_CONFIG lists several tasks, each computes a stage. A single task computes the whole model.
"""

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np

from shoal_distribute import MultiWorkerPipelineStrategy, OneDeviceStrategy, keras

LAYERS, WIDTH = 12, 1536


def main() -> None:
    """Trains one step, and prints the peak and the held micro-batches of each stage, or the error."""
    lines = Path("/proc/self/status").read_text().splitlines()
    allocated = next(int(it.split()[1]) * 1024 for it in lines if it.startswith("VmData"))
    limit = allocated + int(os.environ["LIMIT_MB"]) * 10**6
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        found = trained()
    except MemoryError:
        found = {"error": "MemoryError"}
    print(json.dumps(found), flush=True)


def trained() -> dict[str, Any]:
    """Trains one step. Returns the peak and the held micro-batches of each stage."""
    tasks = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    strategy: OneDeviceStrategy | MultiWorkerPipelineStrategy = OneDeviceStrategy("/cpu:0")
    if tasks > 1:
        cut = [LAYERS // tasks] * tasks
        strategy = MultiWorkerPipelineStrategy(tasks, micro_batches=8, cut=cut, device="/cpu:0")
    with strategy, strategy.scope():
        layers = [keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile("adam", "mse")
        x = np.random.default_rng(0).normal(size=(32, WIDTH)).astype("float32")
        model.fit(x, x, batch_size=32, verbose=0)
        stages = strategy.timings().stages if isinstance(strategy, MultiWorkerPipelineStrategy) else []
        return {"peak_bytes": [it.peak_bytes for it in stages], "held": [it.peak_held for it in stages]}


if __name__ == "__main__":
    main()
