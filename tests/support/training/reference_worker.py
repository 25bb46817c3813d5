"""Workers whose summed gradients equal those of one process: reference_worker.py ADDRESS.

The module defines the problem that they solve, and also solves it in one process, for comparison. The problem is a
linear classifier of random points with the mean softmax cross-entropy. The 4 workers get unequal parts of each batch.
"""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

import shoal

STEPS, FEATURES, CLASSES = 50, 8, 3
PARTS = (0, 16, 40, 48, 64)  # rows of the joined batch that each of the 4 workers takes
WORKERS = len(PARTS) - 1
DTYPES = ("float64", "float32")
RATE, KEEP = 0.1, 0.9


@dataclass
class Problem:
    """The problem, which is the same in every process."""

    dtype: str

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        self.job = f"exact-{self.dtype}"
        self.x = rng.normal(size=(STEPS, PARTS[-1], FEATURES)).astype(self.dtype)
        self.y = rng.integers(CLASSES, size=(STEPS, PARTS[-1]))
        self.start = {
            "w": rng.normal(size=(FEATURES, CLASSES)).astype(self.dtype),
            "b": np.zeros(CLASSES, self.dtype),
        }

    def gradients(self, params: Any, step: int, rows: Any) -> dict[str, Any]:
        x, y = self.x[step, rows], self.y[step, rows]
        logits = x @ params["w"] + params["b"]
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        probabilities[np.arange(len(y)), y] -= 1
        probabilities /= len(y)
        return {"w": x.T @ probabilities, "b": probabilities.sum(axis=0)}

    def alone(self) -> dict[str, Any]:
        """Returns what one process computes on the joined batches."""
        params = {name: value.copy() for name, value in self.start.items()}
        velocity = {name: np.zeros_like(value) for name, value in self.start.items()}
        rate, keep = (np.dtype(self.dtype).type(number) for number in (RATE, KEEP))
        for step in range(STEPS):
            for name, gradient in self.gradients(params, step, slice(None)).items():
                velocity[name] = keep * velocity[name] + gradient
                params[name] -= rate * velocity[name]
        return params


def main(address: str) -> None:
    with shoal.Client(address) as client:
        for dtype in DTYPES:
            problem = Problem(dtype)
            options: dict[str, Any] = {"optimizer": shoal.optim.Momentum(RATE, KEEP), "workers": WORKERS, "shards": 4}
            with client.session(problem.job, variables=problem.start, **options) as session:
                rows = slice(*PARTS[session.rank : session.rank + 2])
                for step in range(STEPS):
                    gradients = problem.gradients(session.pull(), step, rows)
                    session.push(gradients, weight=rows.stop - rows.start)


if __name__ == "__main__":
    main(*sys.argv[1:])
