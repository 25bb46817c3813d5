"""Ranks of a group that are killed or stopped in mid-all-reduce: the others end within seconds, and nothing is left."""

import os
import random
import signal
import time
from typing import Any

import pytest

from support import run_lengths
from support.faults.killable_role import KillableRole
from support.faults.killable_roles import Nursery
from support.run_lengths import count_runs
from support.waiting import stop_process

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

RANKS = 4
LONGEST_S = 10.0
WAYS: dict[str, dict[str, Any]] = {
    "connections": {"share": False},
    "shared memory": {},
    "mixed": {"hosts": [0, 1, 0, 1]},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


def check_survivors(ranks: list[KillableRole], lost: int, began: float) -> float:
    """Checks that all ranks but one end with an error that names it. Returns the seconds until the last one did."""
    for rank, process in enumerate(ranks):
        if rank != lost:
            assert f"rank {lost} of {len(ranks)} " in process.hear()
    waited = time.monotonic() - began
    assert waited < LONGEST_S
    assert [process.end() for rank, process in enumerate(ranks) if rank != lost] == [0] * (len(ranks) - 1)
    return waited


def test_a_killed_rank(nursery: Nursery, way: dict[str, Any]) -> None:
    draw = random.Random(1)
    with count_runs("rank_kill", count := run_lengths.runs(2, 10), "s") as counted:
        for _ in range(count):
            lost = draw.randrange(RANKS)
            ranks = nursery.ranks(RANKS, **way, dooms={str(lost): draw.randrange(1, 1_500)})
            for process in ranks:
                assert process.hear() == "ready"
            assert ranks[lost].end() == -signal.SIGKILL
            counted.passes(check_survivors(ranks, lost, time.monotonic()))
            assert not nursery.segments()


def test_a_stopped_rank(nursery: Nursery, way: dict[str, Any]) -> None:
    with count_runs("rank_stop", count := run_lengths.runs(1, 5), "s") as counted:
        for lost in range(count):
            ranks = nursery.ranks(RANKS, **way, **run_lengths.size({"silent_s": 1.5}, {}))
            for process in ranks:
                assert process.hear() == "ready"
            stopped = ranks[lost := lost % RANKS]
            stop_process(stopped.pid)
            counted.passes(check_survivors(ranks, lost, time.monotonic()))
            assert not nursery.segments()
            os.kill(stopped.pid, signal.SIGCONT)
            assert f"rank {lost} of {RANKS} has sent no heartbeat" in stopped.hear()
            assert stopped.end() == 0
