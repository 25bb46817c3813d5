"""Commit gate: the commits that a cut holds back, and the longest time for which it does."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal import errors
from shoal_server.shards.group.call_wait import CallWait
from shoal_server.shards.group.commit_gate import HOLD_S, CommitGate


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class WorkerClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def passed(gate: CommitGate) -> bool:
    """Passes the gate as a commit does, but waits in this thread."""
    while True:
        with gate.passing(set()) as held:
            if held is None:
                return True
        ended = threading.Event()
        held.on_end(ended.set)
        ended.wait()
        held.check()


def test_commits_pass_side_by_side() -> None:
    gate = CommitGate()
    with gate.passing(set()), gate.passing(set()):
        pass


def test_a_cut_waits_for_commits_that_have_begun(threads: ThreadPoolExecutor) -> None:
    gate, begun, end = CommitGate(), threading.Event(), threading.Event()

    def commit() -> None:
        with gate.passing(set()):
            begun.set()
            end.wait()

    committing = threads.submit(commit)
    begun.wait()
    holding = threads.submit(gate.hold, 1)
    assert not holding.done()
    end.set()
    committing.result()
    holding.result()


def test_commits_wait_until_the_cut_is_made(threads: ThreadPoolExecutor) -> None:
    gate = CommitGate()
    gate.hold(1)
    waiting = [threads.submit(passed, gate) for _ in range(2)]
    with gate.held(1):
        assert not any(each.done() for each in waiting)
    assert all(each.result(30) for each in waiting)


def test_a_cut_that_nobody_makes_is_over_after_a_while() -> None:
    clock = WorkerClock()
    gate = CommitGate(clock)
    gate.hold(1)
    clock.now += HOLD_S
    assert passed(gate)
    with pytest.raises(errors.Cancelled, match="nothing was saved"), gate.held(1):
        pass


def test_commits_that_wait_go_on_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_server.shards.group.commit_gate.HOLD_S", 0.05)
    gate = CommitGate()
    gate.hold(1)
    assert passed(gate)


def test_a_later_cut_takes_the_place_of_an_earlier_one() -> None:
    gate = CommitGate()
    gate.hold(1)
    gate.hold(2)
    with pytest.raises(errors.Cancelled), gate.held(1):
        pass
    with gate.held(2):
        pass
    assert passed(gate)


def test_a_cut_that_fails_lets_commits_pass() -> None:
    gate = CommitGate()
    gate.hold(1)
    with pytest.raises(KeyError), gate.held(1):
        raise KeyError
    assert passed(gate)


def test_commits_that_do_not_end_fail_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_server.shards.group.commit_gate.HOLD_S", 0.05)
    gate = CommitGate()
    with gate.passing(set()):
        with pytest.raises(errors.Overloaded, match="take the cut again later"):
            gate.hold(1)
        assert passed(gate)


def test_an_abandoned_cut_lets_commits_pass_at_once(threads: ThreadPoolExecutor) -> None:
    gate = CommitGate(WorkerClock())  # by itself it would never open
    gate.hold(1)
    waiting = threads.submit(passed, gate)
    gate.resume(2)  # another cut's, which comes late
    assert not waiting.done()
    gate.resume(1)
    assert waiting.result(30)
    with pytest.raises(errors.Cancelled), gate.held(1):
        pass


def test_commits_wait_after_a_cut_to_which_the_job_goes_back(threads: ThreadPoolExecutor) -> None:
    clock = WorkerClock()
    gate = CommitGate(clock)
    gate.hold(1)
    with gate.held(1, 20.0):
        pass
    waiting = threads.submit(passed, gate)
    clock.now += 19.0
    assert not waiting.done()
    gate.resume(1)  # it does not go back, after all
    assert waiting.result(30)


def test_they_wait_no_longer_than_that_nor_where_nothing_was_cut() -> None:
    clock = WorkerClock()
    gate = CommitGate(clock)
    gate.hold(1)
    with gate.held(1, 20.0):
        pass
    clock.now += 20.0
    assert passed(gate)
    gate.hold(2)
    with pytest.raises(KeyError), gate.held(2, 20.0):
        raise KeyError
    assert passed(gate)


def test_a_cut_takes_over_from_one_that_still_holds() -> None:
    gate = CommitGate(WorkerClock())
    gate.hold(1)
    with gate.held(1, 20.0):
        pass
    gate.hold(2)
    gate.resume(1)
    with gate.held(2):
        pass
    assert passed(gate)


def test_what_waits_goes_on_when_the_shards_are_gone(threads: ThreadPoolExecutor) -> None:
    gate = CommitGate(WorkerClock())
    gate.hold(1)
    waiting = threads.submit(passed, gate)
    assert not waiting.done()
    gate.close()
    assert waiting.result(30)
    gate.hold(2)
    assert passed(gate), "it is closed for good"


def test_a_cut_that_is_being_made_is_not_abandoned(threads: ThreadPoolExecutor) -> None:
    gate = CommitGate()
    gate.hold(1)
    with gate.held(1):
        gate.resume(1)
        waiting = threads.submit(passed, gate)
        assert not waiting.done()
    assert waiting.result(30)


def test_a_commit_whose_call_ends_does_not_wait() -> None:
    gate, waiting = CommitGate(WorkerClock()), set[CallWait]()
    gate.hold(1)
    with gate.passing(waiting) as gone, gate.passing(waiting) as kept:
        assert gone
        assert kept
    assert waiting == {gone, kept}
    gone.withdraw()
    gate.resume(1)
    assert not waiting
    kept.check()
    with pytest.raises(errors.Cancelled):
        gone.check()
