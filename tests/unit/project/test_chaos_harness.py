"""Harness of `make chaos`: its list of scenarios, the rows that it stores, and its end when a scenario fails."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from support import chaos, run_lengths

ISSUE = [
    *("whole_cluster_kill", "checkpoint_faults", "reshard_restore", "consistent_cut"),
    *("corrupt_checkpoint", "coordinator_kill_restart", "worker_kill_ledger"),
]


def recorded(name: str, runs: int, passed: int, worst: float = 0.0, unit: str = "s") -> dict[str, Any]:
    return {"name": name, "runs": runs, "passed": passed, "worst": worst, "unit": unit}


@pytest.fixture(autouse=True)
def full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAOS_RUNS", raising=False)


@pytest.fixture
def latest(tmp_path: Path) -> Path:
    return tmp_path / "chaos" / "latest.json"


@pytest.fixture
def scenarios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Gives a scenario this code, in place of pytest and its tests, and no guard, which would see what others do."""
    given: dict[str, list[str]] = {}
    monkeypatch.setattr(chaos, "SCENARIOS", given)
    monkeypatch.setattr(chaos, "GUARD", ())
    monkeypatch.setattr(chaos, "PYTEST", (sys.executable,))
    monkeypatch.setenv("PYTHONPATH", str(Path(run_lengths.__file__).parents[1]), prepend=os.pathsep)

    def add(name: str, code: str) -> None:
        script = tmp_path / f"{name}.py"
        script.write_text(f"from support import run_lengths\n{code}\n")
        given[name] = [str(script)]

    return add


# What there is.


def test_the_names_are_those_that_are_asked_for() -> None:
    assert list(chaos.SCENARIOS) == ISSUE


@pytest.mark.parametrize("node", [node for nodes in chaos.SCENARIOS.values() for node in nodes])
def test_each_of_a_scenarios_tests_is_there(node: str) -> None:
    file, _, test = node.partition("::")
    assert f"def {test or 'test_'}" in (chaos.ROOT / file).read_text()


@pytest.mark.parametrize(
    ("arguments", "runs", "message"),
    [
        (["no_such,checkpoint_faults"], "", f"there is no no_such; choose some of {', '.join(ISSUE)}"),
        ([","], "", "no name is given"),
        ([], "many", "CHAOS_RUNS is 'many'"),
        ([], "0", "CHAOS_RUNS is '0'"),
    ],
)
def test_what_it_does_not_know_is_refused_and_nothing_is_run(
    arguments: list[str],
    runs: str,
    message: str,
    latest: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CHAOS_RUNS", runs)
    with pytest.raises(SystemExit) as refused:
        chaos.main(arguments, latest)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
    assert not latest.exists()


# Rows.


def test_rows_of_one_name_are_summed() -> None:
    found = [recorded("a", 10, 10, 0.5), recorded("b", 1, 0, 9.0), recorded("a", 20, 19, 2.5), recorded("a", 1, 1, 1.5)]
    row = chaos.summed("a", found, 1)
    assert asdict(row) == recorded("a", 31, 30, 2.5)
    assert not row.holds


def test_a_failure_that_was_not_counted_is_a_run_that_did_not_pass() -> None:
    assert asdict(chaos.summed("a", [recorded("a", 5, 5)], 1)) == recorded("a", 6, 5)
    assert asdict(chaos.summed("a", [], 1)) == recorded("a", 1, 0, unit="")


def test_a_scenario_that_recorded_nothing_did_not_pass() -> None:
    assert not chaos.summed("a", [], 0).holds


def test_a_tally_is_recorded_however_the_test_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows"
    monkeypatch.setenv("CHAOS_ROWS", str(rows))

    def two_of_three() -> None:
        with run_lengths.count_runs("a", 3, "s") as counted:
            counted.passes(2.0)
            counted.passes(1.0)
            raise AssertionError

    with pytest.raises(AssertionError):
        two_of_three()
    assert json.loads(rows.read_text()) == recorded("a", 3, 2, 2.0)


# Runs.


def test_a_scenario_that_fails_is_a_row_and_the_exit_status(
    scenarios: Callable[[str, str], None], latest: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scenarios("good", "assert run_lengths.is_long(); run_lengths.record('good', run_lengths.runs(1, 7), 7, 0.25, 's')")
    scenarios("bad", "run_lengths.record('bad', 3, 2, 1.0, 's'); raise AssertionError('the third')")
    scenarios("silent", "raise AssertionError('at once')")
    assert chaos.main([], latest) == 1
    expected = [recorded("good", 7, 7, 0.25), recorded("bad", 3, 2, 1.0), recorded("silent", 1, 0, unit="")]
    assert json.loads(latest.read_text()) == expected
    assert [*latest.parent.iterdir()] == [latest]
    shown = capfd.readouterr()
    assert "the third" in shown.err
    assert shown.out.endswith(chaos.table(chaos.Row(**row) for row in expected) + "\n")


def test_some_are_picked_and_shortened_and_the_status_says_that_they_held(
    scenarios: Callable[[str, str], None], latest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAOS_RUNS", "2")
    scenarios("one", "raise AssertionError('nobody asked')")
    scenarios("two", "run_lengths.record('two', run_lengths.runs(1, 7), 2, 0.0, 's')")
    assert chaos.main(["two"], latest) == 0
    assert json.loads(latest.read_text()) == [recorded("two", 2, 2)]


@pytest.mark.parametrize("broken", ["", "no JSON", "3", '[{"name": "kept"}]', '["kept"]'])
def test_rows_are_saved_one_by_one_beside_those_that_were_not_run(
    scenarios: Callable[[str, str], None], latest: Path, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    """Whatever ends it, and whatever is there."""
    seen = f"import pathlib, shutil; shutil.copy({str(latest)!r}, {str(latest.with_name('seen'))!r})"
    for name in ("again", "kept"):
        scenarios(name, f"run_lengths.record('{name}', 1, 1, 0.0, 's')")
    scenarios("last", f"run_lengths.record('last', 1, 1, 0.0, 's'); {seen}")
    chaos.save(
        [chaos.Row("kept", 9, 9, 2.0, "s"), chaos.Row("again", 5, 4, 1.0, "s"), chaos.Row("old", 1, 1, 0, "s")], latest
    )
    assert chaos.main(["again,last"], latest) == 0
    expected = [recorded("again", 1, 1), recorded("kept", 9, 9, 2.0), recorded("last", 1, 1)]
    assert json.loads(latest.read_text()) == expected
    assert json.loads(latest.with_name("seen").read_text()) == expected[:2]
    assert "kept" not in capsys.readouterr().out
    latest.write_text(broken)
    assert chaos.main(["again"], latest) == 0
    assert json.loads(latest.read_text()) == expected[:1]


def test_what_is_left_behind_fails_a_scenario(
    scenarios: Callable[[str, str], None], latest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True); sys.exit(1)"
    monkeypatch.setattr(chaos, "GUARD", (sys.executable, "-c", guard))
    scenarios("leaks", "run_lengths.record('leaks', 1, 1, 0.0, 's')")
    assert chaos.main([], latest) == 1
    assert json.loads(latest.read_text()) == [recorded("leaks", 2, 1)]
