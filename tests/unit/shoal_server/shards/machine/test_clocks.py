"""Clocks compared with a naive implementation, which scans all clocks; and what a commit costs."""

import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import consistency
from shoal_server.shards.machine.clocks import Clocks, WorkerClock
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.events import PullRequested, PushCommitted, PushStaged, WorkerAdmitted
from shoal_server.shards.machine.state import GroupState

STEPS = st.integers(0, 12)
NAMES = st.sampled_from("abcdef")
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), NAMES, STEPS),
        st.tuples(st.just("release"), NAMES, STEPS),
        st.tuples(st.just("advance"), NAMES, STEPS),
        st.tuples(st.just("mark"), NAMES, STEPS | st.just(1 << 53)),
    ),
    max_size=60,
)


@given(moves=MOVES)
def test_the_slowest_and_the_counts_are_those_of_a_scan(moves: list[tuple[str, str, int]]) -> None:
    clocks, naive = Clocks(), dict[str, int]()
    mark = 0
    for move, name, steps in moves:
        if move == "admit" and name not in naive:
            clocks.admit(name, WorkerClock(1, "fbdace".index(name), steps))
            naive[name] = steps
        elif move == "release" and name in naive:
            clocks.release(name)
            del naive[name]
        elif move == "advance" and name in naive:
            clocks.advance(clocks[name], steps)
            naive[name] = max(naive[name], steps)
        elif move == "mark":
            mark = steps
        assert {name: clock.steps for name, clock in clocks.items()} == naive
        assert clocks.slowest(99) == min(naive.values(), default=99)
        assert clocks.count_up_to(mark) == sum(steps <= mark for steps in naive.values())
        owing = [(clocks[name].rank, 1) for name, steps in naive.items() if steps <= mark]
        assert clocks.first_up_to(mark) == min(owing, default=None)


def test_a_worker_that_stays_behind_does_not_let_the_heap_grow() -> None:
    clocks = Clocks()
    clocks.admit("slow", WorkerClock(1, 0, 0))
    clocks.admit("fast", WorkerClock(1, 1, 0))
    tracemalloc.start()
    try:
        for step in range(1, 10_000):
            clocks.advance(clocks["fast"], step)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert clocks.slowest(0) == 0
    assert held < 20_000, "a heap that kept each step would hold 80,000 bytes of references alone"


def lines_of_a_commit(mode: consistency.Consistency, workers: int) -> float:
    """Returns the mean number of lines that a commit of a step executes, before the one that lets all go on.

    Each worker pushes step 0, and then its pull of step 1 may wait.
    """
    group = GroupState("job", mode_for(mode))
    for rank in range(workers):
        group.handle(WorkerAdmitted(f"w{rank}", 1, rank))
    lines, commits, outer = 0, workers - 3, sys.gettrace()

    def count(*_: Any) -> Any:
        nonlocal lines
        lines += 1
        return count

    for rank in range(commits):  # the last ones close the step, with or without two backup workers
        group.handle(PushStaged(f"w{rank}", 1, 0, 1.0, 0, {}))
        sys.settrace(count)
        try:
            group.handle(PushCommitted(f"w{rank}", 1, 0))
        finally:
            sys.settrace(outer)
        group.handle(PullRequested(object(), f"w{rank}", 1, 1, 0))
    return lines / commits


@pytest.mark.parametrize(
    "mode",
    [
        consistency.Asynchronous(),
        consistency.BoundedStaleness(0),
        consistency.BoundedStaleness(2),
        consistency.Synchronous(),
        consistency.Synchronous(backup_workers=2),
    ],
    ids=str,
)
def test_a_commit_costs_the_same_with_a_thousand_workers(mode: consistency.Consistency) -> None:
    """It looks neither at all clocks nor at all waiting pulls."""
    assert lines_of_a_commit(mode, 1_000) <= 1.5 * lines_of_a_commit(mode, 10)
