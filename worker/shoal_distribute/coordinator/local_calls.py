"""Calls of a process that has no workers: it runs each one itself, when the script schedules it."""

from collections.abc import Callable
from typing import Any

from shoal_distribute.coordinator.execution import Await, CallScheduler, Scope, execute
from shoal_distribute.coordinator.outcomes import OutcomeKind, ScheduledOutcome
from shoal_distribute.coordinator.scheduled_calls import ScheduledCalls

_SELF = 0


class LocalCalls(CallScheduler):
    """The calls of the only process. Errors are raised in the same places as in a cluster with workers.

    Args:
        scope: enters the scope of the strategy.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._calls = ScheduledCalls(max_calls=1, kept_bytes=0)  # a `RemoteValue` keeps its own outcome
        self._calls.enter(_SELF)

    def schedule(self, name: str, function: Callable[[], Any]) -> Await:
        call = self._calls.schedule(name)
        attempt = self._calls.take(_SELF)
        assert attempt, "the only process runs one call at a time"
        outcome = ScheduledOutcome.of_text(OutcomeKind.CANCELLED, f"{call} was interrupted")
        try:
            outcome = execute(function, str(call), "this process", self._scope)
        finally:
            self._calls.finish(_SELF, attempt.number, outcome)
        return lambda: outcome

    def join(self) -> None:
        self._calls.join()

    def done(self) -> bool:
        return self._calls.done()

    def close(self, *, failed: bool = False) -> None:
        """Does nothing."""


__all__ = ["LocalCalls"]
