"""The one limit of the event logs of all jobs."""

from functools import partial

import pytest

from shoal.events import EvaluationEnded, LogLine, StateChanged
from shoal.status import Evaluation, JobState
from shoal_coordinator.job.event_log import EventLog
from shoal_coordinator.job.log_budget import LogBudget

NOW = 1_000.0


def write(log: EventLog, lines: int) -> None:
    for _ in range(lines):
        log.append(LogLine(log.next, NOW, "w0", "x" * 100))
        log.validate()


def evaluate(log: EventLog, count: int) -> None:
    for number in range(count):
        log.append(EvaluationEnded(log.next, NOW, "w0", Evaluation(number, 10, {"auc": 0.5}), True))
        log.validate()


def counted(budget: LogBudget, *removed: list[int]) -> list[EventLog]:
    """Logs of a budget, each with a list of the records that it changes."""
    logs = [EventLog(records.append) for records in removed]
    for log in logs:
        log.appended = partial(budget.count, log)
    return logs


def test_many_jobs_that_log_take_no_more_than_the_limit() -> None:
    budget = LogBudget(50_000)
    logs = counted(budget, *([] for _ in range(20)))
    for log in logs:
        log.append(StateChanged(log.next, NOW, JobState.RUNNING, ""))
    for _ in range(10):
        for log in logs:
            write(log, 5)
            assert budget.nbytes <= 50_000
    kept = [len(log.after(0)) for log in logs]
    assert min(kept) >= 2, "each has its state, and a line"
    assert max(kept) <= 8
    assert all(log.after(0)[-1].sequence == log.last for log in logs), "the newest stay"


def test_the_largest_log_loses_its_oldest_events() -> None:
    budget = LogBudget(30_000)
    quiet, loud = counted(budget, [], [])
    write(quiet, 5)
    write(loud, 500)
    assert [event.sequence for event in quiet.after(0)] == [1, 2, 3, 4, 5]
    assert 20 < len(loud.after(0)) < 50
    assert loud.after(0)[-1].sequence == 500
    budget.forget(loud)
    assert budget.nbytes == quiet.other_bytes
    budget.forget(quiet)
    budget.forget(quiet)
    assert budget.nbytes == 0


def test_stored_events_go_last_and_the_newest_stays() -> None:
    evaluated: list[int] = []
    budget = LogBudget(8_000)
    job, other = counted(budget, evaluated, [])
    write(other, 5)
    evaluate(job, 10)
    assert len(list(job.kept)) == 10
    assert len(other.after(0)) < 5
    evaluated.clear()
    evaluate(job, 20)
    assert budget.nbytes <= 8_000
    assert [*job.kept][-1] == 30
    assert other.after(0) == []
    assert set(evaluated) >= {1, 2, 3}, "the records of dropped events go"
    none = LogBudget(0)
    [log] = counted(none, [])
    evaluate(log, 3)
    write(log, 3)
    assert [event.sequence for event in log.after(0)] == [3]
    assert none.nbytes == 0


@pytest.mark.parametrize("size", [0, 1])
def test_a_restored_log_is_counted(size: int) -> None:
    first = EventLog()
    evaluate(first, 1 + size)
    restored = EventLog()
    restored.restore([event for event in first.after(0) if isinstance(event, EvaluationEnded)], first.last)
    budget = LogBudget(1 << 20)
    budget.count(restored)
    assert (budget.nbytes > 0) == bool(size), "the newest does not count"
