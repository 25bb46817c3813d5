"""Watch: a thread by which a rank sees within seconds that another one has ended, stalls, has left or has failed.

Each pair of ranks has a connection of its own for this. Every second, a rank sends a heartbeat on it. So a rank that
computes for minutes differs from one that is stopped, and a failure reaches all ranks at once, not along a ring.
"""

import contextlib
import enum
import os
import select
import threading
import time
from collections.abc import Callable, Mapping

from shoal import errors
from shoal._transport import Connection, Frames, received_error, send_error

# Seconds between two heartbeats, and of silence after which a rank counts as lost. Nobody waits longer than 10 s.
_INTERVAL_S, SILENT_S = 1.0, 7.0
# The most seconds until the first heartbeat. Each rank is there, but may still connect with others: up to 256 of them.
_MEETING_S = 20.0
# For one frame, and for telling all other ranks of a failure or of the end.
TELL_S = 1.0


class RankFrame(enum.IntEnum):
    """Kind of a frame between ranks."""

    HELLO = 1
    WELCOME = 2
    RANK = 3  # who the sender is
    CALL = 4  # the collective call that the following data belong to
    DATA = 5
    HEARTBEAT = 6  # the sender lives
    MESSAGE = 7  # what the following data are, from one rank to another, outside of collective calls
    ERROR = 8
    END = 9  # the sender leaves


FRAMES = Frames(RankFrame)


class Watch:
    """What a rank knows of the others.

    Any thread may call its methods. Only its own thread uses the connections.

    Args:
        rank: this rank.
        connections: a connection to each other rank, by rank.
        failed: called once, by any thread, when a rank has failed; it wakes the threads that wait for data.
        silent_s: seconds without a heartbeat after which a rank counts as lost.
        meeting_s: seconds in which the other ranks may still connect with each other, before their first heartbeat.
        told: returns what this rank's next heartbeat carries.
        reported: gets the number of a rank, and what its heartbeat carries.

    Attributes:
        names: what errors call ranks besides their numbers, by rank.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, Connection],
        failed: Callable[[], None],
        silent_s: float = SILENT_S,
        *,
        meeting_s: float = _MEETING_S,
        told: Callable[[], bytes] = bytes,
        reported: Callable[[int, bytes], None] = lambda _rank, _said: None,
    ) -> None:
        self.rank, self.ranks = rank, len(connections) + 1
        self._told, self._reported = told, reported
        self.names: dict[int, str] = {}
        self._meeting_s = min(meeting_s, _MEETING_S)
        self._connections, self._failed, self._silent_s = dict(connections), failed, silent_s
        self._changed = threading.Condition()  # guards _failure, _left, _closing and _wake
        self._failure: errors.ShoalError | None = None
        self._left: set[int] = set()
        self._closing = False
        self._poll = select.poll()
        self._ranks_of = {connection.fileno(): rank for rank, connection in self._connections.items()}
        self._wake = os.eventfd(0)
        for descriptor in (self._wake, *self._ranks_of):
            self._poll.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"rank {rank} watches", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def failure(self) -> errors.ShoalError | None:
        """The first failure that this rank knows of."""
        return self._failure

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left the group. What it sent before may not have been received yet."""
        return rank in self._left

    def fail(self, error: errors.ShoalError) -> errors.ShoalError:
        """Tells all ranks of a failure. Returns the first failure, which may be another one."""
        with self._changed:
            if first := self._failure:
                return first
            if not self._closing:  # otherwise nobody is there to be told
                self._failure = error
                self._changed.notify_all()
        self._failed()
        self._end()
        return error

    def lost(self, rank: int, reason: str) -> errors.ShoalError:
        """Returns the failure behind the end of a connection, and tells all ranks of it.

        A rank closes its connections when it has failed for a reason that this rank may not know yet. So this waits
        for a moment until that reason arrives.

        Args:
            rank: the other end of the connection.
            reason: what is wrong with the connection.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or rank in self._left, TELL_S)
        return self.fail(self._lost(rank, "has left the group" if rank in self._left else f"has ended ({reason})"))

    def leave(self) -> None:
        """Tells all ranks that this one leaves, and closes the connections."""
        with self._changed:
            self._closing = True
        self._end()

    def _end(self) -> None:
        """Wakes the thread and waits for its end: then it has told the others."""
        if self._thread is threading.current_thread():
            return
        with self._changed:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        self._thread.join(2 * TELL_S)

    def _run(self) -> None:
        last_seen = dict.fromkeys(self._connections, time.monotonic() + self._meeting_s)
        next_at = 0.0
        while not (self._failure or self._closing):
            for descriptor, _ in self._poll.poll(max(0.0, 1000 * (next_at - time.monotonic()))):
                if descriptor != self._wake:
                    rank = self._ranks_of[descriptor]
                    self._receive(rank)
                    last_seen[rank] = time.monotonic()
            now = time.monotonic()
            if now < next_at:
                continue
            if next_at and now > next_at + _INTERVAL_S:
                last_seen = {rank: max(at, now) for rank, at in last_seen.items()}  # this process was stopped itself
            self._judge(last_seen, now)
            self._send(RankFrame.HEARTBEAT, self._told())
            next_at = now + _INTERVAL_S
        self._send(RankFrame.ERROR if self._failure else RankFrame.END)
        # The other end reads one frame at a time. The end of the connection makes it read the last one, too.
        for connection in self._connections.values():
            connection.close()
        with self._changed:
            os.close(self._wake)
            self._wake = -1

    def _receive(self, rank: int) -> None:
        """Reads the next frame of a rank."""
        connection = self._connections[rank]
        try:
            connection.limit(TELL_S)
            kind = connection.begin(most=1 << 16)
            if kind is RankFrame.ERROR:
                self.fail(received_error(connection))
            elif kind is RankFrame.END:
                self._poll.unregister(connection.fileno())
                with self._changed:
                    self._left.add(rank)
                    self._changed.notify_all()
            said = bytes(connection.payload())
            if kind is RankFrame.HEARTBEAT:
                self._reported(rank, said)
        except errors.ShoalError as error:
            self.fail(self._lost(rank, f"has ended ({error.message})"))

    def _judge(self, last_seen: Mapping[int, float], now: float) -> None:
        for rank, at in last_seen.items():
            if now - at > self._silent_s and rank not in self._left:
                self.fail(self._lost(rank, f"has sent no heartbeat for {now - at:.0f} s"))

    def _send(self, kind: RankFrame, said: bytes = b"") -> None:
        """Sends a frame to all ranks. Reading shows whether one of them has ended."""
        for rank, connection in self._connections.items():
            if rank not in self._left:
                with contextlib.suppress(errors.ShoalError):
                    connection.limit(TELL_S)
                    if kind is RankFrame.ERROR and self._failure:
                        send_error(connection, self._failure)
                    else:
                        connection.send(kind, [said] if said else [])

    def _lost(self, rank: int, what: str) -> errors.RankLost:
        name = f" ({self.names[rank]})" if rank in self.names else ""
        return errors.RankLost(f"rank {rank} of {self.ranks}{name} {what}", rank=rank)


__all__ = ["FRAMES", "SILENT_S", "TELL_S", "RankFrame", "Watch"]
