"""Stall detector: it ends transfers that wait too long for the peer, and no others."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal_server.stall_detector import StallDetector


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def detector(clock: FakeClock) -> StallDetector:
    return StallDetector(30.0, clock)


def test_only_stalled_waits_are_ended(detector: StallDetector, clock: FakeClock) -> None:
    ended = []
    with detector.waiting(lambda: ended.append("old")):
        clock.now += 20
        with detector.waiting(lambda: ended.append("young")):
            assert detector.end() == 0
            clock.now += 10
            assert detector.end() == 1
        assert ended == ["old"]
    clock.now += 100
    assert detector.end() == 0


def test_each_wait_has_its_own_deadline(detector: StallDetector, clock: FakeClock) -> None:
    for _ in range(10):
        with detector.waiting(pytest.fail):
            clock.now += 29
            assert detector.end() == 0


def test_failed_wait_is_not_ended_later(detector: StallDetector, clock: FakeClock) -> None:
    with pytest.raises(OSError), detector.waiting(pytest.fail):
        raise OSError
    clock.now += 100
    assert detector.end() == 0


def test_the_end_comes_from_another_thread(detector: StallDetector, clock: FakeClock) -> None:
    begun, ended = threading.Event(), threading.Event()

    def waits() -> bool:
        with detector.waiting(ended.set):
            begun.set()
            return ended.wait(20)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits)
        assert begun.wait(20)
        clock.now += 31
        assert detector.end() == 1
        assert waiting.result(20)
    assert detector.end() == 0
