"""Training problem whose results by PyTorch are in `tests/golden/training.json`: a network of two layers, in float64.

Each joined batch is divided among two workers in unequal parts.
"""

from collections.abc import Mapping

import numpy as np

from shoal import optim

STEPS, RATE, WEIGHT_DECAY = 50, 0.02, 0.1
ROWS = (0, 5, 8)  # rows of a joined batch that each worker takes
FEATURES, WIDTH, HIDDEN, OUT = 4, 5, 6, 2


def start() -> dict[str, np.ndarray]:
    """Returns the initial values."""
    rng = np.random.default_rng(11)
    return {
        "embed": rng.normal(size=(FEATURES, WIDTH)),
        "hidden": rng.normal(size=(WIDTH, HIDDEN)),
        "hidden_bias": np.zeros(HIDDEN),
        "out": rng.normal(size=(HIDDEN, OUT)),
        "out_bias": np.zeros(OUT),
    }


def optimizer(clip_norm: float) -> optim.Optimizer:
    """Returns the optimizer of the job."""
    return optim.AdamW(
        lr=optim.OneCycleLR(RATE, STEPS),
        weight_decay=WEIGHT_DECAY,
        clip_norm=clip_norm,
        groups=[
            optim.VariableGroup("embed", frozen=True),
            optim.VariableGroup("*bias", weight_decay=0),
            optim.VariableGroup("out", rate=3),
        ],
    )


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and the targets of a joined batch."""
    rng = np.random.default_rng([11, step])
    return rng.normal(size=(ROWS[-1], FEATURES)), rng.normal(size=(ROWS[-1], OUT))


def gradients(params: Mapping[str, np.ndarray], step: int, rank: int) -> dict[str, np.ndarray]:
    """Returns a worker's gradients of the mean squared error."""
    rows = slice(*ROWS[rank : rank + 2])
    x, y = (part[rows] for part in batch(step))
    embedded = x @ params["embed"]
    hidden = np.tanh(embedded @ params["hidden"] + params["hidden_bias"])
    error = 2 * (hidden @ params["out"] + params["out_bias"] - y) / y.size
    before = (error @ params["out"].T) * (1 - hidden**2)
    return {
        "embed": x.T @ (before @ params["hidden"].T),
        "hidden": embedded.T @ before,
        "hidden_bias": before.sum(axis=0),
        "out": hidden.T @ error,
        "out_bias": error.sum(axis=0),
    }
