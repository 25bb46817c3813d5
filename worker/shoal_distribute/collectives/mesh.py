"""Mesh: the connections of one rank to all other ranks of its group, and the detection of ranks that have failed.

A rank sends on the connections that it has opened, and receives on those that it has accepted. So one thread can send
while another one receives.
"""

import contextlib
import enum
import queue
import select
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal import errors
from shoal._transport import (
    Connection,
    Frames,
    received_error,
    send_error,
)
from shoal._wire import Buffer
from shoal_distribute.collectives.calls import CollectiveCall

_CALL_BYTES = 64
_TELL_S = 1.0  # for telling the other ranks of a failure


class RankFrame(enum.IntEnum):
    """Kind of a frame between ranks."""

    HELLO = 1
    WELCOME = 2
    RANK = 3  # who the sender is
    CALL = 4  # the collective call that the following data belong to
    DATA = 5
    ERROR = 8
    END = 9


FRAMES = Frames(RankFrame)


class Mesh:
    """The connections of a rank. One thread makes calls at a time.

    Args:
        rank: this rank.
        opened: connections to all other ranks, by rank: this rank sends on them.
        accepted: connections from all other ranks, by rank.

    Attributes:
        rank: this rank.
        ranks: number of ranks.
        sent_bytes: bytes of array data that this rank has sent.
        rounds: number of times that it has received from another rank in turn with its own sends.
    """

    def __init__(self, rank: int, opened: Mapping[int, Connection], accepted: Mapping[int, Connection]) -> None:
        self.rank, self.ranks = rank, len(opened) + 1
        self.sent_bytes = self.rounds = 0
        self._opened, self._accepted = dict(opened), dict(accepted)
        self._failing = threading.Lock()  # guards _failure
        self._failure: errors.ShoalError | None = None
        self._sends: queue.SimpleQueue[tuple[int, np.ndarray[Any, Any]] | threading.Event | None] = queue.SimpleQueue()
        self._sending = threading.Lock()  # held while a connection is used for sending
        self._sender: threading.Thread | None = None

    def agree(self, call: CollectiveCall) -> None:
        """Compares a call with that of the previous rank, and tells it to the next one.

        Raises:
            RanksDisagree: the previous rank makes another call.
            RankLost: a rank has ended.
        """
        if self.ranks == 1:
            return
        self._send((self.rank + 1) % self.ranks, RankFrame.CALL, [call.encode()])
        previous = (self.rank - 1) % self.ranks
        link = self._begin(previous, RankFrame.CALL, _CALL_BYTES)
        theirs = CollectiveCall.decode(bytes(link.payload()))
        if theirs != call:
            raise self.fail(
                errors.RanksDisagree(
                    f"rank {previous} makes {theirs}, and rank {self.rank} makes {call}; all ranks must make the same "
                    "calls in the same order, with arrays of the same size and dtype",
                    rank=previous,
                )
            )

    def send(self, rank: int, array: np.ndarray[Any, Any]) -> None:
        """Sends an array that fits in the buffers of a socket, so that this does not wait for its reader."""
        self.sent_bytes += array.nbytes
        self._send(rank, RankFrame.DATA, [_bytes_of(array)])

    def send_soon(self, rank: int, array: np.ndarray[Any, Any]) -> None:
        """Sends an array on a thread, in the order of the calls. It must not change before `flush`."""
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_queued, name=f"rank {self.rank} sends", daemon=True)
            self._sender.start()
        self.sent_bytes += array.nbytes
        self._sends.put((rank, array))

    def flush(self) -> None:
        """Waits until all arrays of `send_soon` have been sent.

        Raises:
            RankLost, RanksDisagree: a rank has failed.
        """
        done = threading.Event()
        self._sends.put(done)
        done.wait()
        if self._failure:
            raise self._failure

    def receive(self, rank: int, array: np.ndarray[Any, Any]) -> None:
        """Waits for the next array of a rank.

        Args:
            rank: the sender.
            array: memory of exactly its size.

        Raises:
            RankLost, RanksDisagree: this or another rank has failed.
        """
        link = self._begin(rank, RankFrame.DATA, array.nbytes)
        if link.left != array.nbytes:
            raise self.fail(errors.BadFrame(f"rank {rank} sent {link.left} bytes instead of {array.nbytes}"))
        if not array.nbytes:
            return
        try:
            link.fill(0, [_bytes_of(array)])
        except errors.ShoalError as error:
            raise self._lost(rank, error) from error

    def check(self) -> None:
        """Looks, without waiting, whether a rank has failed.

        Raises:
            RankLost, RanksDisagree: it has.
        """
        if self._failure:
            raise self._failure
        poll = select.poll()
        ranks = {link.fileno(): rank for rank, link in self._accepted.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(0):
            # Within a call through shared memory, the others send nothing unless they fail.
            self._begin(ranks[descriptor], RankFrame.ERROR, 0)

    def fail(self, error: errors.ShoalError) -> errors.ShoalError:
        """Tells all other ranks of a failure, and closes the connections. Returns the first error of this rank."""
        with self._failing:
            if self._failure:
                return self._failure
            self._failure = error
        # A rank that does not read keeps the other thread in its send. Then the end of the connections must suffice.
        if self._sending.acquire(timeout=_TELL_S):
            try:
                for link in self._opened.values():
                    with contextlib.suppress(errors.ShoalError):
                        link.limit(_TELL_S)
                        send_error(link, error)
            finally:
                self._sending.release()
        self._close_all()
        return error

    def close(self) -> None:
        """Closes all connections. The other ranks get RankLost if they wait for this one."""
        self._close_all()
        if self._sender:
            self._sends.put(None)
            self._sender.join()

    def _close_all(self) -> None:
        for link in (*self._opened.values(), *self._accepted.values()):
            link.close()

    def _begin(self, rank: int, kind: RankFrame, most: int) -> Connection:
        """Waits for a frame of one kind, and returns the connection that has its payload."""
        if self._failure:
            raise self._failure
        link = self._accepted[rank]
        try:
            found = link.begin(most=max(most, 1 << 16))
            if found is RankFrame.ERROR:
                raise self.fail(received_error(link))
        except (errors.Unreachable, errors.DeadlineExceeded) as error:
            raise self._lost(rank, error) from error
        if found is not kind:
            raise self.fail(errors.BadFrame(f"rank {rank} sent {found.name} where {kind.name} was due"))
        return link

    def _send(self, rank: int, kind: RankFrame, pieces: Sequence[Buffer]) -> None:
        if self._failure:
            raise self._failure
        try:
            with self._sending:
                self._opened[rank].send(kind, pieces)
        except errors.ShoalError as error:
            raise self._lost(rank, error) from error

    def _lost(self, rank: int, error: errors.ShoalError) -> errors.ShoalError:
        # What the other rank said before it closed the connection says more than the end of the connection.
        reason = error.message
        return self.fail(
            errors.RankLost(
                f"rank {rank} of {self.ranks} has ended or cannot be reached ({reason}); all ranks must start again",
                rank=rank,
            )
        )

    def _send_queued(self) -> None:
        while (item := self._sends.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self._failure is None:
                with contextlib.suppress(errors.ShoalError):  # `flush` raises it
                    self._send(item[0], RankFrame.DATA, [_bytes_of(item[1])])


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


__all__ = ["FRAMES", "Mesh", "RankFrame"]
