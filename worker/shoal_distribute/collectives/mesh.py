"""Mesh: the connections of one rank to all others of its group, and the news that one of them has failed.

A rank sends on the connections that it has opened, and receives on those that it has accepted. So one thread can send
while another one receives.
"""

import contextlib
import enum
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal import _rpc, errors
from shoal._limits import catalogue
from shoal._transport import (
    Connection,
    Frames,
    Lane,
    Listener,
    ListenerLimits,
    Security,
    open_handshake,
    received_error,
    send_error,
)
from shoal._wire import Buffer
from shoal.v1 import parameter_server_pb2 as pb
from shoal_distribute.collectives.calls import CollectiveCall

# The largest group: each rank has a connection to each other one.
MOST_RANKS = 256
_RANK = struct.Struct("<QII")  # generation, rank, ranks
_CALL_BYTES = 64
_RETRY_S = 0.05
_HELLO_S = 5.0
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


class _RankHandler:
    """Handler of a connection that another rank has opened: it hands the connection to the mesh."""

    def __init__(self, connection: Connection, gathering: "_Gathering") -> None:
        self._connection, self._gathering = connection, gathering

    def welcome(self, hello: pb.LaneHello) -> pb.LaneWelcome:  # noqa: ARG002 - it has nothing but its token
        return pb.LaneWelcome()

    def serve(self) -> None:
        kind, payload = self._connection.receive(within_s=_HELLO_S, most=_RANK.size)
        if kind is not RankFrame.RANK or len(payload) != _RANK.size:
            raise errors.BadFrame(f"{self._connection.peer} did not say its rank")
        self._gathering.arrived(self._connection, *_RANK.unpack(payload))
        self._gathering.closed.wait()

    def close(self) -> None:
        """Frees nothing: the mesh owns the connection."""


class _Gathering:
    """The ranks that have come so far."""

    def __init__(self, generation: int, rank: int, ranks: int) -> None:
        self.generation, self.rank, self.ranks = generation, rank, ranks
        self.accepted: dict[int, Connection] = {}
        self.changed = threading.Condition()
        self.closed = threading.Event()

    def arrived(self, connection: Connection, generation: int, rank: int, ranks: int) -> None:
        """Takes the connection of a rank, or refuses it."""
        with self.changed:
            refusal = self._refusal(generation, rank, ranks)
            if refusal is None:
                self.accepted[rank] = connection
                self.changed.notify_all()
        if refusal:
            send_error(connection, refusal)
            raise refusal
        connection.send(RankFrame.RANK)

    def introduce(self, lane: Connection) -> None:
        """Tells another rank who this one is.

        Raises:
            RanksDisagree: it refuses this rank.
            Unreachable: it has ended.
        """
        lane.send(RankFrame.RANK, [_RANK.pack(self.generation, self.rank, self.ranks)])
        kind = lane.begin(within_s=_HELLO_S, most=1 << 16)
        if kind is RankFrame.ERROR:
            raise received_error(lane)
        lane.payload()

    def wait(self, deadline: float, addresses: Sequence[str]) -> None:
        """Waits until all other ranks have come.

        Raises:
            RankLost: a rank has not come by the deadline. The message names it.
        """
        with self.changed:
            self.changed.wait_for(lambda: not self._missing(), max(0.0, deadline - time.monotonic()))
            if missing := self._missing():
                named = ", ".join(f"{it} ({addresses[it]})" for it in missing[:5])
                raise errors.RankLost(f"rank {named} did not come in time", rank=missing[0])

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank and rank not in self.accepted]

    def _refusal(self, generation: int, rank: int, ranks: int) -> errors.ShoalError | None:
        if (generation, ranks) != (self.generation, self.ranks):
            return errors.RanksDisagree(
                f"rank {rank} wants generation {generation} of {ranks} ranks, and rank {self.rank} generation "
                f"{self.generation} of {self.ranks} ranks",
                rank=rank,
            )
        if rank == self.rank or not rank < self.ranks or rank in self.accepted:
            return errors.RanksDisagree(f"two processes are rank {rank} of {ranks}", rank=rank)
        return None


def connect(
    rank: int,
    addresses: Sequence[str],
    *,
    security: Security,
    listening: socket.socket | None = None,
    generation: int = 0,
    within_s: float = 60.0,
) -> tuple[Mesh, Listener]:
    """Connects a rank with all others.

    Args:
        rank: this rank.
        addresses: host:port of each rank.
        security: protects the connections, and proves that a process belongs to the group.
        listening: a bound socket that listens at this rank's address. None means that this function makes one.
        generation: number of the group. Ranks of another generation are refused.
        within_s: seconds to wait for the other ranks.

    Returns:
        The mesh, and the listener to stop after it.

    Raises:
        BadRequest: an address is not host:port, or there are too many.
        RankLost: a rank did not come in time. The message names it.
        RanksDisagree: two processes have one rank, or another number of ranks.
    """
    if not 0 <= rank < len(addresses) <= MOST_RANKS:
        raise errors.BadRequest(f"rank {rank} of {len(addresses)} ranks: a group has 1 to {MOST_RANKS} of them")
    places = [_rpc.parse_address(address) for address in addresses]
    gathering = _Gathering(generation, rank, len(addresses))
    bound = listening or socket.create_server(places[rank], reuse_port=False)
    limits = ListenerLimits(catalogue.LANES, catalogue.HOST_LANES, 2 * MOST_RANKS, 2 * MOST_RANKS)
    listener = Listener(
        bound,
        FRAMES,
        lambda connection: _RankHandler(connection, gathering),
        security=security,
        limits=limits,
        name="rank",
        advice="start fewer ranks",
    )
    listener.start()
    opened: dict[int, Connection] = {}
    try:
        deadline = time.monotonic() + within_s
        for other in range(len(addresses)):
            if other != rank:
                opened[other] = _open(places[other], gathering, other, security, deadline)
        gathering.wait(deadline, addresses)
    except BaseException:
        gathering.closed.set()
        for link in opened.values():
            link.close()
        listener.stop()
        raise
    return _GatheredMesh(gathering, opened), listener


class _GatheredMesh(Mesh):
    """A mesh that lets the threads of its accepted connections go when it closes."""

    def __init__(self, gathering: _Gathering, opened: Mapping[int, Connection]) -> None:
        super().__init__(gathering.rank, opened, gathering.accepted)
        self._gathering = gathering

    def close(self) -> None:
        super().close()
        self._gathering.closed.set()


def _open(place: tuple[str, int], gathering: _Gathering, other: int, security: Security, deadline: float) -> Connection:
    """Opens the connection to another rank, which may not have started yet."""
    pause = threading.Event()  # never set
    while True:
        left = deadline - time.monotonic()
        try:
            lane = Lane.connect(*place, FRAMES, timeout_s=max(0.1, left))
        except errors.Unreachable:
            if left <= 0:
                raise errors.RankLost(f"rank {other} at {place[0]}:{place[1]} did not answer", rank=other) from None
            pause.wait(_RETRY_S)
            continue
        try:
            open_handshake(lane, security, pb.LaneHello(), within_s=_HELLO_S)
            gathering.introduce(lane)
        except BaseException:
            lane.close()
            raise
        return lane


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


__all__ = ["FRAMES", "MOST_RANKS", "Mesh", "RankFrame", "connect"]
