"""A program for Shoal: a two-layer perceptron that classifies handwritten digits.

    shoal up --path examples                                           in one terminal
    shoal submit digits:Digits --workers 2 --set hidden=64 --follow    in another

The job names the factory `digits:Digits`. Each worker calls it with the job's settings, and then runs the loop.
The code uses only operators and universal functions of NumPy. CuPy's arrays support both, so the same code runs on a
GPU if the worker has put the parameters and the batch on it.

The images are in digits.npz: the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak
(UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49), under the licence CC BY 4.0.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

import shoal
from shoal.initializers import HeNormal
from shoal.program import Array

FILE = Path(__file__).with_name("digits.npz")  # pixels, uint8 [1797, 64], from 0 to 16; labels, uint8 [1797]
PIXELS, CLASSES = 8 * 8, 10
HELD_OUT = 360  # of 1,797 images


class Images:
    """Labelled images, by number.

    Args:
        pixels: [images, 64], from 0 to 1.
        labels: [images], from 0 to 9.
    """

    def __init__(self, pixels: np.ndarray, labels: np.ndarray) -> None:
        self.pixels = pixels
        self.targets = np.eye(CLASSES, dtype=pixels.dtype)[labels]

    def __len__(self) -> int:
        return len(self.pixels)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.pixels[indices], self.targets[indices]


class Digits:
    """The program: variables, a data set, and a function that returns gradients. See `shoal.Program`.

    Args:
        hidden: units of the hidden layer.
        seed: chooses the images that are held out. It is the same on every worker, because it is a setting of the job.
        dtype: float32 or float64.
    """

    def __init__(self, hidden: int = 64, seed: int = 0, dtype: str = "float32") -> None:
        self.hidden, self.dtype = hidden, dtype
        with np.load(FILE) as found:
            pixels, labels = (found["pixels"] / 16).astype(dtype), found["labels"]
        test, train = np.split(np.random.default_rng(seed).permutation(len(pixels)), [HELD_OUT])
        self.dataset = Images(pixels[train], labels[train])
        self.held_out = Images(pixels[test], labels[test])

    def variables(self) -> dict[str, shoal.Variable]:
        """Returns the variables. The servers compute their initial values."""
        return {
            "hidden/w": shoal.Variable((PIXELS, self.hidden), self.dtype, HeNormal()),
            "hidden/b": shoal.Variable(self.hidden, self.dtype),
            "output/w": shoal.Variable((self.hidden, CLASSES), self.dtype, HeNormal()),
            "output/b": shoal.Variable(CLASSES, self.dtype),
        }

    def loss_and_gradients(
        self, params: Mapping[str, Array], batch: tuple[Array, Array]
    ) -> tuple[Array, dict[str, Array]]:
        """Returns the mean cross-entropy of a batch, and its gradients by the chain rule, last layer first."""
        x, targets = batch
        hidden = np.maximum(x @ params["hidden/w"] + params["hidden/b"], 0)
        log_p = _log_softmax(hidden @ params["output/w"] + params["output/b"])
        loss = -(targets * log_p).sum() / len(x)

        d_logits = (np.exp(log_p) - targets) / len(x)
        d_hidden = (d_logits @ params["output/w"].T) * (hidden > 0)
        return loss, {
            "hidden/w": x.T @ d_hidden,
            "hidden/b": d_hidden.sum(axis=0),
            "output/w": hidden.T @ d_logits,
            "output/b": d_logits.sum(axis=0),
        }

    def evaluate(self, params: Mapping[str, Array], batch: tuple[Array, Array]) -> dict[str, float]:
        """Returns the metrics of a batch of the held-out images. See `shoal.program.EvaluatedProgram`."""
        x, targets = batch
        hidden = np.maximum(x @ params["hidden/w"] + params["hidden/b"], 0)
        logits = hidden @ params["output/w"] + params["output/b"]
        right = logits.argmax(axis=1) == targets.argmax(axis=1)
        return {"loss": float(-(targets * _log_softmax(logits)).sum() / len(x)), "accuracy": float(right.mean())}


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)  # so that no exponential overflows
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
