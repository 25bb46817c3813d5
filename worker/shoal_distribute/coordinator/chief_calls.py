"""Calls of the chief: it gives them to workers, and runs none itself."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal import errors
from shoal._system.waits import wait_notice
from shoal._transport import Security
from shoal_distribute.coordinator.execution import Await, CallScheduler
from shoal_distribute.coordinator.outcomes import ScheduledOutcome
from shoal_distribute.coordinator.scheduled_calls import ScheduledCall, ScheduledCalls
from shoal_distribute.coordinator.worker_link import ChiefState, WorkerLink

# Seconds that the chief waits at the end for a worker that is being started, perhaps again.
LINGER_S = 15.0
# Seconds between two looks whether it has waited long enough.
LOOK_S = 0.5
_RUN_BYTES = 16


class ChiefCalls(CallScheduler):
    """The calls of the chief.

    Args:
        addresses: host:port of each worker.
        security: protects the connections to them.
        max_calls: calls from the first unfinished one to the last one; `schedule` waits when there are that many.
        kept_bytes: bytes of outcomes that are kept for workers that ask later.
    """

    def __init__(self, addresses: Sequence[str], security: Security, *, max_calls: int, kept_bytes: int) -> None:
        self._state = ChiefState(ScheduledCalls(max_calls, kept_bytes), secrets.token_bytes(_RUN_BYTES))
        self._workers = [WorkerLink(number, address, security, self._state) for number, address in enumerate(addresses)]

    def schedule(self, name: str, function: Callable[[], Any]) -> Await:
        del function  # the workers have it
        calls, state = self._state.calls, self._state
        with state.changed:
            self._wait(lambda: calls.accepts)
            try:
                call = calls.schedule(name)
            finally:
                state.changed.notify_all()
        return lambda: self._outcome(call)

    def join(self) -> None:
        calls, state = self._state.calls, self._state
        with state.changed:
            self._wait(lambda: calls.idle)
            try:
                calls.join()
            finally:
                state.changed.notify_all()

    def done(self) -> bool:
        with self._state.changed:
            self._wait(lambda: True)
            try:
                return self._state.calls.done()
            finally:
                self._state.changed.notify_all()

    def close(self, *, failed: bool = False) -> None:
        """Leaves. If the script has ended without an exception, the workers first end their scripts, too.

        Args:
            failed: whether the script ends with an exception.
        """
        state = self._state
        with state.changed:
            state.calls.log.over = not failed
            state.changed.notify_all()
            if not (failed or state.failure or state.closing.is_set()):
                with wait_notice("the chief", lambda: f"for the scripts of {self._busy()} to end"):
                    while self._busy() and not state.failure:
                        state.changed.wait(LOOK_S)
            state.closing.set()
            state.changed.notify_all()
        for link in self._workers:
            link.join()

    def _outcome(self, call: ScheduledCall) -> ScheduledOutcome:
        with self._state.changed:
            if call.outcome is None:
                self._wait(lambda: call.outcome is not None)
        assert call.outcome
        return call.outcome

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Waits, with the lock. If it takes long, a line on the console says what for."""
        state = self._state
        if not state.failure and not ready():
            with wait_notice("the chief", self._waits_for):
                state.changed.wait_for(lambda: state.failure or state.closing.is_set() or ready())
        if state.failure:
            raise state.failure
        if state.closing.is_set():
            raise errors.WrongContext("this ClusterCoordinator is closed")

    def _waits_for(self) -> str:
        absent = [f"{it}: {it.problem}" for it in self._workers if not it.connected]
        missing = f"; {len(absent)} workers are missing, such as {absent[0]}" if absent else ""
        return self._state.calls.waits_for() + missing

    def _busy(self) -> str:
        """Returns the names of workers whose scripts have not ended; empty if there are none."""
        now = time.monotonic()
        busy = [link for link in self._workers if link.connected or (not link.left and now - link.lost_at < LINGER_S)]
        return ", ".join(map(str, busy[:3])) + (f" and {len(busy) - 3} others" if busy[3:] else "")


__all__ = ["LINGER_S", "LOOK_S", "ChiefCalls"]
