"""Calls that are repeated while a primary waits for its backup, and those that are not."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from shoal import errors
from shoal._security import NO_CREDENTIALS
from shoal._training import repeated_calls
from shoal._training.failover import Locator
from shoal._training.repeated_calls import RepeatedCalls

RETRY_FOR_S = 30.0


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(repeated_calls, "time", clock)
    return clock


def calls(clock: Clock, locate: Callable[[Any], Any]) -> RepeatedCalls:
    placement = SimpleNamespace(job="m", generation=1)
    connections: Any = SimpleNamespace(replicated=False, is_regrouped=False, placement=placement, move=lambda _: None)
    locator = Locator(locate, clock.monotonic)
    given: dict[str, Any] = {"on_retry": lambda: None, "credentials": NO_CREDENTIALS, "reads_only": False}
    return RepeatedCalls(connections, locator, retry_for_s=RETRY_FOR_S, **given)


def refused(clock: Clock, after_s: float, times: int) -> Callable[[], str]:
    """A call that the server refuses so many times, each time after a wait."""
    left = iter(range(times))

    def call() -> str:
        clock.now += after_s
        if next(left, None) is None:
            return "done"
        raise errors.Moved("the backup has not confirmed the call")

    return call


CONNECTION: Any = SimpleNamespace(moves=0, address="host:1")


def away(_: Any) -> Any:
    raise errors.Unreachable("the coordinator is away")


def test_a_call_is_repeated_while_the_coordinator_says_that_its_server_is_the_primary(clock: Clock) -> None:
    assert calls(clock, lambda it: it).retrying(CONNECTION, refused(clock, 30.0, times=20)) == "done"


@pytest.mark.parametrize(("locate", "after_s"), [(away, 30.0), (lambda it: it, 0.01)], ids=["away", "at once"])
def test_a_call_fails_after_a_while(clock: Clock, locate: Callable[[Any], Any], after_s: float) -> None:
    begin = clock.now
    with pytest.raises(errors.Unreachable, match="at host:1 did not answer within 30 s"):
        calls(clock, locate).retrying(CONNECTION, refused(clock, after_s, times=10_000))
    assert clock.now - begin < 3 * RETRY_FOR_S
