"""Groups of ranks on the command line: the elastic groups of a cluster, and the hybrid groups of a job."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

import shoal
from shoal._cli.app import app
from shoal.status import GroupTimings, RankTimes, StageTimes, StepTiming, Timings
from shoal_coordinator.api.codecs import timings_message
from shoal_coordinator.groups import RankCandidate, RankHeartbeat
from support.clusters.fake_coordinator import FakeCoordinator

Run = Callable[..., Result]
RANKS = tuple(RankTimes(60.0, 50, 1_000, 0.5, wait, 2.0) for wait in (9.0, 1.0))


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as coordinator:
        yield coordinator


@pytest.fixture
def run(coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("SHOAL_COORDINATOR", coordinator.address)
    monkeypatch.setenv("COLUMNS", "240")
    return lambda *arguments: CliRunner().invoke(app, arguments)


def start_group(
    coordinator: FakeCoordinator, name: str, *, told: bool = True, ranks: Sequence[RankTimes] = RANKS
) -> None:
    """Forms a group of two ranks. The others wait for the second one."""
    candidates = [RankCandidate(process, f"h:{number}") for number, process in enumerate("ab")]
    for candidate in candidates:
        coordinator.groups.join(name, candidate, ranks=2, min_ranks=1)
    for rank, candidate in enumerate(candidates):
        heartbeat = RankHeartbeat(candidate, 1, rank, 2, times=ranks[rank] if told else None)
        coordinator.groups.heartbeat(name, heartbeat, ranks=2, min_ranks=1)


def test_elastic_groups_are_listed_with_their_straggler(coordinator: FakeCoordinator, run: Run) -> None:
    assert run("groups").stdout.splitlines()[0] == "there is no elastic group"
    start_group(coordinator, "train")
    start_group(coordinator, "begins", told=False)
    coordinator.groups.join("alone", RankCandidate("a", "h:1"), ranks=2, min_ranks=1)
    _, *rows = run("groups").stdout.splitlines()
    assert [row.split()[:4] for row in rows[:3]] == [
        ["alone", "0/2", "1", "0"],
        ["begins", "2/2", "1", "1"],
        ["train", "2/2", "1", "1"],
    ]
    assert rows[2].endswith("rank 1, 8 ms a call")
    assert rows[3:] == ["alone: waits for 1 more of 2 processes"]
    found = [json.loads(line) for line in run("groups", "--json").stdout.splitlines()]
    assert [it["name"] for it in found] == ["alone", "begins", "train"]
    assert found[2]["straggler"] == {"rank": 1, "seconds": pytest.approx(0.008)}


def test_timings_take_the_name_of_a_group_or_of_a_job(coordinator: FakeCoordinator, run: Run) -> None:
    start_group(coordinator, "train")
    title, columns, first, second, note = run("timings", "train").stdout.splitlines()
    assert title == "group train: rank 1 is a straggler: the others wait 8 ms for it in each call"
    assert columns.split() == ["rank", "steps", "calls", "local", "reduce", "wait", "transfer", "address"]
    assert first.split() == ["0", "50", "1,000", "0.50", "9.00", "2.00", "h:0"]
    assert (second.split()[4], note) == ("1.00", "seconds of the last minute")
    record = json.loads(run("timings", "train", "--json").stdout)
    assert (record["straggler"]["rank"], [it["wait"] for it in record["ranks"]]) == (1, [9.0, 1.0])
    nobody = run("timings", "nobody")
    assert (nobody.exit_code, "nobody" in nobody.stderr) == (4, True)

    coordinator.add(shoal.Job("m:f", name="train"))
    assert run("timings", "train").stdout.startswith("train has no timings")
    assert run("timings", "train", "--group").stdout.startswith("group train: rank 1")
    assert run("timings", "nobody", "--group").exit_code == 4

    coordinator.groups.join("alone", RankCandidate("a", "h:1"), ranks=2, min_ranks=1)
    title = run("timings", "alone").stdout.splitlines()[0]
    assert title == "group alone: its first generation waits for 1 more of 2 processes"


def test_timings_of_stages_have_their_bubble(coordinator: FakeCoordinator, run: Run) -> None:
    stages = [replace(it, stage=StageTimes(rank, 2, 4, 50.0 * rank, 5.0)) for rank, it in enumerate(RANKS)]
    start_group(coordinator, "train", ranks=stages)
    _, columns, first, second, _, bubble = run("timings", "train").stdout.splitlines()
    assert columns.split()[-3:] == ["stage", "bubble", "address"]
    assert [it.split()[-3:] for it in (first, second)] == [["0", "-", "h:0"], ["1", "0.100", "h:1"]]
    assert bubble == "bubble 0.100; equal stages would have 0.200 with 4 micro-batches, and 0.111 with 8"
    record = json.loads(run("timings", "train", "--json").stdout)
    assert record["bubble"] == {"measured": 0.1, "stages": 2, "micro_batches": 4, "ideal": 0.2}
    assert [it["bubble"] for it in record["ranks"]] == [None, 0.1]
    assert record["ranks"][1]["stage"] == {"stage": 1, "stages": 2, "micro_batches": 4, "seconds": 50.0, "wait": 5.0}

    coordinator.add(shoal.Job("m:f", name="digits"))
    steps = {"group-0": (StepTiming(9, 10.0, compute=0.1),)}
    coordinator.timings = timings_message(Timings(steps, groups={"group-0": GroupTimings(tuple(stages))}))
    assert run("timings", "digits").stdout.splitlines()[-1] == bubble


def test_timings_of_a_job_have_its_hybrid_groups(coordinator: FakeCoordinator, run: Run) -> None:
    coordinator.add(shoal.Job("m:f", name="digits"))
    steps = {"group-0": (StepTiming(9, 10.0, compute=0.1),)}
    coordinator.timings = timings_message(Timings(steps, groups={"group-0": GroupTimings(RANKS)}))
    told = run("timings", "digits").stdout.splitlines()
    assert told[3] == "hybrid group of group-0: rank 1 is a straggler: the others wait 8 ms for it in each call"
    assert told[-2].split() == ["1", "50", "1,000", "0.50", "1.00", "2.00"]
    record = json.loads(run("timings", "digits", "--json").stdout)
    assert record["workers"][0]["group"]["straggler"] == {"rank": 1, "seconds": pytest.approx(0.008)}
