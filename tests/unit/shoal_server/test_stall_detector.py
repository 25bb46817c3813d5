"""What waits too long for its peer is ended; what moves, or has moved, is not."""

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
def stalls(clock: FakeClock) -> StallDetector:
    return StallDetector(30.0, clock)


def test_only_stalled_waits_are_ended(stalls: StallDetector, clock: FakeClock) -> None:
    ended = []
    with stalls.waiting(lambda: ended.append("old")):
        clock.now += 20
        with stalls.waiting(lambda: ended.append("young")):
            assert stalls.end() == 0
            clock.now += 10
            assert stalls.end() == 1
        assert ended == ["old"]
    clock.now += 100
    assert stalls.end() == 0


def test_each_wait_has_its_own_deadline(stalls: StallDetector, clock: FakeClock) -> None:
    for _ in range(10):
        with stalls.waiting(pytest.fail):
            clock.now += 29
            assert stalls.end() == 0


def test_failed_wait_is_not_ended_later(stalls: StallDetector, clock: FakeClock) -> None:
    with pytest.raises(OSError), stalls.waiting(pytest.fail):
        raise OSError
    clock.now += 100
    assert stalls.end() == 0


def test_the_end_comes_from_another_thread(stalls: StallDetector, clock: FakeClock) -> None:
    begun, ended = threading.Event(), threading.Event()

    def waits() -> bool:
        with stalls.waiting(ended.set):
            begun.set()
            return ended.wait(20)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits)
        assert begun.wait(20)
        clock.now += 31
        assert stalls.end() == 1
        assert waiting.result(20)
    assert stalls.end() == 0
