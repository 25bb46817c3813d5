"""One direction of a proxied connection: segments that wait until they arrive at the other end.

All methods run on the loop of the network.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from support.faults.proxy.conditions import Conditions, Line

# Bytes that may wait in a flow before its source is not read any more. It is enough for a fast link with a long delay.
_MOST_BYTES = 4 << 20


class Flow:
    """Segments on their way from one end of a connection to the other.

    Args:
        loop: the loop of the network.
        line: says when segments arrive.
        conditions: returns the conditions of the link.
        blocked: returns whether the direction is partitioned.

    Attributes:
        ended: whether the end has arrived.
        on_end: called when the end arrives.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        line: Line,
        conditions: Callable[[], Conditions],
        blocked: Callable[[], bool],
    ) -> None:
        self._loop, self._line, self._conditions, self._blocked = loop, line, conditions, blocked
        self._waiting: deque[tuple[float, bytes]] = deque()  # with the times of arrival; b"" is the end
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._source: asyncio.Transport | None = None
        self._sink: asyncio.Transport | None = None
        self._full = False  # whether the sink wants no more bytes now
        self._reading = True
        self._closing = False  # whether the end is on its way
        self.ended = False
        self.on_end: Callable[[], object] = bool  # does nothing

    def connect(self, source: asyncio.Transport, sink: asyncio.Transport) -> None:
        """Sets the ends. Segments arrive from then on."""
        self._source, self._sink = source, sink
        self.deliver()

    def feed(self, segment: bytes) -> None:
        """Adds a segment. An empty one is the end, after which nothing comes: the source has closed its connection."""
        if self._closing:
            return
        self._closing = not segment
        at = self._line.arrives_at(self._conditions(), self._loop.time(), len(segment))
        self._waiting.append((at, segment))
        self._bytes += len(segment)
        self.deliver()

    def pause(self, full: bool) -> None:
        """Notes whether the sink wants no more bytes now."""
        self._full = full
        self.deliver()

    def deliver(self) -> None:
        """Hands over all segments that have arrived, unless the direction is partitioned."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        now = self._loop.time()
        while self._sink and self._waiting and not self._full and not self._blocked():
            at, segment = self._waiting[0]
            if at > now:
                self._timer = self._loop.call_at(at, self.deliver)
                break
            self._waiting.popleft()
            self._bytes -= len(segment)
            self._hand_over(self._sink, segment)
        self._regulate()

    def stop(self) -> None:
        """Forgets all segments."""
        self._waiting.clear()
        self._sink = None
        if self._timer:
            self._timer.cancel()

    def _hand_over(self, sink: asyncio.Transport, segment: bytes) -> None:
        if not segment:
            self.ended = True
            self.on_end()
        elif not sink.is_closing():
            sink.write(segment)  # may call `pause`

    def _regulate(self) -> None:
        reading = self._bytes < _MOST_BYTES
        if self._source and reading != self._reading and not self._source.is_closing():
            self._reading = reading
            if reading:
                self._source.resume_reading()
            else:
                self._source.pause_reading()


__all__ = ["Flow"]
