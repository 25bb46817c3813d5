"""Pool of threads for calls: it reports how many threads are busy and how many calls wait."""

import threading

import pytest

from shoal_server.pools import CallPool
from support.waiting import wait_until


def test_pool_counts_busy_and_queued_calls() -> None:
    gate = threading.Event()
    with CallPool(2, "calls") as pool:
        assert (pool.threads, pool.busy, pool.queued) == (2, 0, 0)
        calls = [pool.submit(gate.wait, 20) for _ in range(5)]
        assert (pool.busy, pool.queued) == (2, 3)
        gate.set()
        assert all(call.result(20) for call in calls)
        wait_until(lambda: (pool.busy, pool.queued) == (0, 0), what="the end of all calls")


def test_failed_or_cancelled_call_is_not_counted() -> None:
    gate = threading.Event()
    with CallPool(1, "calls") as pool:
        running, waiting = pool.submit(gate.wait, 20), pool.submit(int)
        assert waiting.cancel()
        wait_until(lambda: pool.queued == 0, what="the end of the cancelled call")
        gate.set()
        assert running.result(20)
        failing = pool.submit(int, "no number")
        with pytest.raises(ValueError, match="no number"):
            failing.result(20)
        wait_until(lambda: pool.busy == 0, what="the end of the one that failed")
