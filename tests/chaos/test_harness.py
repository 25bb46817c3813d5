"""`make chaos` from end to end, with its cheapest scenario."""

import json
from pathlib import Path

import pytest

from support import chaos

pytestmark = pytest.mark.chaos


def test_a_scenario_is_run_and_its_row_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAOS_RUNS", "1")
    monkeypatch.setattr(chaos, "GUARD", ())  # the suite has its own, and this one would see what others do meanwhile
    latest = tmp_path / "latest.json"
    assert chaos.main(["consistent_cut"], latest) == 0
    [row] = json.loads(latest.read_text())
    assert row.keys() == {"name", "runs", "passed", "worst", "unit"}
    assert (row["name"], row["runs"], row["passed"]) == ("consistent_cut", 1, 1)
    assert 0 < row["worst"] < 60
