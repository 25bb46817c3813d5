"""Mesh: the connections of one rank to all others of its group, on which arrays travel.

A rank sends on the connections that it has opened, and receives on those that it has accepted. So one thread can send
while another one receives. They have no time limit: `watch` ends them if a rank fails.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shoal import errors
from shoal._transport import Connection
from shoal._wire import Buffer
from shoal_distribute.collectives.calls import CollectiveCall
from shoal_distribute.collectives.schedule import Part, pieces
from shoal_distribute.collectives.times import TimesBoard
from shoal_distribute.collectives.watch import SILENT_S, RankFrame, Watch
from shoal_distribute.threads import start_thread

_CALL_BYTES, _MESSAGE_BYTES = 64, 1 << 20
# Bytes of one frame of a large array. A rank adds or passes on one frame while it receives the next.
FRAME_BYTES = 1 << 20
# Frames of arrays have a multiple of a cache line's bytes, and so has what precedes the array in them. Then the kernel
# copies between aligned addresses; otherwise an all-reduce over loopback takes 5% more processor time on AMD's Zen 3.
_LINE = bytes(64)
_FRONT = _LINE[8:]  # a frame's own header has 8 bytes


class Mesh:
    """The connections of a rank. One thread makes calls at a time.

    Args:
        rank: this rank.
        opened: connections to all other ranks, by rank: this rank sends on them.
        accepted: connections from all other ranks, by rank.
        watched: connections to all other ranks, by rank, on which they watch each other.
        silent_s: seconds without a heartbeat after which a rank counts as lost.
        meeting_s: see `Watch`.

    Attributes:
        rank: this rank.
        ranks: number of ranks.
        sent_bytes: bytes of array data that this rank has sent.
        rounds: number of communication rounds. In each, this rank waits for data from another one.
        times: the times of all ranks.
    """

    def __init__(
        self,
        rank: int,
        opened: Mapping[int, Connection],
        accepted: Mapping[int, Connection],
        watched: Mapping[int, Connection],
        *,
        silent_s: float = SILENT_S,
        meeting_s: float = math.inf,
    ) -> None:
        self.rank, self.ranks = rank, len(opened) + 1
        self.sent_bytes = self.rounds = 0
        self._closed = False
        self._opened, self._accepted = dict(opened), dict(accepted)
        self._senders: dict[int, _Sender] = {}  # by the rank that they send to
        self.times = TimesBoard(rank, self.ranks)
        self._watch = Watch(
            rank,
            watched,
            self._close_all,
            silent_s,
            meeting_s=meeting_s,
            told=self.times.told,
            reported=self.times.reported,
        )
        self._watch.start()

    def agree(self, call: CollectiveCall, among: Sequence[int] = ()) -> None:
        """Compares a call with that of the previous rank, and tells it to the next one.

        Args:
            call: the call.
            among: the ranks that make it, in order; all if there are none.

        Raises:
            RanksDisagree: the previous rank makes another call.
            RankLost: a rank has ended.
        """
        ranks = among or range(self.ranks)
        if len(ranks) == 1:
            return
        place = ranks.index(self.rank)
        self._send(ranks[(place + 1) % len(ranks)], RankFrame.CALL, [call.encode()])
        previous = ranks[place - 1]
        link = self._begin(previous, RankFrame.CALL, _CALL_BYTES, waits=True)
        theirs = CollectiveCall.decode(bytes(link.payload()))
        if theirs != call:
            other = " with another shape" if replace(theirs, layout=call.layout) == call else ""
            raise self._watch.fail(
                errors.RanksDisagree(
                    f"rank {previous} makes {theirs}{other}, and rank {self.rank} makes {call}; all ranks must make "
                    "the same calls in the same order, with arrays of the same shape and dtype. Likely causes: fit got "
                    "another batch_size or number of samples in one rank, or one rank alone calls evaluate or reduce",
                    rank=previous,
                )
            )

    def send(self, rank: int, array: np.ndarray[Any, Any]) -> None:
        """Sends an array that fits in the buffers of a socket, so that this does not wait for its reader."""
        self.sent_bytes += array.nbytes
        self._send(rank, RankFrame.DATA, _framed(array))

    def send_soon(self, rank: int, array: np.ndarray[Any, Any]) -> None:
        """Sends an array on a thread, in the order of the calls. It must not change before `flush`."""
        self.sent_bytes += array.nbytes
        self._sender_to(rank).put(partial(self._send, rank, RankFrame.DATA, _framed(array)))

    def tell_soon(self, rank: int, said: bytes) -> None:
        """Sends a message on a thread, in the order of the calls with those of `send_soon`."""
        self._sender_to(rank).put(partial(self._send, rank, RankFrame.MESSAGE, [said]))

    def flush(self, among: Sequence[int] = ()) -> None:
        """Waits until all that `send_soon` and `tell_soon` got has been sent.

        Args:
            among: the ranks that it was sent to; all if there are none.

        Raises:
            RankLost, RanksDisagree: a rank has failed.
        """
        for rank, sender in self._senders.items():
            if not among or rank in among:
                sender.flush()
        self.check()

    def hear(self, rank: int) -> bytes:
        """Waits for the next message of a rank. The time until it begins to arrive counts as a wait.

        Raises:
            RankLost, RanksDisagree: this or another rank has failed.
        """
        link = self._begin(rank, RankFrame.MESSAGE, _MESSAGE_BYTES, waits=True)
        try:
            return bytes(link.payload())
        except errors.ShoalError as error:
            raise self.lost(rank, error.message) from error

    def receive(self, rank: int, array: np.ndarray[Any, Any], *, waits: bool = False) -> None:
        """Waits for the next array of a rank.

        Args:
            rank: the sender.
            array: memory of exactly its size.
            waits: whether the time until it begins to arrive counts as a wait for a straggler.

        Raises:
            RankLost, RanksDisagree: this or another rank has failed.
        """
        rest = bytearray(_missing(array))
        expected = len(_FRONT) + array.nbytes + len(rest)
        link = self._begin(rank, RankFrame.DATA, expected, waits=waits)
        if link.left != expected:
            raise self._watch.fail(errors.BadFrame(f"rank {rank} sent {link.left} bytes instead of {expected}"))
        try:
            link.peek(len(_FRONT))
            link.fill(len(_FRONT), [it for it in (_bytes_of(array), memoryview(rest)) if it])
        except errors.ShoalError as error:
            raise self.lost(rank, error.message) from error

    def name_ranks(self, names: Mapping[int, str]) -> None:
        """Sets what errors call ranks besides their numbers."""
        self._watch.names.update(names)

    def check(self) -> None:
        """Looks, without waiting, whether a rank has failed.

        Raises:
            RankLost, RanksDisagree: it has, or this rank has left the group.
        """
        if self._watch.failure:
            raise self._watch.failure
        if self._closed:
            raise errors.RankLost(f"rank {self.rank} of {self.ranks} has left the group", rank=self.rank)

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left the group. It may have finished all calls before."""
        return self._watch.has_left(rank)

    def lost(self, rank: int, reason: str) -> errors.ShoalError:
        """Returns the failure of the group because a rank that this one needs is not there."""
        return self._watch.lost(rank, reason)

    def fail(self, error: errors.ShoalError) -> None:
        """Ends the group with an error, at all ranks."""
        self._watch.fail(error)

    def close(self) -> None:
        """Leaves the group: closes all connections. The other ranks get RankLost if they wait for this one."""
        self._closed = True
        self._watch.leave()
        self._close_all()
        for sender in self._senders.values():
            sender.close()

    def _close_all(self) -> None:
        for link in (*self._opened.values(), *self._accepted.values()):
            link.close()

    def _begin(self, rank: int, kind: RankFrame, most: int, *, waits: bool) -> Connection:
        """Waits for a frame of one kind, and returns the connection that has its payload."""
        self.check()
        link, began = self._accepted[rank], time.perf_counter()
        try:
            found = link.begin(most=most)
            if waits:
                self.times.own.wait += time.perf_counter() - began
        except errors.ShoalError as error:
            raise self.lost(rank, error.message) from error
        if found is not kind:
            raise self._watch.fail(errors.BadFrame(f"rank {rank} sent {found.name} where {kind.name} was due"))
        return link

    def _send(self, rank: int, kind: RankFrame, pieces: Sequence[Buffer]) -> None:
        self.check()
        try:
            self._opened[rank].send(kind, pieces)
        except errors.ShoalError as error:
            raise self.lost(rank, error.message) from error

    def _sender_to(self, rank: int) -> "_Sender":
        """Returns what sends to a rank: one that is slow to read does not delay what others get."""
        if rank not in self._senders:
            self._senders[rank] = _Sender(f"rank {self.rank} sends to rank {rank}", partial(self._end, rank))
        return self._senders[rank]

    def _end(self, rank: int, error: Exception) -> None:
        """Ends the group because this rank cannot send to another one: `flush` raises why."""
        if not isinstance(error, errors.ShoalError):  # otherwise the group has ended
            reason = f"rank {self.rank} cannot send to rank {rank}: {type(error).__name__}: {error}"
            self._watch.fail(errors.InternalError(reason))


class _Sender:
    """A thread that sends in the order of the calls.

    Args:
        name: name of the thread.
        failed: gets the error of a call. Those behind it are made, too, and fail at once.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = start_thread(self._run, name)

    def put(self, call: Callable[[], None]) -> None:
        """Makes a call later."""
        self._calls.put(call)

    def flush(self) -> None:
        """Waits until all calls have been made."""
        done = threading.Event()
        self._calls.put(done.set)
        done.wait()

    def close(self) -> None:
        """Makes the calls that are left, and ends the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:
                self._failed(error)


def frames_of(flat: np.ndarray[Any, Any], part: Part) -> Iterator[np.ndarray[Any, Any]]:
    """Yields what of a part of an array of one dimension is sent as one frame each."""
    for piece in pieces(part, max(1, FRAME_BYTES // flat.itemsize)):
        yield flat[piece]


def _framed(array: np.ndarray[Any, Any]) -> list[Buffer]:
    """Returns the payload of an array's frame, in pieces."""
    return [_FRONT, _bytes_of(array), _LINE[: _missing(array)]]


def _missing(array: np.ndarray[Any, Any]) -> int:
    """Returns how many bytes fill the last line of an array."""
    return -array.nbytes % len(_LINE)


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


__all__ = ["FRAME_BYTES", "Mesh", "frames_of"]
