"""Harness of `make chaos`: a scenario that fails, or that tests nothing, must not pass silently."""

from typing import Any

import pytest

from support import chaos


@pytest.mark.parametrize(
    ("rows", "status", "holds"),
    [
        ([(5, 5), (2, 2)], 0, True),
        ([(5, 5), (2, 1)], 0, False),
        ([(5, 5)], 1, False),
        ([], 1, False),
        ([], 0, False),
    ],
    ids=["all passed", "a run failed", "a failure that no test counted", "an early failure", "nothing recorded"],
)
def test_scenario_holds_only_if_all_its_runs_passed(rows: list[tuple[int, int]], status: int, holds: bool) -> None:
    found: list[dict[str, Any]] = [
        {"name": "a", "runs": runs, "passed": passed, "worst": 0.5, "unit": "s"} for runs, passed in rows
    ]
    other = {"name": "b", "runs": 1, "passed": 1, "worst": 0.5, "unit": "s"}
    assert chaos.summed("a", [*found, other], status).holds is holds
