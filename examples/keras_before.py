"""A model of Keras 3 and its `fit`: a classifier of handwritten digits. `keras_after.py` does the same on a cluster."""

from pathlib import Path

import keras
import numpy as np

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
    model.compile(keras.optimizers.Adam(3e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=32, epochs=EPOCHS, verbose=0)
    loss, accuracy = model.evaluate(x, y, verbose=0)
    print(f"loss {loss:.3f}, accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
