"""Questions where lock groups are, and the backoff between them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._training.failover import AttemptBackoff, EnteredPlacement, Locator
from shoal._wire import Placement
from shoal.v1 import tensor_pb2

KNOWN = Placement("job", 1, {}, ())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_calls_that_fail_together_ask_once() -> None:
    clock, asked, both = Clock(), [], threading.Barrier(3)

    def locate(known: Placement) -> Placement:
        asked.append(known)
        return known

    locator = Locator(locate, clock)
    clock.now = 2.0

    def ask() -> Placement | None:
        both.wait(10)
        return locator.ask(KNOWN, 1.0)[0]

    with ThreadPoolExecutor(3) as threads:
        answers = [each.result() for each in [threads.submit(ask) for _ in range(3)]]
    assert answers == [KNOWN] * 3
    assert len(asked) == 1
    locator.ask(KNOWN, 2.5)
    assert len(asked) == 2, "a later failure needs a later answer"


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (errors.Unreachable("away"), False),
        (errors.DeadlineExceeded("slow"), False),
        (errors.NotPlaced("restarts"), True),
        (errors.UnknownJob("dropped"), True),
    ],
)
def test_no_answer_differs_from_no_placement(error: errors.ShoalError, gone: bool) -> None:
    def locate(_: Placement) -> Placement:
        raise error

    assert Locator(locate).ask(KNOWN, 0.0) == (None, gone)


class FakeCoordinator:
    """Answers with a placement of a generation."""

    jobs = SimpleNamespace(GetPlacement=None)

    def __init__(self, generation: int) -> None:
        self.placement = Placement("job", generation, {}, ())

    def call(self, *_: Any, **__: Any) -> tensor_pb2.Placement:
        return tensor_pb2.Placement.FromString(self.placement.encoded)


def test_a_worker_does_not_follow_its_job_to_a_later_generation() -> None:
    coordinator: Any = FakeCoordinator(1)
    entered = EnteredPlacement(coordinator, "job")
    entered.generation = 1
    assert entered.refresh() == KNOWN
    assert entered.locate(KNOWN) == KNOWN
    coordinator.placement = Placement("job", 2, {}, ())
    with pytest.raises(errors.StaleGeneration, match="as generation 2, which has ended the part of this worker"):
        entered.refresh()
    with pytest.raises(errors.NotPlaced, match="enter the job again"):
        entered.locate(KNOWN)


def test_without_a_coordinator_nothing_moves() -> None:
    assert Locator(None).ask(KNOWN, 0.0) == (None, False)


@given(jitter=st.floats(0, 0.999), lost_s=st.floats(0, 30))
def test_pauses_are_short_while_a_backup_is_promoted(jitter: float, lost_s: float) -> None:
    backoff = AttemptBackoff(0.0, lambda: jitter)
    for _ in range(20):
        assert 0 < backoff.next(lost_s, moves=True) <= max(0.2, min(0.15 * lost_s, 1.0))
    assert backoff.next(lost_s, moves=True) >= 0.15, "many workers do not ask all the time"


@given(jitter=st.floats(0, 0.999))
def test_a_loss_of_a_second_causes_few_questions(jitter: float) -> None:
    backoff, now, questions = AttemptBackoff(0.0, lambda: jitter), 0.0, 0
    while now < 1.0:
        now += backoff.next(now, moves=True)
        questions += 1
    assert questions <= 10
    while now < 10.0:
        now += backoff.next(now, moves=True)
        questions += 1
    assert questions <= 35


def test_a_server_that_may_answer_again_is_asked_as_before() -> None:
    backoff = AttemptBackoff(0.0, lambda: 0.0)
    assert [backoff.next(0.0, moves=False) for _ in range(8)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
