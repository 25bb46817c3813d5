"""Messages between the chief and a worker: kinds of frame, and the encoding of orders and results.

The chief opens two connections to each worker. It sends orders on one, and the worker sends reports on the other. So
one thread can send while another one receives.
"""

import enum
import struct
from dataclasses import dataclass
from typing import Any

from shoal import errors
from shoal._transport import Frames
from shoal._wire import Buffer
from shoal_distribute.coordinator.outcomes import OutcomeKind, ScheduledOutcome

_LINK, _CALL, _OUTCOME, _INDEX = (struct.Struct(it) for it in ("<16sIQ?", "<QQQ", "<QB", "<Q"))
_NAME_BYTES = 256


class CallFrame(enum.IntEnum):
    """Kind of a frame between the chief and a worker."""

    HELLO = 1
    WELCOME = 2
    LINK = 3  # of the chief: what the connection is for; the worker sends it back, empty
    LOG = 4  # of the chief: a part of its log; also a heartbeat
    CALL = 5  # of the chief: a call to run
    OUTCOME = 6  # of the chief: the outcome that the worker has asked for
    RESULT = 7  # of the worker: how its call ended
    ERROR = 8
    END = 9  # the sender leaves
    ASK = 10  # of the worker: it wants the outcome of a call
    HEARTBEAT = 11  # of the worker
    READY = 12  # of the worker: its script has come to calls that are not finished, so it can run them


CALL_FRAMES = Frames(CallFrame)


@dataclass(frozen=True, slots=True)
class LinkHello:
    """What the chief says when it opens a connection.

    Attributes:
        run: random number of the run of the chief's script, 16 bytes.
        worker: number of the worker that the chief expects here.
        link: number of the pair of connections. A higher one replaces a lower one.
        reports: whether the worker sends on this connection.
    """

    run: bytes
    worker: int
    link: int
    reports: bool

    def encode(self) -> bytes:
        """Returns the bytes that `decode` reads."""
        return _LINK.pack(self.run, self.worker, self.link, self.reports)

    @classmethod
    def decode(cls, data: Buffer) -> "LinkHello":
        """Returns what the chief has said.

        Raises:
            BadFrame: the bytes are something else.
        """
        return cls(*_unpacked(_LINK, data, "the first message of a chief"))


@dataclass(frozen=True, slots=True)
class CallOrder:
    """A call that a worker is to run.

    Attributes:
        index: number of the call.
        attempt: number of the attempt, which the result repeats.
        operation: number of the operation that scheduled it.
        name: name of its function.
    """

    index: int
    attempt: int
    operation: int
    name: str

    def encode(self) -> bytes:
        """Returns the bytes that `decode` reads."""
        return _CALL.pack(self.index, self.attempt, self.operation) + self.name.encode(errors="replace")[:_NAME_BYTES]

    @classmethod
    def decode(cls, data: Buffer) -> "CallOrder":
        """Returns the order that the chief has sent.

        Raises:
            BadFrame: the bytes are no order.
        """
        view = memoryview(data)
        index, attempt, operation = _unpacked(_CALL, view[: _CALL.size], "an order of a chief")
        return cls(index, attempt, operation, bytes(view[_CALL.size :][:_NAME_BYTES]).decode(errors="replace"))


def encode_outcome(number: int, outcome: ScheduledOutcome) -> list[bytes]:
    """Returns the payload of a RESULT or an OUTCOME, in pieces.

    Args:
        number: number of the attempt in a RESULT, or of the call in an OUTCOME.
        outcome: the outcome.
    """
    return [_OUTCOME.pack(number, outcome.kind), outcome.payload]


def decode_outcome(data: Buffer) -> tuple[int, ScheduledOutcome]:
    """Returns what `encode_outcome` was given. The payload of the outcome is not decoded.

    Raises:
        BadFrame: the bytes are no outcome.
    """
    view = memoryview(data)
    number, kind = _unpacked(_OUTCOME, view[: _OUTCOME.size], "an outcome")
    try:
        return number, ScheduledOutcome(OutcomeKind(kind), bytes(view[_OUTCOME.size :]))
    except ValueError:
        raise errors.BadFrame(f"{kind} is no kind of outcome") from None


def encode_index(index: int) -> bytes:
    """Returns the payload of an ASK for a call."""
    return _INDEX.pack(index)


def decode_index(data: Buffer) -> int:
    """Returns the call that an ASK names.

    Raises:
        BadFrame: the bytes are no number of a call.
    """
    (index,) = _unpacked(_INDEX, data, "the number of a call")
    return int(index)


def _unpacked(form: struct.Struct, data: Buffer, what: str) -> tuple[Any, ...]:
    try:
        return form.unpack(data)
    except struct.error:
        raise errors.BadFrame(f"{memoryview(data).nbytes} bytes are not {what}") from None


__all__ = [
    "CALL_FRAMES",
    "CallFrame",
    "CallOrder",
    "LinkHello",
    "decode_index",
    "decode_outcome",
    "encode_index",
    "encode_outcome",
]
