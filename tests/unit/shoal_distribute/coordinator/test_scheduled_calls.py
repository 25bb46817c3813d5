"""The chief's state machine of scheduled calls, and the log that the other tasks follow."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import errors
from shoal_distribute.coordinator.operation_log import LogPart, OperationEnd, OperationLog
from shoal_distribute.coordinator.outcomes import OutcomeKind, ScheduledOutcome
from shoal_distribute.coordinator.scheduled_calls import MAX_LOST, CallAttempt, ScheduledCalls
from support import run_lengths

FAILED = ScheduledOutcome.of_text(OutcomeKind.ERROR, "it failed")


def calls_of(*workers: int, max_calls: int = 100, kept_bytes: int = 1 << 20) -> ScheduledCalls:
    calls = ScheduledCalls(max_calls, kept_bytes)
    for worker in workers:
        calls.enter(worker)
    return calls


def taken(calls: ScheduledCalls, worker: int) -> CallAttempt:
    attempt = calls.take(worker)
    assert attempt
    return attempt


def value(calls: ScheduledCalls, index: int) -> Any:
    outcome = calls.outcome(index)
    assert outcome
    return outcome.value()


def test_calls_go_to_free_workers_in_order() -> None:
    calls = calls_of(0, 1)
    for _ in range(3):
        calls.schedule("step")
    first, second = taken(calls, 1), taken(calls, 0)
    assert [first.call.index, second.call.index] == [0, 1]
    assert calls.take(0) is None
    assert calls.take(7) is None  # it is not there
    assert calls.finish(0, second.number, ScheduledOutcome.of_value("b"))
    assert (calls.log.finished, calls.outcome(0), value(calls, 1)) == (0, None, "b")
    assert taken(calls, 0).call.index == 2
    assert calls.waits_for() == "for call 2 (step) on worker 0, call 0 (step) on worker 1"
    assert not calls.done()
    assert calls.finish(1, first.number, ScheduledOutcome.of_value("a"))
    assert calls.log.finished == 2


def test_the_call_of_a_lost_worker_comes_first_and_its_late_result_does_not_count() -> None:
    calls = calls_of(0, 1)
    for _ in range(3):
        calls.schedule("step")
    lost = taken(calls, 0)
    calls.lose(0)
    calls.enter(0)
    again = taken(calls, 1)
    assert again.call is lost.call
    assert not calls.finish(0, lost.number, ScheduledOutcome.of_value("late"))
    assert taken(calls, 0).call.index == 1
    assert not calls.finish(0, lost.number, ScheduledOutcome.of_value("late"))
    assert calls.finish(1, again.number, ScheduledOutcome.of_value("counts"))
    assert not calls.finish(1, again.number, ScheduledOutcome.of_value("twice"))
    assert value(calls, 0) == "counts"


def test_an_error_is_raised_once_and_cancels_what_has_not_begun() -> None:
    calls = calls_of(0, 1, 2)
    for _ in range(5):
        calls.schedule("step")
    attempts = [taken(calls, worker) for worker in range(3)]
    calls.finish(1, attempts[1].number, FAILED)
    assert not calls.idle  # two calls run
    calls.finish(0, attempts[0].number, ScheduledOutcome.of_value(1))
    calls.lose(2)  # its call is not begun again
    assert calls.idle
    with pytest.raises(errors.ProgramError, match="it failed"):
        calls.schedule("step")
    assert calls.log.end_of(5) is not None
    assert value(calls, 0) == 1
    for cancelled in (2, 3, 4):
        with pytest.raises(errors.Cancelled, match=rf"call {cancelled} .* because call 1 \(step\) has failed"):
            value(calls, cancelled)
    calls.join()
    assert calls.schedule("next").index == 5
    assert taken(calls, 0).call.index == 5


def test_a_call_that_loses_many_workers_fails() -> None:
    calls = calls_of()
    calls.schedule("crash")
    for _ in range(MAX_LOST):
        assert not calls.idle
        calls.enter(0)
        taken(calls, 0)
        calls.lose(0)
    with pytest.raises(errors.ProgramError, match="lost with its worker 10 times"):
        calls.join()


def test_calls_and_kept_results_are_bounded() -> None:
    calls = calls_of(0, 1, max_calls=2, kept_bytes=1000)
    calls.schedule("step")
    assert calls.accepts
    calls.schedule("step")
    assert not calls.accepts
    first, second = taken(calls, 0), taken(calls, 1)
    calls.finish(1, second.number, ScheduledOutcome.of_value("x" * 700))
    assert not calls.accepts  # the first one is two calls behind
    calls.finish(0, first.number, ScheduledOutcome.of_value("x" * 700))
    assert calls.accepts
    assert value(calls, 0) == "x" * 700
    with pytest.raises(errors.LimitExceeded, match="a larger kept_bytes"):
        value(calls, 1)
    assert calls.outcome(2) is None  # not scheduled yet


def test_errors_that_the_log_names_are_kept_for_tasks_that_repeat_it() -> None:
    calls = calls_of(0, kept_bytes=1)
    calls.schedule("step")
    text = "it failed: " + 10_000 * "x"
    calls.finish(0, taken(calls, 0).number, ScheduledOutcome.of_text(OutcomeKind.ERROR, text))
    with pytest.raises(errors.ProgramError):
        calls.join()
    for index in (1, 2):
        calls.schedule("step")
        calls.finish(0, taken(calls, 0).number, ScheduledOutcome.of_value(index))
    outcome = calls.outcome(0)
    assert outcome
    assert isinstance(outcome.error, errors.ProgramError)
    assert outcome.error.message.startswith("it failed: xxx")
    assert len(outcome.error.message) < 5_000
    with pytest.raises(errors.LimitExceeded):
        value(calls, 1)


@settings(max_examples=run_lengths.draws(50), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("scdeflr"), st.integers(0, 2)), max_size=60))
def test_each_call_has_exactly_one_outcome(steps: list[tuple[str, int]]) -> None:
    calls = calls_of(0, max_calls=5)
    counted: dict[int, str] = {}
    seen: set[int] = set()  # calls whose errors were raised
    attempts: dict[int, list[CallAttempt]] = {0: [], 1: [], 2: []}  # of each worker, lost ones included
    current: dict[int, CallAttempt] = {}
    scheduled = 0
    for step, worker in steps:
        try:
            if step == "s" and calls.accepts:
                assert calls.schedule("step").index == scheduled
                scheduled += 1
            elif step == "d":
                assert calls.done() == calls.idle
        except errors.ProgramError as error:
            failed = int(error.message)
            assert failed not in seen
            seen.add(failed)
        if step == "c" and (attempt := calls.take(worker)):
            assert attempt.call.index not in {it.call.index for it in current.values()}
            attempts[worker].append(attempt)
            current[worker] = attempt
        elif step in "fr" and attempts[worker]:
            attempt = attempts[worker][-1] if step == "f" else attempts[worker][0]
            name = f"{worker} {attempt.number}"
            bad = attempt.number % 5 == 4
            text = str(attempt.call.index)
            outcome = ScheduledOutcome.of_text(OutcomeKind.ERROR, text) if bad else ScheduledOutcome.of_value(name)
            if calls.finish(worker, attempt.number, outcome):
                assert current.pop(worker) is attempt
                assert attempt.call.index not in counted
                counted[attempt.call.index] = text if bad else name
        elif step == "l":
            calls.lose(worker)
            current.pop(worker, None)
        elif step == "e":
            calls.enter(worker)
            current.pop(worker, None)
    for index, wanted in counted.items():
        found = calls.outcome(index)
        assert found
        assert (found.error.message if found.error else found.value()) == wanted
    ended = [index for index in range(scheduled) if calls.outcome(index)]
    assert {*counted} <= {*ended}
    assert all(calls.outcome(index) for index in range(calls.log.finished))
    assert (len(ended) == scheduled) == calls.idle


@settings(max_examples=run_lengths.draws(20), deadline=None)
@given(st.lists(st.sampled_from([None, OperationEnd.RAISED, OperationEnd.DONE]), max_size=30), st.data())
def test_a_log_is_followed_in_parts(ends: list[OperationEnd | None], data: st.DataObject) -> None:
    log, follower, known = OperationLog(), OperationLog(), 0
    for number, end in enumerate(ends):
        log.add(end, number if end is OperationEnd.RAISED else 0)
        log.finished = number // 2
        if data.draw(st.booleans()):
            part = LogPart.decode(log.part(known).encode())
            follower.follow(part)
            known += len(part.events)
            if data.draw(st.booleans()):
                known = 0  # a new connection begins with the whole log
            assert (follower.operations, follower.finished) == (log.operations, log.finished)
            assert [follower.end_of(it) for it in range(number + 1)] == [log.end_of(it) for it in range(number + 1)]


@pytest.mark.parametrize("data", [b"", b"x" * 16, b"\0" * 17 + b"x" * 16, b"\0" * 17 + b"\xff" * 17])
def test_bytes_that_are_no_log_are_refused(data: bytes) -> None:
    with pytest.raises(errors.BadFrame, match="are not a part of the chief's log"):
        LogPart.decode(data)
