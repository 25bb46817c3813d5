"""Lengths of tests: the suite runs the short forms; `make chaos`, `make long`, `make property-tests` run the long ones.

The environment selects them: `SHOAL_LONG=1` selects the long forms, `CHAOS_RUNS=n` sets n runs of each, and
`SHOAL_DRAWS=n` lets Hypothesis draw n times as many examples.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

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


def record(name: str, count: int, passed: int, worst: float, unit: str) -> None:
    """Records the result of a scenario for `make chaos`: runs, passed runs and the worst figure."""
    if rows := os.environ.get("CHAOS_ROWS"):
        with open(rows, "a") as file:
            row = {"name": name, "runs": count, "passed": passed, "worst": round(worst, 3), "unit": unit}
            file.write(json.dumps(row) + "\n")


class RunCount:
    """The runs of a scenario so far."""

    def __init__(self) -> None:
        self.passed = 0
        self.worst = 0.0

    def passes(self, figure: float, count: int = 1) -> None:
        """Counts more passed runs, with this figure."""
        self.passed += count
        self.worst = max(self.worst, figure)


@contextmanager
def count_runs(name: str, count: int, unit: str) -> Iterator[RunCount]:
    """Counts a scenario's runs that pass, and records them however the test ends."""
    counted = RunCount()
    try:
        yield counted
    finally:
        record(name, count, counted.passed, counted.worst, unit)
