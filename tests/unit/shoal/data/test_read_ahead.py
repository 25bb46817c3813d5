"""Read-ahead in a thread: it keeps the order and its limit, raises errors at their place, and ends its thread."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.data._reading.prefetcher import Prefetcher
from support import waiting


def readers() -> list[Any]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    waiting.wait_until(lambda: not readers(), what="the end of all threads that read")


def test_items_keep_their_order_and_the_thread_ends_after_the_last() -> None:
    with Prefetcher(iter(range(100)), 3) as ahead:
        assert list(ahead) == list(range(100))
        assert not readers()
        assert list(ahead) == []


def test_reader_reads_ahead_up_to_its_limit() -> None:
    read = []
    changed = threading.Condition()

    def items() -> Iterator[int]:
        for number in range(9):
            with changed:
                read.append(number)
                changed.notify_all()
            yield number

    def reads(count: int) -> bool:
        with changed:
            return changed.wait_for(lambda: len(read) >= count, 20)

    with Prefetcher(items(), 2) as ahead:
        for taken in range(1, 7):
            assert next(ahead) == taken - 1
            assert reads(taken + 2), "nothing is read while the taker computes"
            assert len(read) == taken + 2
    assert len(read) <= 8 + 1


def test_error_is_raised_in_its_place_and_ends_the_items() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise SystemExit(3)

    ahead = Prefetcher(items(), 9)
    assert (next(ahead), next(ahead)) == (1, 2)
    with pytest.raises(SystemExit, match="3"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_closing_ends_the_iterator_on_its_own_thread() -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            while True:
                yield threading.get_ident()
        finally:
            closed.append(threading.get_ident())

    with Prefetcher(items(), 1) as ahead:
        home = next(ahead)
    assert closed == [home] != [threading.get_ident()]
    with pytest.raises(StopIteration):
        next(ahead)


def test_preparation_runs_on_the_reading_thread_and_may_fail() -> None:
    where = []
    with Prefetcher(iter([1]), 1, prepare=lambda: where.append(threading.current_thread().name)) as ahead:
        assert list(ahead) == [1]
    assert where == ["read-ahead"]

    def fail() -> None:
        raise OSError("no device")

    with Prefetcher(iter([1]), 1, prepare=fail) as ahead, pytest.raises(OSError, match="no device"):
        next(ahead)
