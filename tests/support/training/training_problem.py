"""Training problem that PyTorch and Shoal solve: a network of two layers, in float64.

Each joined batch is divided among two workers in unequal parts. This module names the combinations of an optimizer, a
schedule, groups and clipping. `torch_training` has PyTorch's side of each, whose results for some of them are in
`tests/golden/training.json`. `server_training` trains on servers.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from shoal import optim

STEPS, RATE, WEIGHT_DECAY, CLIP_NORM = 50, 0.02, 0.1, 1.5
ROWS = (0, 5, 8)  # rows of a joined batch that each worker takes
FEATURES, WIDTH, HIDDEN, OUT = 4, 5, 6, 2

# A plateau is looked for before each fifth step, in the loss of a batch that no step trains on.
EVALUATION_STEPS = range(5, STEPS, 5)
PLATEAU = optim.ReduceOnPlateau(0.5, patience=1, threshold=0.2, cooldown=1)

GROUPS = (
    optim.VariableGroup("embed", frozen=True),
    optim.VariableGroup("*bias", weight_decay=0),
    optim.VariableGroup("out", rate=3),
)
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD,
    "momentum": optim.Momentum,
    "nesterov": lambda **given: optim.Momentum(nesterov=True, **given),
    "adagrad": optim.Adagrad,
    "rmsprop": lambda **given: optim.RMSProp(momentum=0.5, centered=True, **given),
    "adam": optim.Adam,
    "adamw": optim.AdamW,
}
SCHEDULES: dict[str, optim.Schedule] = {
    "constant": optim.ConstantLR(RATE),
    "step": optim.StepLR(RATE, 12, 0.5),
    "exponential": optim.ExponentialLR(RATE, 0.97),
    "linear": optim.LinearLR(RATE, 40, RATE / 5),
    "piecewise": optim.PiecewiseLR(RATE, (15, 35), (RATE / 2, RATE / 8)),
    "interpolated": optim.PiecewiseLR(RATE, (15, 35), (RATE * 2, RATE / 8), interpolate=True),
    "cosine": optim.CosineLR(RATE, STEPS),
    "warmcosine": optim.CosineLR(RATE, 40, warmup_steps=10),
    "onecycle": optim.OneCycleLR(RATE, STEPS),
    "plateau": optim.ConstantLR(RATE),
}


@dataclass(frozen=True)
class Combination:
    """An optimizer, a schedule, and whether there are groups and clipping."""

    optimizer: str
    schedule: str
    grouped: bool = True
    clips: bool = True

    def __str__(self) -> str:
        options = {"groups": self.grouped, "clipped": self.clips}
        return "-".join([self.optimizer, self.schedule, *(name for name, given in options.items() if given)])

    @property
    def has_plateaus(self) -> bool:
        """Whether evaluations reduce the rate."""
        return self.schedule == "plateau"

    def build(self) -> optim.Optimizer:
        """Returns the optimizer of the job."""
        return OPTIMIZERS[self.optimizer](
            lr=SCHEDULES[self.schedule],
            weight_decay=WEIGHT_DECAY,
            clip_norm=CLIP_NORM if self.clips else 0.0,
            groups=GROUPS if self.grouped else (),
        )


# Each optimizer with each schedule; and each optimizer with one of its schedules, and less than all options.
ALL = (
    *itertools.starmap(Combination, itertools.product(OPTIMIZERS, SCHEDULES)),
    *(
        Combination(optimizer, schedule, grouped=grouped, clips=clips)
        for optimizer, schedule in zip(OPTIMIZERS, SCHEDULES, strict=False)
        for grouped, clips in ((True, False), (False, True), (False, False))
    ),
)
# Each schedule, each optimizer, and each option alone.
RECORDED = (
    *itertools.starmap(Combination, zip(itertools.cycle(OPTIMIZERS), SCHEDULES, strict=False)),
    Combination("adamw", "onecycle"),
    Combination("adamw", "onecycle", clips=False),
    Combination("adam", "linear", grouped=False),
)


@dataclass(frozen=True)
class Result:
    """A result of PyTorch.

    Attributes:
        values: the values after all steps, by variable.
        clipped_steps: number of steps whose gradient was clipped.
        reductions: number of plateaus that reduced the rate.
    """

    values: dict[str, np.ndarray]
    clipped_steps: int
    reductions: int

    def to_json(self) -> dict[str, Any]:
        """Returns what JSON holds without loss."""
        return asdict(self) | {"values": {name: value.tolist() for name, value in self.values.items()}}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Self:
        """Returns what `to_json` wrote."""
        return cls(**given | {"values": {name: np.array(value) for name, value in given["values"].items()}})


def recorded(combination: Combination) -> Result:
    """Returns a result in `tests/golden/training.json`."""
    return Result.from_json(_golden()[str(combination)])


@cache
def _golden() -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden" / "training.json").read_text())
    return cases


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


def evaluated(params: Mapping[str, np.ndarray]) -> float:
    """Returns the loss of the batch that no step trains on."""
    x, y = batch(STEPS)
    hidden = np.tanh(x @ params["embed"] @ params["hidden"] + params["hidden_bias"])
    return float(((hidden @ params["out"] + params["out_bias"] - y) ** 2).mean())


def largest_difference(found: Mapping[str, np.ndarray], expected: Mapping[str, Any]) -> float:
    """Returns the largest relative difference of any element from what is expected; infinity if one is not finite."""
    assert found.keys() == expected.keys()
    differences = [
        np.abs(found[name] - expected[name]) / np.maximum(np.abs(expected[name]), np.finfo(float).tiny)
        for name in expected
    ]
    largest = float(np.max([np.max(each) for each in differences]))  # unlike Python's max, it does not hide NaN
    return largest if np.isfinite(largest) else np.inf
