"""Program whose result depends on every step, the order of the steps, and their random numbers.

It also counts how often it has trained on each sample.
"""

import threading
from pathlib import Path
from typing import Any

import numpy as np

import shoal

FEATURES = 16


class Rows:
    """Points of a plane, by number, with noise."""

    def __init__(self, size: int) -> None:
        rng = np.random.default_rng(3)
        self.x = rng.normal(size=(size, FEATURES)).astype(np.float32)
        self.y = (self.x @ rng.normal(size=FEATURES) + rng.normal(size=size)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, indices: Any) -> Any:
        return indices, self.x[indices], self.y[indices]


class Plane:
    """Least squares with a dropout of a tenth of the inputs. A step takes `seconds`, until the file `hurry` exists.

    The variable `ballast` makes checkpoints as large as a test needs.
    """

    def __init__(self, size: int = 512, seconds: float = 0.0, hurry: str = "", ballast: int = 0) -> None:
        self.dataset, self.seconds, self.ballast = Rows(size), seconds, ballast
        self.hurry, self.pause = Path(hurry) if hurry else None, threading.Event()

    def variables(self) -> Any:
        known = {
            "w": np.zeros(FEATURES, np.float32),
            "seen": shoal.Variable((len(self.dataset),), trainable=False, aggregation="sum", dtype="int64"),
        }
        return known | ({"ballast": shoal.Variable(self.ballast)} if self.ballast else {})

    def loss_and_gradients(self, params: Any, batch: Any, *, seed: int) -> Any:
        if self.seconds and not (self.hurry and self.hurry.exists()):
            self.pause.wait(self.seconds)
        numbers, x, y = batch
        x = x * (np.random.default_rng(seed).random(x.shape) > 0.1)
        error = x @ params["w"] - y
        seen = np.zeros(len(self.dataset), np.int64)
        np.add.at(seen, numbers, 1)
        gradients = {"w": x.T @ error / np.float32(len(y))}
        if self.ballast:
            gradients["ballast"] = np.ones(self.ballast, np.float32)
        return shoal.StepOutput((error**2).mean(), gradients, updates={"seen": seen})


class Average:
    """A program without data, whose step adds 1 to an averaged variable."""

    dataset = None

    def variables(self) -> Any:
        return {"w": np.zeros(1, np.float32), "mean": shoal.Variable(2, trainable=False, aggregation="mean")}

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        return shoal.StepOutput(1.0, {"w": np.ones(1, np.float32)}, updates={"mean": params["mean"] + 1})


class Tuned(Plane):
    """The same model, with a new head in place of the counts."""

    def variables(self) -> Any:
        return {"w": np.zeros(FEATURES, np.float32), "head": np.array([3.0, 4.0], np.float32)}

    def loss_and_gradients(self, params: Any, batch: Any, *, seed: int = 0) -> Any:
        return 0.0, {"w": np.zeros(FEATURES, np.float32), "head": np.zeros(2, np.float32)}
