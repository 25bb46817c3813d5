"""Notices about long waits: when they are due, and what their lines say."""

import logging
import threading

import pytest

from shoal import errors
from shoal._system.waits import Wait, WaitNotices, WaitWatch, wait_notice
from support.waiting import wait_until


def test_a_wait_is_told_after_two_seconds_and_then_at_growing_intervals() -> None:
    notices, wait = WaitNotices(), Wait("pull", 10.0)
    told_at = [tick / 4 for tick in range(40, 1200) if notices.due(wait, tick / 4)]
    assert [at - 10.0 for at in told_at] == [2, 6, 14, 30, 62, 122, 182, 242]


def test_the_end_of_a_told_wait_is_told_once() -> None:
    notices, wait, other = WaitNotices(), Wait("pull", 10.0), Wait("pull", 20.0)
    assert not notices.due(wait, 11.9)
    assert notices.ended(None) is None, "nobody knows that it waited"
    assert notices.due(wait, 12.0)
    assert notices.ended(wait) is None
    assert notices.ended(other) == wait
    assert notices.ended(other) is None
    assert not notices.due(other, 21.0)
    assert notices.due(other, 22.0)


def test_lines_say_what_waits_for_what_and_since_when(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    current: Wait | None = Wait("pull of step 3", 100.0)
    watch = WaitWatch(lambda: current, lambda: "for rank 1", clock=lambda: now)
    watch.look()
    assert caplog.messages == []
    now = 102.5
    watch.look()
    [line] = caplog.messages
    assert line.startswith("pull of step 3 waits for rank 1, since ")
    assert line.endswith(" (2 s)")
    assert (caplog.records[0].name, caplog.records[0].levelno) == ("shoal", logging.WARNING)
    now, current = 104.0, None
    watch.look()
    assert caplog.messages[1:] == ["pull of step 3 has waited 4 s, and goes on"]


def test_a_detail_that_cannot_be_had_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def detail() -> str:
        raise OSError

    WaitWatch(lambda: Wait("pull", 0.0), detail, clock=lambda: 5.0).look()
    assert caplog.messages[0].startswith("pull waits, since ")


def test_a_wait_that_ends_while_its_detail_is_fetched_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    current: list[Wait | None] = [Wait("pull", 0.0)]

    def detail() -> str:
        current[0] = None
        return ""

    WaitWatch(lambda: current[0], detail, clock=lambda: 5.0).look()
    assert caplog.messages == []


def test_a_block_that_waits_is_told_from_a_thread(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal._system.waits.NOTICE_AFTER_S", 0.0)
    with wait_notice("the start", lambda: "for server-0"):
        wait_until(lambda: caplog.messages)
    assert caplog.messages[0].startswith("the start waits for server-0, since ")
    assert caplog.messages[1].endswith(" s, and goes on")
    caplog.clear()

    def fail() -> None:
        with wait_notice("the start", lambda: "for server-0"):
            wait_until(lambda: caplog.messages)
            raise errors.Unreachable("server-0 did not answer")

    with pytest.raises(errors.Unreachable):
        fail()
    assert len(caplog.messages) == 1, "an error does not go on"
    assert not any(thread.name == "wait-notices" for thread in threading.enumerate())
