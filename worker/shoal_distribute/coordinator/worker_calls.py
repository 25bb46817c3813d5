"""Calls of a worker: it runs those that the chief gives it, and its script goes through the operations of the chief's.

The main thread runs the script. It never gets ahead of the chief's script: an operation waits until the chief's script
has ended the same one, and then ends in the same way. Another thread runs the calls.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition
from typing import Any

from shoal import errors
from shoal._system.waits import wait_notice
from shoal._transport import Security
from shoal_distribute.coordinator.chief_link import ChiefLink, listen
from shoal_distribute.coordinator.execution import Await, CallScheduler, Scope, execute
from shoal_distribute.coordinator.messages import CallFrame, CallOrder, LinkHello, encode_index, encode_outcome
from shoal_distribute.coordinator.operation_log import LogPart, OperationEnd, OperationEvent, OperationLog
from shoal_distribute.coordinator.outcomes import ScheduledOutcome
from shoal_distribute.threads import start_thread

# Seconds to wait for the chief: at the start, as groups of ranks do, and after the connection has ended.
START_S, GONE_S = 600.0, 20.0
# Seconds until the end of this worker has been sent.
_LEAVE_S = 2.0


@dataclass(slots=True)
class _WantedOutcome:
    """A call whose outcome this process waits for.

    Attributes:
        outcome: what the chief has answered.
        waiting: number of threads that wait.
    """

    outcome: ScheduledOutcome | None = None
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class _OwnCall:
    """A call of this process's script."""

    name: str
    operation: int
    function: Callable[[], Any]


class WorkerCalls(CallScheduler):
    """The calls of a worker.

    Args:
        number: number of this worker.
        listening: a bound socket that listens at its address.
        security: protects the connections with the chief.
        scope: enters the scope of the strategy.
    """

    def __init__(self, number: int, listening: socket.socket, security: Security, scope: Scope) -> None:
        self._number, self._scope = number, scope
        self._name = f"worker {number} ({socket.gethostname()})"
        self._changed = Condition()  # guards what follows
        self._log = OperationLog()  # the chief's
        self._operation = self._scheduled = 0  # of this process's script
        self._own: dict[int, _OwnCall] = {}  # unfinished calls that the script has scheduled
        self._dropped = 0  # calls below this number are not in `_own`
        self._ready = False  # whether the script has come to calls that are not finished
        self._asked: dict[int, _WantedOutcome] = {}
        self._run: bytes | None = None  # of the chief that this process belongs to
        self._link: ChiefLink | None = None
        self._patient_until = time.monotonic() + START_S
        self._order: tuple[ChiefLink, CallOrder] | None = None
        self._failure: errors.ShoalError | None = None
        self._closing = False
        self._stop = listen(listening, self, security)
        self._executor = start_thread(self._execute_all, "scheduled calls")

    def schedule(self, name: str, function: Callable[[], Any]) -> Await:
        with self._changed:
            operation = self._operation
            self._end_operation()
            index = self._scheduled
            self._scheduled += 1
            if index >= self._log.finished:
                self._own[index] = _OwnCall(name, operation, function)
                if not self._ready and self._link:
                    self._link.reports.put((CallFrame.READY, []))
                self._ready = True
                self._changed.notify_all()
        return lambda: self._outcome(index)

    def join(self) -> None:
        with self._changed:
            self._end_operation()

    def done(self) -> bool:
        with self._changed:
            event = self._end_operation()
        return event is not None and event.end is OperationEnd.DONE

    def close(self, *, failed: bool = False) -> None:
        """Ends this worker's part. A call that still runs here is given to another worker.

        Args:
            failed: whether the script ends with an exception. Then the chief expects that it is started again.
        """
        with self._changed:
            self._closing = True
            if (link := self._link) and not failed:
                link.reports.put((CallFrame.END, []))
            if link and (not failed or self._failure):  # the end, or the failure, is on its way
                self._changed.wait_for(lambda: self._link is not link, _LEAVE_S)
            self._changed.notify_all()
        self._stop()

    # What the connections' threads call.

    def admit(self, hello: LinkHello) -> ChiefLink:
        """Returns the link that a connection of the chief belongs to.

        Raises:
            RanksDisagree: it is for another worker, or of another run of the chief's script; or this worker has ended.
        """
        with self._changed:
            if hello.worker != self._number:
                raise errors.RanksDisagree(
                    f"the chief takes {self._name} for worker {hello.worker}; check TF_CONFIG of both"
                )
            if refusal := self._refusal(hello.run):
                raise errors.RanksDisagree(refusal)
            self._run = hello.run
            if self._link is None or hello.link > self._link.number:
                if self._link:
                    self._link.close()
                self._link = ChiefLink(hello.link)
                if self._ready:
                    self._link.reports.put((CallFrame.READY, []))
                for index, asked in self._asked.items():
                    if asked.outcome is None:
                        self._link.reports.put((CallFrame.ASK, [encode_index(index)]))
                self._changed.notify_all()
            return self._link

    def _refusal(self, run: bytes) -> str:
        """Returns why a run of the chief's script cannot use this worker, with the lock; empty if it can."""
        if self._failure:
            return f"{self._name} has failed ({self._failure.message}); start it again"
        if self._closing:
            return f"{self._name} has ended its script, and leaves; start it again"
        if self._run not in (None, run):
            return f"{self._name} belongs to an earlier run of the chief; start it again"
        return ""

    def logged(self, part: LogPart) -> None:
        """Takes a part of the chief's log."""
        with self._changed:
            self._log.follow(part)
            for index in range(self._dropped, min(self._log.finished, self._scheduled)):
                self._own.pop(index, None)
            self._dropped = max(self._dropped, min(self._log.finished, self._scheduled))
            self._changed.notify_all()

    def ordered(self, link: ChiefLink, order: CallOrder) -> None:
        """Takes a call to run."""
        with self._changed:
            self._order = link, order
            self._changed.notify_all()

    def learned(self, index: int, outcome: ScheduledOutcome) -> None:
        """Takes the outcome of a call."""
        with self._changed:
            if asked := self._asked.get(index):
                asked.outcome = outcome
                self._changed.notify_all()

    def lost(self, link: ChiefLink, *, left: bool) -> None:
        """Handles the end of a link; `left` says whether the chief leaves."""
        with self._changed:
            if self._link is link:
                self._link = None
                self._patient_until = time.monotonic() + (0.0 if left else GONE_S)
                self._changed.notify_all()

    # The script's thread.

    def _end_operation(self) -> OperationEvent | None:
        """Ends the next operation as the chief's script has ended it, with the lock."""
        number = self._operation
        self._wait(lambda: self._log.operations > number or self._log.over, "for the chief's script")
        if self._log.operations <= number:
            raise self._fail(
                errors.RanksDisagree(
                    f"the script of the chief has ended after {self._log.operations:,} calls of schedule, join and "
                    f"done, but {self._name} makes another one; all tasks must run the same script"
                )
            )
        self._operation += 1
        event = self._log.end_of(number)
        if event and event.end is OperationEnd.RAISED and (error := self._outcome(event.call).error):
            raise error
        return event

    def _outcome(self, index: int) -> ScheduledOutcome:
        """Asks the chief how a call has ended, and waits."""
        with self._changed:
            if index not in self._asked and self._link:
                self._link.reports.put((CallFrame.ASK, [encode_index(index)]))
            asked = self._asked.setdefault(index, _WantedOutcome())
            asked.waiting += 1
            try:
                self._wait(lambda: asked.outcome is not None, f"for call {index}")
            finally:
                asked.waiting -= 1
                if not asked.waiting:
                    del self._asked[index]
            assert asked.outcome
            return asked.outcome

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Waits, with the lock, but not without a chief."""
        if self._failure is None and not ready():
            with wait_notice(self._name, lambda: what if self._link else f"{what}, which has not connected"):
                while not (self._failed() or ready()):
                    left = 1.0 if self._link else self._patient_until - time.monotonic()
                    if left <= 0:
                        raise self._fail(errors.Unreachable(self._without_chief()))
                    self._changed.wait(left)
        if self._failure:
            raise self._failure

    def _without_chief(self) -> str:
        """Returns why this worker gives up, with the lock."""
        if self._run is None:
            return (
                f"the chief has not connected with {self._name} within {START_S:.0f} s; it has not started yet, or "
                "cannot reach this worker. Start it, check TF_CONFIG of both, and start this worker again"
            )
        return (
            f"the chief does not connect with {self._name} again; it has ended or cannot be reached. Start all tasks "
            "again, from a checkpoint"
        )

    def _failed(self) -> errors.ShoalError | None:
        return self._failure

    def _fail(self, error: errors.ShoalError) -> errors.ShoalError:
        """Ends this worker's part, with the lock: the chief hears of an error that concerns the other tasks."""
        if self._failure is None:
            self._failure = error
            if self._link and isinstance(error, errors.RanksDisagree):
                self._link.reports.put(error)
            elif self._link:
                self._link.close()
            self._changed.notify_all()
        return self._failure

    # The thread that runs the calls.

    def _execute_all(self) -> None:
        while (found := self._next_order()) is not None:
            link, order, call = found
            try:
                outcome = execute(call.function, f"call {order.index} ({order.name})", self._name, self._scope)
            except errors.Fenced as error:
                with self._changed:
                    self._fail(error)
                return
            link.reports.put((CallFrame.RESULT, [*encode_outcome(order.attempt, outcome)]))

    def _next_order(self) -> tuple[ChiefLink, CallOrder, _OwnCall] | None:
        """Waits for a call that the script has scheduled, too. Returns None at the end."""
        with self._changed:
            while not (self._closing or self._failure):
                if self._order and self._order[0] is not self._link:
                    self._order = None  # the chief has given the call to another worker
                if self._order and self._order[1].index < self._scheduled:
                    (link, order), self._order = self._order, None
                    call = self._own.get(order.index)
                    if call and (call.name, call.operation) == (order.name, order.operation):
                        return link, order, call
                    self._fail(self._difference(order, call))
                else:
                    self._changed.wait()
        return None

    def _difference(self, order: CallOrder, call: _OwnCall | None) -> errors.RanksDisagree:
        own = f"{call.name} after {call.operation} others" if call else "no such call"
        return errors.RanksDisagree(
            f"the script of the chief schedules {order.name} as call {order.index} after {order.operation} operations, "
            f"and that of {self._name} {own}; all tasks must run the same script, and make the same calls of schedule, "
            "join and done"
        )


__all__ = ["GONE_S", "START_S", "WorkerCalls"]
