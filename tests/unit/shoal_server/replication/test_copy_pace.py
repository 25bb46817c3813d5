"""Pace of copies: never more bytes than the bound allows, with a fake clock."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_server.replication.copy_pace import CopyPace, TokenBucket


def test_bytes_are_sent_at_the_rate_after_a_burst() -> None:
    bucket = TokenBucket(100.0, burst_s=0.5)
    assert bucket.take(50, now=10.0) == 0.0
    assert bucket.take(100, now=10.0) == 0.0
    assert bucket.take(100, now=10.0) == pytest.approx(1.0)
    assert bucket.take(100, now=10.5) == pytest.approx(1.5)
    assert bucket.take(1, now=100.0) == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 500)), min_size=1))
def test_no_period_has_more_bytes_than_the_rate_and_a_burst(calls: list[tuple[float, int]]) -> None:
    bucket, now = TokenBucket(100.0, burst_s=0.5), 0.0
    sent: list[tuple[float, int]] = []
    for pause, nbytes in calls:
        now += pause
        now += bucket.take(nbytes, now)
        sent.append((now, nbytes))
    for first, (begin, _) in enumerate(sent):
        for last in range(first, len(sent)):
            # Each piece is sent when those before it are paid for, so the last one is not counted.
            between = sum(nbytes for _, nbytes in sent[first:last])
            assert between <= 100.0 * (sent[last][0] - begin + 0.5) + 1e-6


def test_the_end_of_a_copy_ends_its_wait() -> None:
    pace, ended = CopyPace(1, clock=lambda: 0.0), threading.Event()
    pace.wait(1_000_000, ended)
    ended.set()
    pace.wait(1, ended)  # would take days


def test_no_bound_needs_no_wait() -> None:
    CopyPace(0).wait(1 << 40, threading.Event())
