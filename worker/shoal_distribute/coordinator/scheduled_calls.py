"""Scheduled calls: the chief's state machine, which knows each call, who runs it, and how it ended. No clock, no I/O.

A call is given to one worker at a time, the lowest number first. If its worker is lost, another one gets it. Each time
that a worker gets it is an attempt, with a number of its own. A result counts only if it is that of the call's current
attempt, so each call has exactly one outcome, however many workers have run it.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from shoal_distribute.coordinator.operation_log import OperationEnd, OperationLog
from shoal_distribute.coordinator.outcomes import OutcomeKind, ScheduledOutcome

# Workers that may be lost while they run one call. Then the call itself is taken for the cause.
MAX_LOST = 10
# What a kept outcome takes beside its payload.
_OVERHEAD_BYTES = 200
# Bytes of the text of an error that is kept for as long as the log names it.
_KEPT_TEXT = 4 << 10


@dataclass(slots=True)
class ScheduledCall:
    """One call of `schedule`.

    Attributes:
        index: its number, from 0.
        operation: number of the operation that scheduled it.
        name: name of the function.
        lost: how many workers were lost while they ran it.
        outcome: how it ended; None while it waits or runs.
    """

    index: int
    operation: int
    name: str
    lost: int = 0
    outcome: ScheduledOutcome | None = None

    def __str__(self) -> str:
        return f"call {self.index} ({self.name})"


@dataclass(frozen=True, slots=True)
class CallAttempt:
    """A call that a worker runs.

    Attributes:
        number: number of the attempt, among those of all calls.
        call: the call.
    """

    number: int
    call: ScheduledCall


@dataclass
class ScheduledCalls:
    """The calls of one chief.

    Args:
        max_calls: calls from the first unfinished one to the last one.
        kept_bytes: bytes of outcomes that are kept for tasks that ask later.
    """

    max_calls: int
    kept_bytes: int
    log: OperationLog = field(default_factory=OperationLog, init=False)
    _scheduled: int = field(default=0, init=False)
    _attempts: int = field(default=0, init=False)
    _queue: list[int] = field(default_factory=list, init=False)  # a heap of the calls that wait for a worker
    _unfinished: dict[int, ScheduledCall] = field(default_factory=dict, init=False)  # in the order of their numbers
    _running: dict[int, CallAttempt | None] = field(default_factory=dict, init=False)  # by worker
    _kept: OrderedDict[int, ScheduledOutcome] = field(default_factory=OrderedDict, init=False)  # the oldest first
    _raised: dict[int, ScheduledOutcome] = field(default_factory=dict, init=False)  # errors that the log names
    _kept_now: int = field(default=0, init=False)  # bytes
    _failed: ScheduledCall | None = field(default=None, init=False)  # whose error the script has not seen yet

    @property
    def accepts(self) -> bool:
        """Whether `schedule` need not wait: there is room, or an error to raise."""
        return self._failed is not None or self._scheduled - self.log.finished < self.max_calls

    @property
    def idle(self) -> bool:
        """Whether all calls have an outcome."""
        return not self._unfinished

    def schedule(self, name: str) -> ScheduledCall:
        """Adds a call. The caller has waited until `accepts`.

        Args:
            name: name of its function.

        Raises:
            ProgramError: an earlier call has failed.
        """
        operation = self.log.operations
        self._end_operation()
        call = ScheduledCall(self._scheduled, operation, name)
        self._scheduled += 1
        self._unfinished[call.index] = call
        heapq.heappush(self._queue, call.index)
        return call

    def join(self) -> None:
        """Ends a join. The caller has waited until `idle`.

        Raises:
            ProgramError: a call has failed.
        """
        self._end_operation()

    def done(self) -> bool:
        """Returns whether all calls have an outcome.

        Raises:
            ProgramError: a call has failed.
        """
        idle = self.idle
        self._end_operation(OperationEnd.DONE if idle else None)
        return idle

    def enter(self, worker: int) -> None:
        """Adds a worker that runs nothing. It replaces one of the same number, which then counts as lost."""
        self.lose(worker)
        self._running[worker] = None

    def take(self, worker: int) -> CallAttempt | None:
        """Returns the next call for a worker, and counts it as running there; None if there is none for it now."""
        if not self.has_call_for(worker):
            return None
        self._attempts += 1
        attempt = CallAttempt(self._attempts, self._unfinished[heapq.heappop(self._queue)])
        self._running[worker] = attempt
        return attempt

    def has_call_for(self, worker: int) -> bool:
        """Returns whether a worker is free and a call waits."""
        return bool(self._queue) and worker in self._running and self._running[worker] is None

    def finish(self, worker: int, attempt: int, outcome: ScheduledOutcome) -> bool:
        """Records how an attempt ended.

        Args:
            worker: the worker that ran it.
            attempt: number of the attempt.
            outcome: how it ended.

        Returns:
            Whether it counts. It does not if the worker was declared lost meanwhile.
        """
        running = self._running.get(worker)
        if running is None or running.number != attempt:
            return False
        self._running[worker] = None
        self._end(running.call, outcome)
        return True

    def lose(self, worker: int) -> None:
        """Removes a worker. The call that it ran waits for another one."""
        running = self._running.pop(worker, None)
        if running is None:
            return
        call = running.call
        call.lost += 1
        if self._failed:
            self._cancel(call)
        elif call.lost >= MAX_LOST:
            text = f"{call} was lost with its worker {call.lost} times; it may end the process that runs it"
            self._end(call, ScheduledOutcome.of_text(OutcomeKind.ERROR, text))
        else:
            heapq.heappush(self._queue, call.index)

    def outcome(self, index: int) -> ScheduledOutcome | None:
        """Returns how a call ended; None if it has not ended yet, or is not known yet."""
        if index in self._unfinished or index >= self._scheduled:
            return None
        if found := self._kept.get(index) or self._raised.get(index):
            return found
        return ScheduledOutcome.of_text(
            OutcomeKind.DROPPED,
            f"the chief has dropped the result of call {index}, because it keeps only {self.kept_bytes:,} bytes of "
            "them, and this task asks too late; give ClusterCoordinator a larger kept_bytes, return less from the "
            "functions, or start all tasks again from a checkpoint",
        )

    def waits_for(self) -> str:
        """Returns what a join waits for, as text."""
        running = [f"{it.call} on worker {worker}" for worker, it in sorted(self._running.items()) if it]
        more = f", and {len(self._queue):,} calls that wait" if self._queue else ""
        if not self._running:
            return f"for a worker that runs {len(self._queue):,} calls"
        return f"for {', '.join(running[:3]) or 'its workers'}{' and others' if running[3:] else ''}{more}"

    def _end_operation(self, end: OperationEnd | None = None) -> None:
        """Counts an operation, and raises the error that the script has to see, if there is one."""
        if failed := self._failed:
            self.log.add(OperationEnd.RAISED, failed.index)
            self._failed = None
            if failed.outcome and failed.outcome.error:
                # A worker that starts again repeats all operations, and so needs this error however late it is.
                self._raised[failed.index] = failed.outcome.shortened(_KEPT_TEXT)
                raise failed.outcome.error
        else:
            self.log.add(end)

    def _end(self, call: ScheduledCall, outcome: ScheduledOutcome) -> None:
        call.outcome = outcome
        del self._unfinished[call.index]
        self.log.finished = next(iter(self._unfinished), self._scheduled)
        self._keep(call.index, outcome)
        if outcome.kind is OutcomeKind.ERROR and self._failed is None:
            self._failed = call
            waiting, self._queue = self._queue, []
            for index in waiting:
                self._cancel(self._unfinished[index])

    def _cancel(self, call: ScheduledCall) -> None:
        text = f"{call} was cancelled, because {self._failed} has failed"
        self._end(call, ScheduledOutcome.of_text(OutcomeKind.CANCELLED, text))

    def _keep(self, index: int, outcome: ScheduledOutcome) -> None:
        self._kept[index] = outcome
        self._kept_now += len(outcome.payload) + _OVERHEAD_BYTES
        while self._kept_now > self.kept_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_now -= len(dropped.payload) + _OVERHEAD_BYTES


__all__ = ["MAX_LOST", "CallAttempt", "ScheduledCall", "ScheduledCalls"]
