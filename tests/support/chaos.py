"""Runner of the long scenarios with faults, which stores their results: `chaos.py [NAME,...]`.

`make chaos` calls it. A scenario consists of one or more tests. Its results are the rows that these tests write with
`run_lengths.count_runs`. The test suite runs the same tests in their short forms. Scenarios run one after the other,
because results include times. Each scenario runs under the guard against leaks (`leaks`). CHAOS_RUNS=n in the
environment sets n runs for each test.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from support import leaks

ROOT = Path(__file__).parents[2]
LATEST = ROOT / "runs" / "chaos" / "latest.json"

_RANKS, _ELASTIC = "tests/chaos/test_ranks.py", "tests/chaos/test_elastic_ranks.py"
_RECOVERY, _CHECKPOINTS = "tests/chaos/test_recovery.py", "tests/contract/test_checkpoints.py"
_NETWORK = "tests/chaos/test_bad_network.py"
_COORDINATOR, _LEDGER = "tests/chaos/test_coordinator.py", "tests/chaos/test_ledger.py"
_REPLICAS, _COPYING = "tests/chaos/test_replicas.py", "tests/chaos/test_copying.py"
_SIMULATION = "tests/simulation/test_simulation.py"
SCENARIOS: Mapping[str, Sequence[str]] = {
    "whole_cluster_kill": [f"{_RECOVERY}::test_job_has_the_same_result_after_the_whole_cluster_is_killed"],
    "checkpoint_faults": [
        "tests/chaos/test_checkpoint_faults.py",
        f"{_RECOVERY}::test_the_coordinator_dies_at_a_step_of_a_checkpoint",
    ],
    "reshard_restore": [f"{_CHECKPOINTS}::test_checkpoint_of_three_servers_is_restored_on_any_number"],
    "full_disk": [
        f"{_COORDINATOR}::test_a_disk_that_is_full_ends_the_coordinator_and_loses_nothing",
        f"{_CHECKPOINTS}::test_a_disk_that_fails_fails_the_checkpoint_and_not_the_training",
    ],
    "consistent_cut": [f"{_CHECKPOINTS}::test_cuts_under_load_are_consistent_over_all_shards"],
    "corrupt_checkpoint": [
        "tests/unit/shoal/checkpoint/test_damage.py",
        f"{_RECOVERY}::test_a_damaged_checkpoint_is_skipped",
    ],
    "coordinator_kill": [f"{_COORDINATOR}::test_nothing_is_lost_when_the_coordinator_is_killed_repeatedly"],
    "worker_kill": ["tests/chaos/test_worker_kill.py"],
    "worker_kill_ledger": [_LEDGER],
    "dropped_replies": [f"{_NETWORK}::test_pushes_count_once_when_replies_are_dropped"],
    "replayed_pushes": [
        f"{_REPLICAS}::test_pushes_that_are_sent_again_after_a_failover_change_nothing",
        f"{_NETWORK}::test_acknowledged_pushes_that_are_sent_again_are_recognised",
    ],
    "slow_network": [f"{_NETWORK}::test_a_slow_network_changes_nothing_but_the_time"],
    "partition": ["tests/chaos/test_partitions.py"],
    "clock_step": ["tests/chaos/test_clock_steps.py"],
    "rolling_restart": ["tests/chaos/test_rolling_restart.py"],
    "scale_out_in": ["tests/chaos/test_scaling.py"],
    "rank_kill": [f"{_RANKS}::test_a_killed_rank"],
    "rank_stop": [f"{_RANKS}::test_a_stopped_rank"],
    "elastic_kill": [f"{_ELASTIC}::test_survivors_go_on_without_a_killed_process"],
    "elastic_stop": [f"{_ELASTIC}::test_survivors_go_on_without_a_stopped_process"],
    "schedule": ["tests/chaos/test_scheduled_calls.py"],
    "server_kill": [
        f"{_REPLICAS}::test_training_goes_on_when_servers_are_killed",
        f"{_REPLICAS}::test_training_goes_on_with_each_transport",
        f"{_REPLICAS}::test_servers_are_killed_while_sessions_come_and_go_and_checkpoints_are_taken",
    ],
    "server_and_coordinator_kill": [f"{_REPLICAS}::test_a_server_dies_with_the_coordinator"],
    "stopped_primary": [f"{_REPLICAS}::test_a_stopped_primary_answers_nothing_when_it_goes_on"],
    "both_copies_kill": [
        f"{_COPYING}::test_the_job_goes_back_to_its_checkpoint_when_both_copies_are_lost",
        f"{_COPYING}::test_a_job_goes_back_when_the_primary_dies_during_its_only_copy",
    ],
    "kill_during_copy": [f"{_COPYING}::test_a_copy_that_is_interrupted_is_made_again"],
    "simulation": [f"{_SIMULATION}::test_no_seed_breaks_an_invariant"],
    "planted_bugs": [f"{_SIMULATION}::test_every_planted_bug_is_found_soon"],
    "session_kill_batches": ["tests/cluster/test_sessions.py::test_no_sample_is_missed_when_sessions_die"],
}

PYTEST: Sequence[str] = (sys.executable, "-m", "pytest", "-q")
# What a run leaves behind fails it.
GUARD: Sequence[str] = (sys.executable, leaks.__file__)


@dataclass(frozen=True)
class Row:
    """The result of a scenario.

    Attributes:
        name: name of the scenario.
        runs: number of runs.
        passed: number of runs that passed.
        worst: the worst figure of the runs that passed.
        unit: unit of that figure.
        metrics: further metrics, by what they are.
    """

    name: str
    runs: int
    passed: int
    worst: float
    unit: str
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether all runs passed."""
        return self.passed == self.runs


def summed(name: str, found: Iterable[Mapping[str, Any]], status: int) -> Row:
    """Returns a scenario's row.

    Args:
        name: name of the scenario.
        found: what its tests recorded. Of metrics with the same name, the largest one counts.
        status: exit status of its tests. A failure that no test counted adds a run that did not pass. So does a
            scenario that recorded nothing.
    """
    rows = [Row(**row) for row in found if row["name"] == name]
    runs, passed = sum(row.runs for row in rows), sum(row.passed for row in rows)
    if passed == runs and (status or not rows):
        runs += 1
    worst = max((row.worst for row in rows), default=0.0)
    metrics: dict[str, float] = {}
    for row in rows:
        metrics.update({what: max(value, metrics.get(what, value)) for what, value in row.metrics.items()})
    return Row(name, runs, passed, worst, rows[0].unit if rows else "", metrics)


def run(name: str, nodes: Sequence[str]) -> Row:
    """Runs a scenario's tests in their long form. Their output goes to the terminal."""
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        environment = {**os.environ, "SHOAL_LONG": "1", "CHAOS_ROWS": str(rows)}
        done = subprocess.run([*GUARD, *PYTEST, *nodes], cwd=ROOT, env=environment, check=False)
        return summed(name, map(json.loads, rows.read_text().splitlines()), done.returncode)


def saved(path: Path) -> dict[str, Row]:
    """Returns the stored row of each scenario; empty if the file cannot be read."""
    try:
        rows = [Row(**row) for row in json.loads(path.read_text())]
    except (FileNotFoundError, ValueError, TypeError):
        return {}
    return {row.name: row for row in rows if row.name in SCENARIOS}


def save(rows: Iterable[Row], path: Path) -> None:
    """Writes the rows to the file, which is replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(".tmp")
    begun.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    begun.replace(path)


def table(rows: Iterable[Row]) -> str:
    """Returns the rows as text for a terminal."""
    width = max(map(len, SCENARIOS))
    lines = [f"{'scenario':{width}}  passed  of runs  worst"]
    for row in rows:
        lines.append(f"{row.name:{width}}  {row.passed:6}  {row.runs:7}  {row.worst:g} {row.unit}")
        lines += [f"{'':{width}}  {what}: {value:g}" for what, value in row.metrics.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str], latest: Path = LATEST) -> int:
    """Runs scenarios. Returns 1 if one of them failed.

    The row of a scenario is saved as soon as it has run, because all scenarios together take long. Scenarios that do
    not run keep their stored rows.
    """
    rows = []
    for name in _names(arguments):
        print(f"{name}:", flush=True)
        rows.append(run(name, SCENARIOS[name]))
        known = {**saved(latest), name: rows[-1]}
        save([known[it] for it in SCENARIOS if it in known], latest)
    print(table(rows))
    return 0 if all(row.holds for row in rows) else 1


def _names(arguments: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser(description="Long forms of the tests that kill, damage and cut.")
    parser.add_argument("names", nargs="?", default=",".join(SCENARIOS), help=f"some of {','.join(SCENARIOS)}")
    chosen = {name for name in parser.parse_args(arguments).names.split(",") if name}
    if unknown := chosen - SCENARIOS.keys():
        parser.error(f"there is no {min(unknown)}; choose some of {', '.join(SCENARIOS)}")
    if not chosen:
        parser.error(f"no name is given; choose some of {', '.join(SCENARIOS)}")
    runs = os.environ.get("CHAOS_RUNS") or "1"
    if not (runs.isdecimal() and int(runs)):
        parser.error(f"CHAOS_RUNS is {runs!r}; it is a number of runs, 1 or more")
    return [name for name in SCENARIOS if name in chosen]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
