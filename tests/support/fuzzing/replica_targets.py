"""Fuzz targets of the connections between servers: what a primary may send to a backup."""

import random
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from shoal import consistency, errors, optim
from shoal._transport import PARAMETER_SERVER, Frame
from shoal._transport.lane import Lane
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import replica_pb2
from shoal_server.optimizers import compilation
from shoal_server.replication import Backups
from shoal_server.replication.pieces import pieces_of
from shoal_server.replication.received import ReplicaMemory
from shoal_server.shards import InputLog, LockGroup, LockGroupEvent, Payload, Stamp, encode_input
from shoal_server.shards.store import ShardStore
from support.fuzzing.campaign import Target
from support.fuzzing.messages import Drawer
from support.fuzzing.mutator import mutated
from support.fuzzing.wire_targets import JOB, WORDS, WORKER, frame, job_config, placement

_PRIMARY, _TERM = "p", 1
_MOST_BYTES = 1 << 20


class _Recorder:
    """Records the frames that a primary sends, instead of sending them."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self._gradients, self._tickets = count(1), count(1)

    def next_gradient(self) -> int:
        return next(self._gradients)

    def ticket(self, _ticket: object) -> int:
        return next(self._tickets)

    def gradient(self, payload: Payload) -> int:
        number = self.next_gradient()
        for slab, array in payload.items():
            self.frames += _pieces(Frame.GRADIENT, array, gradient=number, slab=slab)
        return number

    def begin_gradient(self, payload: Payload, sent: Callable[[int], object]) -> Callable[[], object]:
        sent(self.gradient(payload))
        return bool

    def add(self, number: int, event: LockGroupEvent, gradient: int) -> None:
        self._record(encode_input(event, number, lambda _: gradient, self.ticket))

    def add_hash(self, values_hash: int) -> None:
        self._record(replica_pb2.ReplicaInput(values_hash=values_hash))

    def forget(self, gradient: int) -> None:
        self._record(replica_pb2.ReplicaInput(gradient_dropped=gradient))

    def flush(self) -> None: ...

    def flush_at_once(self) -> None: ...

    def close(self) -> None: ...

    def _record(self, message: replica_pb2.ReplicaInput) -> None:
        self.frames.append(frame(Frame.INPUTS, replica_pb2.ReplicaInputs(inputs=[message]).SerializeToString()))


def _pieces(kind: Frame, array: np.ndarray, **place: Any) -> list[bytes]:
    return [frame(kind, b"".join(bytes(part) for part in piece)) for piece in pieces_of(array, **place)]


def hello(config: pb.CreateShardsRequest | None = None) -> replica_pb2.ReplicaHello:
    """Returns the hello of the first lane if there is a configuration, otherwise that of the second one."""
    direction = replica_pb2.ReplicaHello.INPUTS if config else replica_pb2.ReplicaHello.COPIES
    kernels = compilation.processor() if config else ""
    names: dict[str, Any] = {"job": JOB, "generation": 1, "term": _TERM, "server": _PRIMARY, "incarnation": 1}
    return replica_pb2.ReplicaHello(direction=direction, config=config, kernels=kernels, **names)


def conversation(mode: consistency.Consistency, optimizer: optim.Optimizer) -> tuple[list[bytes], list[bytes]]:
    """Returns what a primary sends on its first lane: the hello and the copy, and then inputs.

    Args:
        mode: the consistency mode.
        optimizer: the optimizer.
    """
    group = LockGroup(job_config(mode, optimizer), [shard.layout for shard in placement().shards])
    group.admit(WORKER, 1, 0)
    recorder = _Recorder()
    log = InputLog(JOB, _TERM, "b", recorder)
    start = group.begin_copy(log)
    config = group.config.to_proto(shard.layout for shard in group.shards)
    copy = [
        frame(Frame.REPLICA, hello(config).SerializeToString()),
        frame(Frame.STATE, start.state.SerializeToString()),
    ]
    for slab, snapshot in enumerate(start.snapshots):
        for slot, array in (("", snapshot.values), *snapshot.slots.items()):
            copy += _pieces(Frame.SLOTS, array, gradient=0, slab=slab, slot=slot)
    start.end()
    for step in range(2):
        payload = {slab: np.ones(it.values.size, it.values.dtype) for slab, it in enumerate(start.snapshots)}
        log.send_gradient(payload)
        group.stage(Stamp(WORKER, 1, step), 1.0, step, payload)
        group.commit(Stamp(WORKER, 1, step))
    group.set_learning_rate(optim.ConstantLR(0.5))
    group.admit("x", 2, 1)
    group.fence("x", 2)
    group.release("x", 2, 0)
    recorder.add_hash(group._stored.values_hash())  # noqa: SLF001 - as the group does after many versions
    group.close()
    return copy, recorder.frames


class Replicas:
    """Everything that a primary may send to a server that keeps its backup."""

    name = "replicas"
    allowed: tuple[type[Exception], ...] = ()

    def start(self) -> None:
        self._memory = ReplicaMemory(_MOST_BYTES)
        self._conversations = [
            conversation(consistency.Asynchronous(), optim.Adam(0.1)),
            conversation(consistency.Synchronous(), optim.SGD(0.1)),
            conversation(consistency.BoundedStaleness(1), optim.Momentum(0.1)),
        ]
        self._drawer = Drawer(
            WORDS | {"gradient": [1, 2, 3], "slab": [0, 1, 2], "slot": ["", "m", "v"], "start": [0, 1], "rank": [0, 1]}
        )
        for copy, inputs in self._conversations:
            assert received(b"".join([*copy, *inputs]), self._memory), "a valid conversation was refused"

    def draw(self, draw: random.Random) -> bytes:
        copy, inputs = draw.choice(self._conversations)
        copy, inputs = [*copy], [*inputs]
        way = draw.randrange(4)
        if way == 0:  # a changed hello or copy
            index = draw.randrange(len(copy))
            copy[index] = self._changed(draw, copy[index])
        elif way == 1:
            index = draw.randrange(len(inputs))
            inputs[index] = self._changed(draw, inputs[index])
        elif way == 2:
            inputs = [self._drawn(draw, number) for number in range(1, draw.randint(2, 6))]
        return mutated(draw, [b"".join([*copy, *inputs])]) if way == 3 else b"".join([*copy, *inputs])

    def _changed(self, draw: random.Random, sent: bytes) -> bytes:
        """Returns a frame with other fields, or other bytes."""
        kind, payload = Frame(sent[0]), sent[8:]
        message = {
            Frame.REPLICA: replica_pb2.ReplicaHello,
            Frame.STATE: replica_pb2.GroupState,
            Frame.INPUTS: replica_pb2.ReplicaInputs,
        }.get(kind)
        if message:
            return frame(kind, self._drawer.encoded(draw, message, [payload]))
        return frame(kind, self._piece(draw, payload) if draw.random() < 0.5 else mutated(draw, [payload]))

    def _piece(self, draw: random.Random, payload: bytes) -> bytes:
        place = self._drawer.encoded(draw, replica_pb2.ArrayPiece)
        return len(place).to_bytes(4, "little") + place + payload[4 + payload[0] :]

    def _drawn(self, draw: random.Random, number: int) -> bytes:
        if draw.random() < 0.2:
            return frame(Frame.GRADIENT, self._piece(draw, bytes(4 + 8 * draw.randrange(12))))
        message = replica_pb2.ReplicaInputs()
        with suppress(DecodeError):  # the drawn bytes may be no message
            message.MergeFromString(self._drawer.encoded(draw, replica_pb2.ReplicaInputs))
        del message.inputs[1:]
        for it in message.inputs:
            it.number = number
        return frame(Frame.INPUTS, message.SerializePartialToString())

    def run(self, data: bytes) -> None:
        try:
            received(data, self._memory)
        except errors.InternalError as error:
            # The backup differs from its primary, or cannot follow it: the message says so, and the backup is closed.
            refused = re.search(r"has other values than its primary|unusable: (\w+):", error.message)
            if not refused or (refused[1] and not hasattr(errors, refused[1])):
                raise

    def stop(self) -> None:
        """Nothing to free."""


def received(data: bytes, memory: ReplicaMemory) -> bytes:
    """Lets a server receive what a primary sends on its first lane, which ends then.

    Args:
        data: what is sent.
        memory: counts the gradients.

    Returns:
        What the server has sent on the second lane.

    Raises:
        ShoalError: why the server has ended the connection.
    """
    store = ShardStore(most_bytes=_MOST_BYTES)
    backups = Backups(store, memory=memory)
    near, far = socket.socketpair()
    copies, ours = socket.socketpair()
    with near, far, copies, ours:
        far.sendall(data[:60_000])
        far.shutdown(socket.SHUT_WR)
        answers = threading.Thread(target=_answer, args=(backups, far, copies, _second_hello(data)))
        answers.start()
        lane = Lane(near, "primary", PARAMETER_SERVER, stall_s=5.0)
        try:
            kind, payload = lane.receive()
            if kind is Frame.REPLICA:
                backups.serve(lane, payload, no_region)
        except errors.Unreachable:  # the end of the data
            pass
        finally:
            lane.close()
            answers.join()
            store.clear()
        ours.setblocking(False)
        with suppress(OSError):
            return ours.recv(1 << 16)
    return b""


def _second_hello(data: bytes) -> bytes:
    """Returns the hello of the second lane that goes with the first one."""
    second = hello()
    with suppress(DecodeError):
        first = replica_pb2.ReplicaHello.FromString(data[8 : 8 + int.from_bytes(data[4:8], "little")])
        for name in ("job", "generation", "group", "term", "server", "incarnation"):
            setattr(second, name, getattr(first, name))
    return second.SerializeToString()


def _answer(backups: Backups, far: socket.socket, copies: socket.socket, hello: bytes) -> None:
    """Opens the second lane when the server has accepted the first one."""
    with suppress(OSError):
        if far.recv(8)[:1] == bytes([Frame.END]):
            lane = Lane(copies, "primary", PARAMETER_SERVER, stall_s=5.0)
            with suppress(errors.ShoalError):
                backups.serve(lane, memoryview(hello), no_region)
            lane.close()


def no_region(number: int) -> np.ndarray:
    """Refuses each region, as a lane without a segment does."""
    raise errors.BadRequest(f"a call names region {number} of shared memory; this lane has 0 regions")


def targets() -> list[Target]:
    """Returns the targets of this module."""
    return [Replicas()]
