"""Primary link: the sending end of the connection to a copy of one lock group.

It is the end of the primary, or that of a backup which has a copy of its own.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import count
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from shoal import errors
from shoal._system import host_id
from shoal._transport import (
    Connection,
    Frame,
    GrpcCalls,
    LaneFactory,
    SegmentUnavailable,
    Target,
    decoded,
    received_error,
)
from shoal._wire import Buffer, CallLayout, ShardLayout
from shoal._wire.limits import transfer_s
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import replica_pb2
from shoal_server.calling_server import CallingServer
from shoal_server.optimizers import compilation
from shoal_server.replication.copy_pace import CopyPace
from shoal_server.replication.late_sender import LateSender
from shoal_server.replication.pieces import RegionLayout, pieces_of, shared_piece
from shoal_server.replication.send_room import SendRoom
from shoal_server.replication.shared_gradients import SHARED_FROM_BYTES, SharedGradients
from shoal_server.shards import CopyStart, CopyState, InputLog, LockGroup, LockGroupEvent, Payload, encode_input

_log = structlog.get_logger(__name__)

# Inputs in one frame at most.
_BATCH = 256
# Bytes of gradients that are sent before the copy is complete, and that the backup has to keep meanwhile. Pushes wait
# for the copy if there are more.
_MOST_BACKLOG_BYTES = 256 << 20
_BACKLOG_WAIT_S = 20.0


class PrimaryLink:
    """The connection to a backup. A thread copies the group, and another one receives what the backup has.

    Args:
        group: the lock group.
        request: names the group, the term and the backup's server.
        identity: who this server is.
        on_broken: called on any thread when the connection of a complete copy has broken.
        pace: bounds the bytes a second of all copies; None means no bound.

    Attributes:
        group: as given.
        log: the log of the group.
        failure: why the copy has failed; None if it has not.
        copied_bytes: bytes of values and slots that were sent.
    """

    def __init__(
        self,
        group: LockGroup,
        request: pb.AddBackupRequest,
        identity: CallingServer,
        on_broken: Callable[[], object] = bool,
        pace: CopyPace | None = None,
    ) -> None:
        self.group, self._request, self._identity, self._on_broken = group, request, identity, on_broken
        self.log = InputLog(group.config.name, request.term, request.backup.server, self)
        self.failure: errors.ShoalError | None = None
        self.copied_bytes = 0
        self._sending = threading.Lock()  # held while frames are sent on _inputs; no other lock is taken under it
        self._inputs: Connection | None = None
        self._room: SendRoom | None = None  # of _inputs, and set before it
        self._lanes: list[Connection] = []
        self._pace, self._ended = pace or CopyPace(), threading.Event()
        self._closed = False
        self._pending: deque[Callable[[], replica_pb2.ReplicaInput]] = deque()  # each returns an input
        self._gradients, self._last_ticket = count(1), 0
        self._tickets: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._added = 0  # number of the last input
        self._shared: SharedGradients | None = None  # memory for gradients, if the backup is on this host
        self._backlog = 0  # bytes of gradients that were sent while the copy grew
        self._late = LateSender(self.gradient, self._send_all, self._fail_unexpectedly)

    @property
    def backup(self) -> pb.Peer:
        """The server of the backup."""
        return self._request.backup

    def start(self) -> None:
        """Starts to copy."""
        threading.Thread(target=self._run, name="copy", daemon=True).start()

    # Called by the log.

    def next_gradient(self) -> int:
        return next(self._gradients)

    def ticket(self, ticket: object) -> int:
        if isinstance(ticket, int):  # of a backup, which has the numbers of its primary
            self._last_ticket = max(self._last_ticket, ticket)
            return ticket
        number = self._tickets.get(ticket)
        if number is None:
            self._last_ticket += 1
            number = self._tickets[ticket] = self._last_ticket
        return number

    def gradient(self, payload: Payload) -> int:
        number = self.next_gradient()
        nbytes = sum(array.nbytes for array in payload.values())
        if self.log.state is CopyState.GROWING:
            if self._backlog + nbytes > _MOST_BACKLOG_BYTES:
                self.log.wait_for_growth(_BACKLOG_WAIT_S)
            self._backlog += nbytes
        with self._sending:
            return number if self._send_arrays(number, payload) else 0

    def begin_gradient(self, payload: Payload, sent: Callable[[int], object]) -> Callable[[], object]:
        number = None if self._late.busy else self._gradient_at_once(payload)
        if number is None:
            return self._late.add(payload, sent)
        sent(number)
        return bool

    def _gradient_at_once(self, payload: Payload) -> int | None:
        """Sends the arrays of a push if that needs no wait. Returns what `gradient` does; None if it needs a wait."""
        if self._closed:
            return 0
        if self.log.state is CopyState.GROWING or not self._sending.acquire(blocking=False):
            return None
        try:
            if not (self._inputs and self._room and self._room.takes(0)):
                return None
            number = self.next_gradient()
            if self._shared and payload and (region := self._shared.put(number, payload)):
                return number if self._attempt_shared(number, payload, region) else 0
            if not self._room.takes(sum(array.nbytes for array in payload.values())):
                return None
            return number if self._send_arrays(number, payload, shares=False) else 0
        finally:
            self._sending.release()

    def add(self, number: int, event: LockGroupEvent, gradient: int) -> None:
        self._added = number
        if self._shared and gradient:
            self._shared.name(gradient, number)
        self._pending.append(lambda: encode_input(event, number, lambda _: gradient, self.ticket))

    def add_hash(self, values_hash: int) -> None:
        self._pending.append(lambda: replica_pb2.ReplicaInput(values_hash=values_hash))

    def forget(self, gradient: int) -> None:
        if self._shared:
            self._shared.name(gradient, self._added + 1)
        self._pending.append(lambda: replica_pb2.ReplicaInput(gradient_dropped=gradient))

    def flush(self) -> None:
        self.flush_at_once()
        if self._pending and not self._closed:
            self._late.flush()

    def _send_all(self) -> None:
        if self._pending and not self._closed:
            with self._sending:
                self._send_pending()

    def flush_at_once(self) -> None:
        if self._pending and not self._closed and self._sending.acquire(blocking=False):
            try:
                # A socket that takes anything takes a batch of inputs: they are small, and it has room for a third.
                if self._inputs and self._room and self._room.takes(0):
                    self._send_pending(_BATCH)
            finally:
                self._sending.release()

    def _send_pending(self, most: float = math.inf) -> None:
        """Sends inputs, at most so many. Called with `_sending` held."""
        while self._pending and most > 0 and self._inputs and not self._closed:
            message = replica_pb2.ReplicaInputs()
            while self._pending and len(message.inputs) < _BATCH:
                message.inputs.append(self._pending.popleft()())
            self._attempt(Frame.INPUTS, [[message.SerializeToString()]])
            most -= len(message.inputs)

    def close(self) -> None:
        self._closed = True
        self._ended.set()
        self._late.close()
        for lane in [*self._lanes]:
            lane.close()
        self._pending.clear()
        if self._room:
            self._room.close()
        if self._shared:
            self._shared.close()

    def _send_arrays(self, number: int, payload: Payload, *, shares: bool = True) -> bool:
        """Sends the arrays of a push, with `_sending` held. Returns whether they were sent."""
        if shares and self._shared and payload and (region := self._shared.put(number, payload)):
            return self._attempt_shared(number, payload, region)
        frames = (piece for slab, array in payload.items() for piece in pieces_of(array, gradient=number, slab=slab))
        return not payload or self._attempt(Frame.GRADIENT, frames)

    def _attempt_shared(self, number: int, payload: Payload, region: int) -> bool:
        """Tells the backup in which region the arrays are. Returns whether it was told."""
        pieces = (shared_piece(gradient=number, slab=slab, region=region) for slab in payload)
        return self._attempt(Frame.GRADIENT, pieces)

    def _attempt(self, kind: Frame, payloads: Iterable[Sequence[Buffer]]) -> bool:
        """Sends frames on the first lane, with `_sending` held. A failure breaks the connection.

        Returns:
            Whether it was sent.
        """
        if not self._inputs or self._closed:
            return False
        try:
            self._inputs.stream(kind, payloads, end=False)
        except errors.ShoalError as error:
            self._fail(error)
            return False
        return True

    # The copy.

    def _run(self) -> None:
        try:
            request = self._request
            with ExitStack() as undo:
                with self._sending:  # inputs that come meanwhile follow the state
                    inputs = self._open(self._hello(replica_pb2.ReplicaHello.INPUTS))
                    copies = self._open(self._hello(replica_pb2.ReplicaHello.COPIES))
                    copies.detect_loss()  # this end sends on the other lane
                    start = self.group.begin_copy(self.log, request.keeps_term, as_backup=request.as_backup)
                    undo.callback(start.end)
                    self._send_on(inputs)
                    inputs.send(Frame.STATE, [start.state.SerializeToString()])
                    for number, payload in start.gradients.items():
                        self._send_arrays(number, payload)
                self._start_threads(copies)
                self._send_values(start)
        except errors.ShoalError as error:
            self._fail(error)
        except Exception as error:
            self._fail_unexpectedly(error)

    def _send_on(self, inputs: Connection) -> None:
        """Sends inputs on a lane from now on."""
        self._room = SendRoom(inputs.fileno())
        if self._closed:
            self._room.close()
        self._inputs = inputs

    def _start_threads(self, copies: Connection) -> None:
        """Starts to receive on a lane what the backup has, and to send what cannot be sent at once."""
        threading.Thread(target=self._receive, args=(copies,), name="copies", daemon=True).start()
        self._late.start()

    def _layouts(self) -> Iterable[ShardLayout]:
        """Returns the layouts of the shards that the backup has."""
        return [shard.layout for shard in self.group.shards]

    def _slab_values(self) -> Sequence[np.ndarray]:
        """Returns an array of the size and dtype of each slab that the backup has."""
        return self.group.slab_values

    def _hello(self, direction: replica_pb2.ReplicaHello.Direction.ValueType) -> replica_pb2.ReplicaHello:
        request, identity = self._request, self._identity
        hello = replica_pb2.ReplicaHello(
            direction=direction,
            job=request.job,
            generation=request.generation,
            group=request.group,
            term=request.term,
            server=identity.server,
            incarnation=identity.incarnation,
        )
        if direction != replica_pb2.ReplicaHello.COPIES:
            hello.config.CopyFrom(self.group.config.to_proto(self._layouts()))
            hello.kernels, hello.grant = compilation.processor(), request.grant
        return hello

    def _open(self, hello: replica_pb2.ReplicaHello) -> Connection:
        """Opens a lane to the backup's server, and waits until the server has accepted the replica."""
        request, identity = self._request, self._identity
        with ExitStack() as undo:
            calls = GrpcCalls(request.backup.address, identity.credentials)
            undo.callback(calls.close)
            offer = calls.attach()
            if not offer.address:
                raise errors.NotConfigured(
                    f"{request.backup.server} has no lanes, so it cannot have a backup; start it without --lanes 0"
                )
            target = Target(request.backup.address, CallLayout(()), calls, offer, identity.credentials)
            shared = self._memory_for(offer) if hello.HasField("config") else None
            lane, welcome = LaneFactory().connect(target, pb.LaneHello(segment=shared.offer() if shared else None))
        if shared:
            shared.shared()
            self._shared = shared if welcome.shared else None
            if not welcome.shared:
                shared.close()
        self._lanes.append(lane)
        if self._closed:
            lane.close()
        lane.send(Frame.REPLICA, [hello.SerializeToString()])
        kind = lane.begin(within_s=transfer_s(self.group.nbytes))
        if kind is Frame.ERROR:
            raise received_error(lane)
        lane.payload()
        if kind is not Frame.END:
            raise errors.BadFrame(f"{lane.peer} answered a replica's hello with {kind.name}")
        return lane

    def _memory_for(self, offer: pb.AttachReply) -> SharedGradients | None:
        """Returns memory for gradients if the backup's server is on this host, and gradients are large."""
        layout = RegionLayout(self._slab_values())
        if offer.host != host_id() or layout.nbytes < SHARED_FROM_BYTES:
            return None
        try:
            return SharedGradients(layout)
        except SegmentUnavailable as error:
            _log.warning("no shared memory with a backup on this host; gradients go over TCP", why=str(error))
            return None

    def _send_values(self, start: CopyStart) -> None:
        """Sends the values and slots. Inputs and gradients go in between."""
        for slab, snapshot in enumerate(start.snapshots):
            for slot, array in (("", snapshot.values), *snapshot.slots.items()):
                for piece in pieces_of(array, gradient=0, slab=slab, slot=slot):
                    self._pace.wait(len(piece[-1]), self._ended)
                    with self._sending:
                        if not self._attempt(Frame.SLOTS, [piece]):
                            return
                    self.copied_bytes += len(piece[-1])

    def _receive(self, copies: Connection) -> None:
        """Receives what the backup has, until the connection ends."""
        try:
            while True:
                number = _received_number(copies)
                if self._shared:
                    self._shared.copied(number)
                self.log.copied(number)
        except errors.ShoalError as error:
            self._fail(error)
        except Exception as error:
            self._fail_unexpectedly(error)

    def _fail_unexpectedly(self, error: Exception) -> None:
        _log.exception("a copy failed", job=self._request.job, group=self._request.group, exc_info=error)
        self._fail(errors.InternalError(f"the copy failed: {type(error).__name__}: {error}"))

    def _fail(self, error: errors.ShoalError) -> None:
        if self._closed:
            return
        self.log.fail(error.message)
        self.failure = error  # after the log knows, because `Copies` forgets a failed copy unless it was complete
        if self.log.state is CopyState.BROKEN:
            _log.warning(
                "the connection to a backup broke; answers wait until the coordinator has decided",
                job=self._request.job,
                group=self._request.group,
                server=self._request.backup.server,
                reason=error.message,
            )
            self._on_broken()


def _received_number(copies: Connection) -> int:
    """Waits for the number of the last input that the backup has."""
    kind = copies.begin()
    if kind is Frame.ERROR:
        raise received_error(copies)
    if kind is not Frame.COPIED:
        raise errors.BadFrame(f"{copies.peer} sent {kind.name} on the connection of a replica")
    return decoded(replica_pb2.Copied, copies).number


__all__ = ["PrimaryLink"]
