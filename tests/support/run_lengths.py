"""Lengths of tests: the suite runs the short forms; `make chaos`, `make long`, `make property-tests` run the long ones.

The environment selects them: `SHOAL_LONG=1` selects the long forms, `CHAOS_RUNS=n` sets n runs of each, and
`SHOAL_DRAWS=n` lets Hypothesis draw n times as many examples.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import pytest

T = TypeVar("T")


def is_long() -> bool:
    """Whether the long forms are selected."""
    return os.environ.get("SHOAL_LONG") == "1"


def runs(short: int, full: int) -> int:
    """Returns how often something is repeated."""
    return int(os.environ.get("CHAOS_RUNS") or (full if is_long() else short))


def long_only(test: T) -> T:
    """Marks a test that runs only in the long form, because shorter tests cover its parts."""
    marked: T = pytest.mark.skipif(not is_long(), reason="of the long form: SHOAL_LONG=1, or `make long`")(test)  # type: ignore[assignment]  # a decorator, whatever T is
    return marked


def size(short: T, full: T) -> T:
    """Returns how large or how long something is."""
    return full if is_long() else short


def draws(short: int) -> int:
    """Returns how many examples Hypothesis draws."""
    return short * int(os.environ.get("SHOAL_DRAWS") or 1)


class RunCount:
    """The runs of a scenario so far.

    Attributes:
        passed: number of runs that passed.
        worst: the worst figure of those.
        metrics: further metrics, by what they are.
    """

    def __init__(self) -> None:
        self.passed = 0
        self.worst = 0.0
        self.metrics: dict[str, float] = {}

    def passes(self, figure: float, count: int = 1) -> None:
        """Counts more passed runs, with this figure."""
        self.passed += count
        self.worst = max(self.worst, figure)

    def spreads(self, what: str, seconds: Sequence[float]) -> str:
        """Adds the median, the 99th percentile and the longest of some times as metrics, and returns them as text."""
        found = {"median": np.median(seconds), "p99": np.percentile(seconds, 99), "longest": max(seconds)}
        self.metrics.update({f"{what}, {name}": round(float(value), 3) for name, value in found.items()})
        return ", ".join(f"{value:.2f} s ({name})" for name, value in found.items())


@contextmanager
def count_runs(name: str, count: int, unit: str) -> Iterator[RunCount]:
    """Counts a scenario's runs that pass, and records them for `make chaos` however the test ends.

    The load average of the last minute is one of the metrics, because times depend on it.
    """
    counted = RunCount()
    try:
        yield counted
    finally:
        if rows := os.environ.get("CHAOS_ROWS"):
            row = {
                "name": name,
                "runs": count,
                "passed": counted.passed,
                "worst": round(counted.worst, 3),
                "unit": unit,
                "metrics": {**counted.metrics, "load average": round(os.getloadavg()[0], 2)},
            }
            with open(rows, "a") as file:
                file.write(json.dumps(row) + "\n")
