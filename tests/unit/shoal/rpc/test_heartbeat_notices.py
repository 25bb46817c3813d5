"""Log lines of a member about heartbeats that fail, by a fake clock."""

from shoal import errors
from shoal._rpc.heartbeat_notices import REMINDER_S, SILENCE_S, HeartbeatNotices, Notice

SILENT, REFUSED = errors.Unreachable("gone"), errors.DuplicateMember("it lives")


def test_failures_in_a_row_give_one_notice_and_then_reminders() -> None:
    notices, ticks = HeartbeatNotices(), range(250)
    said = {0.1 * tick: notices.failed(SILENT, 0.1 * tick) for tick in ticks}
    assert [(now, notice) for now, notice in said.items() if notice] == [
        (SILENCE_S, Notice("the coordinator does not answer; trying again", SILENCE_S)),
        (SILENCE_S + REMINDER_S, Notice("the coordinator still does not answer; trying again", 12.0)),
        (SILENCE_S + 2 * REMINDER_S, Notice("the coordinator still does not answer; trying again", 22.0)),
    ]
    assert notices.answered(26.04) == Notice("the coordinator answers again", 26.0)


def test_answers_give_no_notice_unless_a_heartbeat_failed_before() -> None:
    notices = HeartbeatNotices()
    assert notices.answered(1.0) is None
    assert notices.failed(REFUSED, 2.0)
    assert notices.answered(3.0)
    assert notices.answered(4.0) is None


def test_a_short_silence_gives_no_notice() -> None:
    notices = HeartbeatNotices()
    assert notices.failed(SILENT, 1.0) is None
    assert notices.failed(SILENT, 2.9) is None
    assert notices.answered(3.0) is None


def test_the_next_outage_is_a_new_one() -> None:
    notices = HeartbeatNotices()
    for start in (0.0, 4.0):
        assert notices.failed(SILENT, start) is None
        assert notices.failed(SILENT, start + 2.5) == Notice("the coordinator does not answer; trying again", 2.5)
        assert notices.answered(start + 3.0) == Notice("the coordinator answers again", 3.0)


def test_a_coordinator_that_returns_and_refuses_is_another_failure() -> None:
    notices = HeartbeatNotices()
    notices.failed(SILENT, 0.0)
    assert notices.failed(REFUSED, 4.0) == Notice("the coordinator refuses heartbeats; trying again", 4.0)
    assert notices.failed(REFUSED, 5.0) is None
    assert notices.failed(REFUSED, 14.0) == Notice("the coordinator still refuses heartbeats; trying again", 14.0)
    assert notices.answered(15.0) == Notice("the coordinator accepts heartbeats again", 15.0)
