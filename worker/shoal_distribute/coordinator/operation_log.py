"""Log of the operations of a script: what the chief's script has gone through, which all other tasks repeat. Pure.

An operation is one call of `schedule`, `join` or `done`. The tasks run the same script, so the n-th operation of each
is the same one, and must end in the same way. The script alone tells how most operations end. The others raise the
error of a function, or are a `done` that returns True. The log has these others, and the number of all operations.
"""

import enum
import struct
from dataclasses import dataclass

from shoal import errors
from shoal._wire import Buffer

# Of operations that raise, or are a `done` that returns True. A part of the log with all of them fits in one frame.
MAX_EVENTS = 100_000
_HEAD, _EVENT = struct.Struct("<QQ?"), struct.Struct("<QBQ")


class OperationEnd(enum.IntEnum):
    """How an operation ended, if the script alone does not tell."""

    RAISED = 1  # the error of a call
    DONE = 2  # `done` returned True


@dataclass(frozen=True, slots=True)
class OperationEvent:
    """One operation in the log.

    Attributes:
        operation: its number, from 0.
        end: how it ended.
        call: the call whose error it raised; otherwise 0.
    """

    operation: int
    end: OperationEnd
    call: int = 0


@dataclass(frozen=True, slots=True)
class LogPart:
    """What the chief tells another task of its log.

    Attributes:
        operations: number of operations that have ended.
        finished: all calls below this number have an outcome.
        over: the chief's script has ended: there will be no more operations.
        events: some of the log's events.
    """

    operations: int
    finished: int
    over: bool = False
    events: tuple[OperationEvent, ...] = ()

    def encode(self) -> bytes:
        """Returns the bytes that `decode` reads."""
        events = (_EVENT.pack(it.operation, it.end, it.call) for it in self.events)
        return _HEAD.pack(self.operations, self.finished, self.over) + b"".join(events)

    @classmethod
    def decode(cls, data: Buffer) -> "LogPart":
        """Returns the part that the chief has sent.

        Raises:
            BadFrame: the bytes are no part of a log.
        """
        view = memoryview(data)
        try:
            operations, finished, over = _HEAD.unpack(view[: _HEAD.size])
            found = [(op, OperationEnd(end), call) for op, end, call in _EVENT.iter_unpack(view[_HEAD.size :])]
        except (struct.error, ValueError) as error:
            raise errors.BadFrame(f"{len(view)} bytes are not a part of the chief's log: {error}") from None
        return cls(operations, finished, over, tuple(OperationEvent(*it) for it in found))


class OperationLog:
    """The log, at the chief or at a task that follows it.

    Attributes:
        operations: number of operations that have ended.
        finished: all calls below this number have an outcome.
        over: the chief's script has ended.
    """

    def __init__(self) -> None:
        self.operations = self.finished = 0
        self.over = False
        self._events: dict[int, OperationEvent] = {}  # by operation, in their order

    @property
    def events(self) -> int:
        """The number of events."""
        return len(self._events)

    def add(self, end: OperationEnd | None = None, call: int = 0) -> None:
        """Records that the next operation of the chief's script has ended.

        Args:
            end: how it ended, if the script alone does not tell.
            call: the call whose error it raises.

        Raises:
            LimitExceeded: the log has too many events.
        """
        if end is not None:
            if len(self._events) >= MAX_EVENTS:
                raise errors.LimitExceeded(
                    f"done() returned True, or an error was raised, {MAX_EVENTS:,} times in this run, and no more are "
                    "recorded; call join() instead of done()"
                )
            self._events[self.operations] = OperationEvent(self.operations, end, call)
        self.operations += 1

    def part(self, known: int) -> LogPart:
        """Returns the log without the first events.

        Args:
            known: number of events that the receiver has.
        """
        new = [*self._events.values()][known:] if known < len(self._events) else ()
        return LogPart(self.operations, self.finished, self.over, tuple(new))

    def follow(self, part: LogPart) -> None:
        """Takes a part of the chief's log. It may repeat what this log has."""
        self.operations, self.finished = max(self.operations, part.operations), max(self.finished, part.finished)
        self.over = self.over or part.over
        for event in part.events[:MAX_EVENTS]:
            self._events[event.operation] = event

    def end_of(self, operation: int) -> OperationEvent | None:
        """Returns how an operation below `operations` ended; None if it ended as the script alone tells."""
        return self._events.get(operation)


__all__ = ["MAX_EVENTS", "LogPart", "OperationEnd", "OperationEvent", "OperationLog"]
