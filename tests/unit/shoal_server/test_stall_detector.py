"""What waits too long for its peer is ended; what moves, or has moved, is not."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal_server.stall_detector import StallDetector


class WorkerClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return WorkerClock()


@pytest.fixture
def stalls(clock):
    return StallDetector(30.0, clock)


def test_only_what_waits_too_long_is_ended(stalls, clock):
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


def test_each_move_begins_anew(stalls, clock):
    for _ in range(10):
        with stalls.waiting(pytest.fail):
            clock.now += 29
            assert stalls.end() == 0


def test_who_fails_while_it_waits_is_forgotten(stalls, clock):
    with pytest.raises(OSError), stalls.waiting(pytest.fail):
        raise OSError
    clock.now += 100
    assert stalls.end() == 0


def test_the_end_comes_from_another_thread(stalls, clock):
    begun, ended = threading.Event(), threading.Event()

    def waits():
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
