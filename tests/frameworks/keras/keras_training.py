"""A worker that trains a small model of Keras 3 by `fit`: python keras_training.py WORKERS RANK COORDINATOR JOB FILE.

With no workers, an optimizer of Keras trains it. KERAS_BACKEND chooses the backend. The weights go to the file.
"""

import sys
from typing import Any

import keras
import numpy as np

import shoal.keras
from shoal import optim

BATCHES, BATCH = 24, 8


def data() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(BATCHES, BATCH, 6)).astype(np.float32)
    return x, (x @ draw.normal(size=(6, 1))).astype(np.float32)


def main(workers: int, rank: int, address: str, job: str, path: str) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    x, y = data()
    optimizer: Any = keras.optimizers.Adam(1e-2)
    if workers:
        given = optim.Adam(1e-2, eps=1e-7, eps_uncorrected=True)
        size = BATCH // workers
        options: dict[str, Any] = {"workers": workers, "address": address, "batch_size": size}
        optimizer = shoal.keras.DistributedOptimizer(given, job=job, **options)
        rows = slice(rank * size, (rank + 1) * size)
        x, y = x[:, rows], y[:, rows]
    model.compile(optimizer, loss="mse")
    fitting: dict[str, Any] = {"batch_size": x.shape[1], "epochs": 3, "shuffle": False, "verbose": 0}
    model.fit(x.reshape(-1, 6), y.reshape(-1, 1), callbacks=[shoal.keras.ReportMetrics()], **fitting)
    np.savez(path, *model.get_weights())
    print("jitted" if getattr(model, "jit_compile", False) else "eager", optimizer.iterations.numpy())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
