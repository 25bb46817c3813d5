"""The `fit` of `keras_before.py` on a cluster: start it on each worker. SHOAL_COORDINATOR names the coordinator."""

from pathlib import Path

import keras
import numpy as np

from shoal.keras import DistributedOptimizer
from shoal.optim import Adam

EPOCHS = 10


def digits() -> tuple[np.ndarray, np.ndarray]:
    with np.load(Path(__file__).with_name("digits.npz")) as found:
        return found["pixels"] / np.float32(16), found["labels"].astype(np.int32)


def network() -> keras.Model:
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((64,)), dense(64, activation="relu"), dense(10, activation="softmax")])


def main() -> None:
    model, (x, y) = network(), digits()
    optimizer = DistributedOptimizer(Adam(3e-3), job="keras-digits", workers=2)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x[optimizer.session.rank :: 2], y[optimizer.session.rank :: 2], batch_size=16, epochs=EPOCHS, verbose=0)
    loss, accuracy = model.evaluate(x, y, verbose=0)
    print(f"loss {loss:.3f}, accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
