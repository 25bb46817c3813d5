"""Short form of the simulation: some seeds, a replay, planted bugs, and shrinking. `make simulate` is the long form."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulation import campaign
from simulation.__main__ import main
from simulation.clock import START, Clock
from simulation.cluster import run
from simulation.network import Weather
from simulation.plan import Fault, FaultKind, plan_of
from simulation.planted import PLANTED
from support.run_lengths import size

# A seed that finds each planted bug, and the invariant that it breaks.
FOUND = {
    "dedup_off": (3, "succeeds"),
    "fencing_off": (199, "fenced"),
    "generation_check_off": (52, "generation"),
}


def test_no_seed_breaks_an_invariant() -> None:
    row = campaign.clean(0, size(100, 2_000), 1, print)
    assert row.failed == ()
    assert row.acknowledged > 10 * row.seeds, "workers train"
    assert row.undone, "jobs restart from checkpoints"


def test_a_seed_replays_exactly() -> None:
    first, again = run(plan_of(7)), run(plan_of(7))
    assert (first.digest, first.events, first.seconds) == (again.digest, again.events, again.seconds)
    assert run(plan_of(8)).digest != first.digest


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_is_found(name: str) -> None:
    seed, rule = FOUND[name]
    result = run(plan_of(seed), PLANTED[name])
    assert result.rule == rule
    assert run(plan_of(seed)).rule == "", "without the bug nothing is found"


def test_a_failing_plan_is_shrunk() -> None:
    seed, rule = FOUND["generation_check_off"]
    result = run(plan_of(seed), PLANTED["generation_check_off"])
    smallest = campaign.smallest(result, PLANTED["generation_check_off"])
    assert smallest.rule == rule
    assert len(smallest.plan.faults) <= len(result.plan.faults)
    assert smallest.plan.seed == seed
    assert smallest.plan != result.plan


def test_a_job_without_faults_is_never_undone() -> None:
    for seed in range(20):
        plan = replace(plan_of(seed), faults=(), weather=Weather())
        result = run(plan)
        assert (result.rule, result.undone) == ("", 0)


def test_a_coordinator_with_a_wrong_clock_loses_nothing() -> None:
    crash = Fault(2.0, FaultKind.CRASH, "coordinator", 0.5, offset_s=-300.0)
    result = run(replace(plan_of(1), faults=(crash,), weather=Weather()))
    assert (result.rule, result.undone) == ("", 0)


def test_a_clock_has_its_own_pace_and_offset() -> None:
    now = 10.0
    clock = Clock(lambda: now, offset_s=300.0, pace=1.5)
    steady = clock.steady()
    assert steady() == START + 310.0
    now = 12.0
    assert steady() == START + 313.0
    assert clock.wall() == START + 312.0
    assert clock.monotonic() == 18.0


def test_the_command_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latest = tmp_path / "latest.json"
    status = main(["--seeds", "3", "--processes", "1", "--first", str(FOUND["fencing_off"][0])], latest)
    rows = {row["name"]: row for row in json.loads(latest.read_text())}
    assert [*rows] == ["clean", *PLANTED]
    assert rows["clean"]["seeds"] == 3
    assert rows["fencing_off"]["found_after"] == 1
    assert status == 0
    assert "seeds a minute" in capsys.readouterr().out


def test_the_command_replays_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "0"]) == 0
    assert "no invariant is broken" in capsys.readouterr().out
    assert main(["--seed", "3", "--bug", "dedup_off"]) == 1
    assert "shrunk to" in capsys.readouterr().out
