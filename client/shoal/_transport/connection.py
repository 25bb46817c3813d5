"""Connections: the interface of a stream of frames between two processes, and the kinds of frame.

`Frames` lists the kinds of frame that one port uses. This module does not know what frames mean.
`shoal._transport.lane` implements the interface on a stream socket, `shoal._transport.handshake` opens a connection,
and `shoal._transport.listener` accepts connections.
"""

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from shoal._security import Principal
from shoal._wire import Buffer
from shoal._wire.limits import MAX_MESSAGE_BYTES

# Numbers of the four kinds that every port has. Each port chooses its other numbers.
_HELLO, _WELCOME, _ERROR, _END = 1, 2, 8, 9


class Frames:
    """The kinds of frame on one port.

    Args:
        kinds: all kinds; 1, 2, 8 and 9 must be hello, welcome, error and end.
        streamed: kinds that are followed by more frames of the same call.

    Attributes:
        by_number: each kind, by its number on the wire.
        hello, welcome, error, end: the kinds that every port has.
    """

    def __init__(self, kinds: type[enum.IntEnum], streamed: Iterable[enum.IntEnum] = ()) -> None:
        self.by_number = {kind.value: kind for kind in kinds}
        self.streamed = frozenset(streamed)
        self.hello, self.welcome = kinds(_HELLO), kinds(_WELCOME)
        self.error, self.end = kinds(_ERROR), kinds(_END)


class ByteStream(Protocol):
    """The socket methods that a connection uses. An encrypted stream implements them as well.

    An encrypted stream also has `pending`, which returns how many bytes it holds that no call has read. Its `sendmsg`
    returns 0 if a timeout ended after a part of a chunk was sent.
    """

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
    """One end of a connection that carries frames. Only one thread may use it at a time, except for `close`.

    A connection that fails is closed, because the position within a frame is then unknown.

    Attributes:
        peer: how messages name the other end; host:port if the socket is TCP.
        frames: the kinds of frame on this port.
        identity: who the other end is, as it proved in its hello; None if it proved nothing.
        left: unread bytes of the current frame's payload.
    """

    peer: str
    frames: Frames
    identity: Principal | None
    left: int

    @property
    def closed(self) -> bool:
        """Whether this end has closed the connection."""
        ...

    def fileno(self) -> int:
        """Returns the descriptor, for `poll`."""
        ...

    def secure(self, protect: Callable[[ByteStream], ByteStream]) -> None:
        """Replaces the byte stream by a protected one. Must be called before the first frame.

        Args:
            protect: returns the protected stream.
        """
        ...

    def detect_loss(self) -> None:
        """Detects within about 4 seconds that the other host cannot be reached any more, even if no packet says so.

        Only for an end that sends nothing from now on. The kernel does not probe while it has data to send. It would
        also end the connection if the other end did not read this data for 4 seconds.

        Raises:
            Unreachable: the connection was closed.
        """
        ...

    def limit(self, within_s: float | None) -> None:
        """Sets one deadline for all transfers that follow, whatever their number of frames.

        A call that is not complete at the deadline raises DeadlineExceeded, and closes the connection.

        Args:
            within_s: seconds from now; None removes the deadline.

        Raises:
            Unreachable: the connection was closed.
        """
        ...

    def send(self, kind: enum.IntEnum, pieces: Sequence[Buffer] = (), *, end: bool = False) -> None:
        """Sends one frame.

        Args:
            kind: kind of the frame.
            pieces: the payload, in order.
            end: also sends an END frame, in the same packet if there is room.

        Raises:
            Unreachable: the connection broke.
            DeadlineExceeded: the other end does not read the frame.
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
        on_data: Callable[[], bool] | None = None,
    ) -> None:
        """Sends frames of one kind, several at a time.

        Args:
            kind: kind of the frames.
            payloads: payload of each frame, in pieces. They must not change before this method returns.
            end: also sends an END frame.
            at_once: sends each frame immediately, because the next one may take a while.
            within_s: seconds for all frames; a slower reader causes DeadlineExceeded.
            on_data: called when the other end has sent something meanwhile; reads it, and returns whether to send the
                payloads that are left. None means that the other end sends nothing.

        Raises:
            Unreachable, DeadlineExceeded: as for `send`.
        """
        ...

    def receive(
        self, *, within_s: float | None = None, most: int = MAX_MESSAGE_BYTES
    ) -> tuple[enum.IntEnum, memoryview]:
        """Waits for the next frame.

        Args:
            within_s: seconds until the frame begins; None means no limit.
            most: the largest payload that is accepted, in bytes.

        Returns:
            The kind and the payload, which is valid until the next call.

        Raises:
            Unreachable: the connection broke, or the other end closed it.
            DeadlineExceeded: nothing arrived within `within_s`, or a frame stalled after its beginning.
            BadFrame: the bytes are not a frame, or the frame is too large.
        """
        ...

    def begin(self, *, within_s: float | None = None, most: int = MAX_MESSAGE_BYTES) -> enum.IntEnum:
        """Waits for the next frame, whose payload `payload` or `fill` then reads.

        Args:
            within_s: as for `receive`.
            most: as for `receive`.

        Returns:
            The kind of the frame.

        Raises:
            Unreachable, DeadlineExceeded, BadFrame: as for `receive`.
        """
        ...

    def peek(self, size: int) -> memoryview:
        """Returns the first `size` bytes of the payload, or all of a shorter one. Valid until the next call."""
        ...

    def payload(self) -> memoryview:
        """Reads the whole payload. Valid until the next call."""
        ...

    def fill(self, skip: int, targets: Sequence[memoryview]) -> None:
        """Receives the payload straight into its destination.

        Args:
            skip: bytes at its beginning to drop, which `peek` has returned.
            targets: memory for the rest, of exactly its size.
        """
        ...

    def close(self) -> None:
        """Closes the connection at once. A call that another thread is blocked in ends with Unreachable."""
        ...


__all__ = ["ByteStream", "Connection", "Frames"]
