"""Pace of a member's heartbeats and reports, with a fake clock: which call is due when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal._rpc import HeartbeatPace

INTERVAL_S, TIMEOUT_S = 2.0, 6.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pace_of(clock: Clock, jitter: float = 0.5) -> HeartbeatPace:
    pace = HeartbeatPace(clock, lambda: jitter)
    pace.answered(clock.now, INTERVAL_S)
    return pace


@pytest.mark.parametrize("jitter", [0.0, 0.999])
def test_a_member_that_reports_when_it_may_sends_no_heartbeat(jitter: float) -> None:
    clock = Clock()
    pace = pace_of(clock, jitter)
    for _ in range(10):
        sent_at = pace.now
        assert pace.report_due_s == 0
        pace.reporting()
        clock.now += 0.1  # the coordinator answers
        assert pace.heartbeat_due_s > 0
        pace.answered(sent_at, INTERVAL_S)
        assert 0 < pace.report_due_s < pace.heartbeat_due_s <= INTERVAL_S
        clock.now += pace.report_due_s
        assert pace.heartbeat_due_s > 0.05 * INTERVAL_S, "there is time for an answer"


def test_a_report_without_an_answer_is_followed_by_a_heartbeat() -> None:
    clock = Clock()
    pace = pace_of(clock)
    clock.now += 1.8
    pace.reporting()
    clock.now += 0.2
    assert pace.heartbeat_due_s == 0


def test_the_interval_is_the_one_stated_last() -> None:
    clock = Clock()
    pace = pace_of(clock, 1.0)
    pace.answered(clock.now, 5.0)
    assert (pace.interval_s, pace.heartbeat_due_s) == (5.0, 5.0)
    pace.answered(clock.now, 0.0)
    assert pace.interval_s == 5.0, "the reply stated none"
    pace.answered(clock.now - 4.0, 5.0)
    assert pace.heartbeat_due_s == 5.0, "an older call was answered later"


@given(lost=st.sampled_from(["call", "answer"]), jitters=st.lists(st.floats(0.0, 0.999), min_size=8, max_size=8))
def test_with_one_call_lost_the_next_one_is_heard_within_the_timeout(lost: str, jitters: list[float]) -> None:
    """The interval is a third of the timeout, and so is the deadline of a heartbeat."""
    clock, drawn = Clock(), iter(jitters)
    pace = HeartbeatPace(clock, lambda: next(drawn))
    pace.answered(clock.now, INTERVAL_S)
    heard_at = clock.now
    clock.now += pace.heartbeat_due_s
    if lost == "answer":
        heard_at = clock.now
    clock.now += INTERVAL_S  # its deadline
    pace.unanswered()
    clock.now += pace.heartbeat_due_s
    assert clock.now - heard_at < TIMEOUT_S
