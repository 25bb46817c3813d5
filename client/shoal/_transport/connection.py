"""Connections: the interface of what carries frames between two processes, and the kinds of frame on a port.

Nothing here knows what the frames mean. `shoal._transport.lane` implements the interface on a stream socket,
`shoal._transport.handshake` opens a connection, `shoal._transport.listener` accepts connections.
"""

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from shoal._wire import Buffer
from shoal._wire.limits import MAX_MESSAGE_BYTES

# Every port uses these numbers for these four; the others are its own.
_HELLO, _WELCOME, _ERROR, _END = 1, 2, 8, 9


class Frames:
    """The kinds of frame on one port.

    Args:
        kinds: every kind; with 1, 2, 8 and 9 for hello, welcome, error and end.
        streamed: kinds after which more of the same call follows.

    Attributes:
        by_number: every kind, by its number on the wire.
        hello, welcome, error, end: the kinds that every port has.
    """

    def __init__(self, kinds: type[enum.IntEnum], streamed: Iterable[enum.IntEnum] = ()) -> None:
        self.by_number = {kind.value: kind for kind in kinds}
        self.streamed = frozenset(streamed)
        self.hello, self.welcome = kinds(_HELLO), kinds(_WELCOME)
        self.error, self.end = kinds(_ERROR), kinds(_END)


class ByteStream(Protocol):
    """The part of a socket that a connection uses; what encrypts a connection implements it as well."""

    def sendmsg(self, buffers: Iterable[Buffer], /) -> int: ...

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int: ...

    def recvmsg_into(
        self, buffers: Iterable[memoryview], size: int = 0, flags: int = 0, /
    ) -> tuple[int, Any, int, Any]: ...

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None: ...

    def fileno(self) -> int: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class Connection(Protocol):
    """One end of a connection that carries frames. One thread uses it at a time, except for `close`.

    A connection that fails is closed: nobody knows how much of a frame has arrived.

    Attributes:
        peer: the other end, host:port if the socket is TCP; for messages.
        frames: the kinds of frame on this port.
        identity: the name that the other end proved in the hello; empty: it has none.
        left: bytes of the begun frame's payload that have not been taken.
    """

    peer: str
    frames: Frames
    identity: str
    left: int

    @property
    def closed(self) -> bool:
        """Whether this end has given the connection up."""
        ...

    def fileno(self) -> int:
        """Returns the descriptor, for `poll`."""
        ...

    def secure(self, protect: Callable[[ByteStream], ByteStream]) -> None:
        """Exchanges the byte stream for a protected one. To be called before the first frame."""
        ...

    def send(self, kind: enum.IntEnum, pieces: Sequence[Buffer] = (), *, end: bool = False) -> None:
        """Sends one frame.

        Args:
            kind: of the frame.
            pieces: the payload, in order.
            end: an END frame goes with it, in the same packet if there is room.

        Raises:
            Unreachable: the connection broke.
            DeadlineExceeded: the other end does not take the frame.
        """
        ...

    def stream(
        self,
        kind: enum.IntEnum,
        payloads: Iterable[Sequence[Buffer]],
        *,
        end: bool = True,
        at_once: bool = False,
        within_s: float = math.inf,
    ) -> None:
        """Sends frames of one kind, several at a time.

        Args:
            kind: of all of them.
            payloads: of each, in pieces. They must stay as they are until this returns.
            end: an END frame follows.
            at_once: each frame goes by itself, because the next one may take a while.
            within_s: for all of them; a reader that is too slow is given up.

        Raises:
            Unreachable, DeadlineExceeded: as for `send`.
        """
        ...

    def receive(
        self, *, within_s: float | None = None, most: int = MAX_MESSAGE_BYTES
    ) -> tuple[enum.IntEnum, memoryview]:
        """Waits for the next frame: its kind and its payload, which is valid until the next call.

        Args:
            within_s: for the frame's beginning; None: no limit.
            most: bytes that the payload may have.

        Raises:
            Unreachable: the connection broke, or the other end closed it.
            DeadlineExceeded: nothing came within `within_s`, or a frame that has begun does not go on.
            BadFrame: what came is no frame, or too large.
        """
        ...

    def begin(self, *, within_s: float | None = None, most: int = MAX_MESSAGE_BYTES) -> enum.IntEnum:
        """Waits for the next frame, of which `payload` or `fill` then takes the payload; else as `receive`."""
        ...

    def peek(self, size: int) -> memoryview:
        """Returns this many bytes of the payload's beginning, or all of a shorter one. Valid until the next call."""
        ...

    def payload(self) -> memoryview:
        """Takes all of the payload. Valid until the next call."""
        ...

    def fill(self, skip: int, targets: Sequence[memoryview]) -> None:
        """Takes the payload straight to where it belongs.

        Args:
            skip: bytes at its beginning, which `peek` has shown.
            targets: memory for the rest, exactly.
        """
        ...

    def close(self) -> None:
        """Ends the connection at once; a call that is blocked in it, in another thread, ends with Unreachable."""
        ...


__all__ = ["ByteStream", "Connection", "Frames"]
