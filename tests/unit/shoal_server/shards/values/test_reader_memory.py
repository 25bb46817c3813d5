"""Reader memory: what counts, what is refused, and which readers are ended for others."""

from collections.abc import Callable

import pytest

from shoal import errors
from shoal_server.shards.values.reader_memory import ReaderHold, ReaderMemory, ValueReader


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(clock: Clock) -> ReaderMemory:
    return ReaderMemory(100, clock)


def take(
    memory: ReaderMemory,
    version: str,
    caller: str = "a",
    end: Callable[[], object] = bool,
    nbytes: int = 20,
    whole: int = 20,
) -> ReaderHold:
    return memory.take(version, nbytes, whole, ValueReader(caller, end))


def check_refused(
    memory: ReaderMemory, version: str, caller: str, limit: str, nbytes: int = 20, whole: int = 20
) -> None:
    with pytest.raises(errors.Overloaded) as raised:
        take(memory, version, caller, nbytes=nbytes, whole=whole)
    assert raised.value.details["limit"] == limit
    memory.end_slow()


def test_readers_of_one_version_share_its_memory(memory: ReaderMemory) -> None:
    parts = [take(memory, "v0", nbytes=10, whole=24) for _ in range(3)]
    assert memory.nbytes == 24
    for part, left in zip(parts, (20, 10, 0), strict=True):
        memory.release(part)
        assert memory.nbytes == left


def test_a_caller_has_half_of_the_limit(memory: ReaderMemory) -> None:
    holds = [take(memory, version) for version in ("v0", "v1", "v1")]
    check_refused(memory, "v2", "a", "CALLER_READER_BYTES")
    holds += [take(memory, version, "b") for version in ("v2", "v3")]
    check_refused(memory, "v4", "c", "READER_BYTES", nbytes=21, whole=21)
    holds.append(take(memory, "v3", "c"))
    for hold in holds:
        memory.release(hold)
    assert memory.nbytes == 0


def test_values_that_are_larger_than_the_limit_are_read_one_version_at_a_time(memory: ReaderMemory) -> None:
    first, shared = (take(memory, "v0", caller, nbytes=500, whole=500) for caller in "ab")
    check_refused(memory, "v1", "c", "READER_BYTES", nbytes=500, whole=500)
    memory.release(first)
    memory.release(shared)
    take(memory, "v1", "c", nbytes=500, whole=500)


def test_only_slow_readers_are_ended_and_only_for_others(memory: ReaderMemory, clock: Clock) -> None:
    ended: list[str] = []
    slow, fast = take(memory, "v0", end=lambda: ended.append("slow")), None
    clock.now = 10.0
    slow.check()  # nobody needs its memory
    fast = take(memory, "v1", end=lambda: ended.append("fast"))
    check_refused(memory, "v2", "a", "CALLER_READER_BYTES")
    with pytest.raises(errors.Overloaded, match=r"too slowly.*CALLER_READER_BYTES"):
        slow.check()
    fast.check()
    assert ended == [], "it may still read its error"
    clock.now = 11.0
    check_refused(memory, "v2", "a", "CALLER_READER_BYTES")
    assert ended == ["slow"]
    memory.release(slow)
    take(memory, "v2")


def test_a_caller_at_its_limit_ends_no_reader_of_others(memory: ReaderMemory, clock: Clock) -> None:
    other = take(memory, "v0", "b")
    take(memory, "v0")
    take(memory, "v1")
    clock.now = 100.0
    check_refused(memory, "v2", "a", "CALLER_READER_BYTES")
    other.check()
