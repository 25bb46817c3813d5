"""Keras, a job and Keras train a model in turn: python keras_state.py OPTIMIZER COORDINATOR FOLDER.

Each hands the model and the state of the optimizer to the next, through a .keras file where Keras is. It prints how far
the weights are from those of Keras alone. KERAS_BACKEND chooses the backend.
"""

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import shoal.keras
from shoal import optim

BATCHES, BATCH = 20, 8
PLAIN: dict[str, Any] = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.01),
}
EQUAL = {
    "sgd": optim.SGD(0.05),
    "momentum": optim.Momentum(0.05),
    "nesterov": optim.Momentum(0.05, nesterov=True),
    "adam": optim.Adam(1e-2, eps=1e-7, eps_uncorrected=True),
    "adamw": optim.AdamW(1e-2, eps=1e-7, eps_uncorrected=True, weight_decay=0.01),
}


def network() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(6, trainable=False), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6,)), *layers])


def fit(model: keras.Model, part: int) -> None:
    """Trains on one of three parts of the data."""
    draw = np.random.default_rng(part)
    x = draw.normal(size=(BATCHES * BATCH, 6))
    model.fit(x, np.sin(x.sum(axis=1, keepdims=True)), batch_size=BATCH, shuffle=False, verbose=0)


def main(name: str, address: str, folder: Path) -> None:
    keras.config.set_floatx("float64")
    model = network()
    model.compile(PLAIN[name](), loss="mse")
    for part in range(3):
        fit(model, part)
    wanted = model.get_weights()

    model = network()
    model.compile(PLAIN[name](), loss="mse")
    fit(model, 0)
    model.save(folder / "first.keras")

    model = keras.models.load_model(folder / "first.keras")
    options: dict[str, Any] = {"job": f"keras-{keras.config.backend()}-{name}", "address": address}
    optimizer = shoal.keras.DistributedOptimizer(EQUAL[name], optimizer_state=model.optimizer, **options)
    model.compile(optimizer, loss="mse")
    fit(model, 1)
    iterations = int(optimizer.iterations.numpy())
    plain = PLAIN[name]()
    optimizer.copy_state_to(plain, model)
    optimizer.close()
    model.compile(plain, loss="mse")
    model.save(folder / "second.keras")

    model = keras.models.load_model(folder / "second.keras")
    fit(model, 2)
    found = model.get_weights()
    farthest = max(float(np.abs(one - other).max()) for one, other in zip(wanted, found, strict=True))
    print(farthest, iterations, int(model.optimizer.iterations.numpy()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
