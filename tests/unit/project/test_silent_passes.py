"""Parts of the tests' own machinery without which tests would pass or be skipped silently.

`make chaos` must count a scenario that fails, or that tests nothing. In CI and in `make e2e`, a missing program must
not skip the tests that need it.
"""

from typing import Any

import pytest

from support import chaos
from support.deployment.needed_programs import need


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


@pytest.mark.parametrize(("variable", "failing"), [("SHOAL_E2E", ("SHOAL_E2E",)), ("CI", ("SHOAL_E2E", "CI"))])
def test_missing_program_fails_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch, variable: str, failing: tuple[str, ...]
) -> None:
    for name in ("SHOAL_E2E", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(pytest.fail.Exception, match="there is no nonesuch nor neither here: Debian has it"):
        need("nonesuch", "neither", source="Debian has it in the package nonesuch", failing=failing)


def test_metrics_of_a_scenario_are_those_of_all_its_tests() -> None:
    row = {"name": "a", "runs": 1, "passed": 1, "worst": 0.5, "unit": "s"}
    found: list[dict[str, Any]] = [{**row, "metrics": {"x": 3.0, "y": 1.0}}, {**row, "metrics": {"x": 2.0}}, row]
    summed = chaos.summed("a", found, 0)
    assert summed.metrics == {"x": 3.0, "y": 1.0}
    assert "y: 1" in chaos.table([summed])
