"""Refusals of a server that keeps a backup: of its primary, and of a process that says that it is the primary."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from shoal import _rpc, consistency, errors, optim
from shoal._security import AccessRole, Credentials
from shoal._transport import PARAMETER_SERVER, Frame, GrpcCalls, TokenSecurity, open_handshake
from shoal._transport.lane import Lane
from shoal.v1 import header_pb2, replica_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.replication import Backups
from shoal_server.replication.received import ReplicaMemory
from shoal_server.shards.store import ShardStore
from support.clusters.secure_rig import SecureRig, secure_rig
from support.fuzzing.replica_targets import conversation, hello, no_region, received
from support.fuzzing.wire_targets import JOB, WORKER, frame

MEMORY_BYTES = 1 << 20
ADMISSION = replica_pb2.ReplicaInput(number=1, admitted=pb.WorkerAdmission(worker="y", incarnation=1, rank=7))


@pytest.fixture(scope="module")
def copy() -> list[bytes]:
    """Returns the frames of a copy: the hello, the state and the values."""
    return conversation(consistency.Asynchronous(), optim.Adam(0.1))[0]


@pytest.fixture
def memory() -> ReplicaMemory:
    return ReplicaMemory(MEMORY_BYTES)


def piece(gradient: int, start: int, elements: int, slab: int = 0, *, cut: int = 0) -> bytes:
    place = replica_pb2.ArrayPiece(gradient=gradient, slab=slab, start=start).SerializeToString()
    payload = len(place).to_bytes(4, "little") + place + bytes(4 * elements)
    return frame(Frame.GRADIENT, payload[: len(payload) - cut])


def inputs(*messages: replica_pb2.ReplicaInput) -> bytes:
    return frame(Frame.INPUTS, replica_pb2.ReplicaInputs(inputs=messages).SerializeToString())


def staged(gradient: int, weight: float = 1.0) -> bytes:
    push = replica_pb2.ReplicaContribution(worker=WORKER, incarnation=1, step=0, weight=weight, gradient=gradient)
    return inputs(replica_pb2.ReplicaInput(number=1, staged=push))


def state_with_waiting_push(sent: bytes) -> bytes:
    state = replica_pb2.GroupState.FromString(sent[8:])
    state.permits.waiting.add(place=replica_pb2.Place(rank=0, incarnation=1), ticket=1)
    return frame(Frame.STATE, state.SerializeToString())


@pytest.mark.parametrize(
    ("sent", "error", "says"),
    [
        (piece(1, 1, 2), errors.BadFrame, "element 1 of gradient 1 after 0 elements"),
        (piece(1, 0, 13), errors.BadFrame, "52 bytes for element 0 of an array of 12 elements"),
        (piece(1, 0, 0, cut=1), errors.BadFrame, "a piece of an array that cannot be read"),
        (piece(1, 0, 1, slab=9), errors.BadFrame, "there is none"),
        (piece(1, 0, 2) + staged(1), errors.BadFrame, "gradient 1, which is incomplete"),
        (staged(1, float("inf")), errors.BadRequest, "weight inf"),
        (inputs(replica_pb2.ReplicaInput(number=2)), errors.BadFrame, "input 2 after input 0"),
    ],
    ids=["start", "long", "short frame", "slab", "incomplete", "weight", "number"],
)
def test_what_is_not_valid_ends_the_connection(
    copy: list[bytes], memory: ReplicaMemory, sent: bytes, error: type[errors.ShoalError], says: str
) -> None:
    with pytest.raises(error, match=says):
        received(b"".join([*copy, sent]), memory)
    assert memory.used == 0


def test_a_state_that_contradicts_its_job_is_refused(copy: list[bytes], memory: ReplicaMemory) -> None:
    with pytest.raises(errors.BadRequest, match="its pushes need no permit"):
        received(b"".join([copy[0], state_with_waiting_push(copy[1]), *copy[2:], inputs(ADMISSION)]), memory)


def test_gradients_that_no_input_names_take_limited_memory(copy: list[bytes]) -> None:
    memory = ReplicaMemory(20 << 10)
    with pytest.raises(errors.LimitExceeded, match="the limit REPLICA_BYTES is 20480"):
        received(b"".join([*copy, *(piece(number, 0, 12) for number in range(1, 40))]), memory)
    assert memory.used == 0


def test_inputs_before_the_values_take_limited_memory(copy: list[bytes]) -> None:
    memory = ReplicaMemory(20 << 10)
    early = (inputs(replica_pb2.ReplicaInput(number=number, folded=1)) for number in range(1, 40))
    with pytest.raises(errors.LimitExceeded, match="REPLICA_BYTES"):
        received(b"".join([*copy[:2], *early]), memory)
    assert memory.used == 0


def test_gradients_that_were_used_or_dropped_take_no_memory(copy: list[bytes]) -> None:
    memory = ReplicaMemory(20 << 10)
    dropped = (
        piece(number, 0, 12) + inputs(replica_pb2.ReplicaInput(gradient_dropped=number)) for number in range(1, 99)
    )
    assert received(b"".join([*copy, *dropped]), memory)


def without_shards(message: replica_pb2.ReplicaHello) -> None:
    del message.config.shards[:]


def of_another_group(message: replica_pb2.ReplicaHello) -> None:
    message.group = 1


def of_another_job(message: replica_pb2.ReplicaHello) -> None:
    message.job = "other"


def with_controls(message: replica_pb2.ReplicaHello) -> None:
    message.server = "a\nb"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_shards, "not that of lock group 0"),
        (of_another_group, "not that of lock group 1"),
        (of_another_job, "not that of lock group 0 of job other"),
        (with_controls, "name of a server"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused(
    copy: list[bytes], memory: ReplicaMemory, change: Callable[[replica_pb2.ReplicaHello], None], says: str
) -> None:
    message = replica_pb2.ReplicaHello.FromString(copy[0][8:])
    change(message)
    with pytest.raises(errors.BadRequest, match=says):
        received(frame(Frame.REPLICA, message.SerializeToString()), memory)


class Primaries:
    """Processes that open connections to one server, each on a thread that serves it."""

    def __init__(self) -> None:
        self._store = ShardStore()
        self.backups = Backups(self._store)

    @contextmanager
    def open(self, payload: bytes) -> Iterator[Lane]:
        near, far = socket.socketpair()
        lane = Lane(near, "primary", PARAMETER_SERVER)
        thread = threading.Thread(target=self._serve, args=(lane, payload))
        thread.start()
        with closing(Lane(far, "server", PARAMETER_SERVER)) as opened:
            yield opened
        thread.join()

    def _serve(self, lane: Lane, payload: bytes) -> None:
        with closing(lane), suppress(errors.ShoalError):
            self.backups.serve(lane, memoryview(payload), no_region)


def answer(lane: Lane) -> Frame:
    """Returns the kind of the next frame. Raises the error that it carries."""
    kind, payload = lane.receive(within_s=10)
    if kind is Frame.ERROR:
        raise _rpc.error_of(header_pb2.ErrorDetail.FromString(bytes(payload)))
    return Frame(kind)


def test_only_the_primary_gets_the_answers_and_only_once(copy: list[bytes]) -> None:
    primaries, second = Primaries(), hello()
    other = replica_pb2.ReplicaHello()
    other.CopyFrom(second)
    other.server = "eve"
    with primaries.open(copy[0][8:]) as first:
        assert answer(first) is Frame.END
        with primaries.open(other.SerializeToString()) as lane, pytest.raises(errors.Moved, match="no copy"):
            answer(lane)
        with primaries.open(second.SerializeToString()) as copies:
            assert answer(copies) is Frame.END
            with primaries.open(second.SerializeToString()) as lane, pytest.raises(errors.BadRequest, match="twice"):
                answer(lane)


def test_another_server_does_not_replace_a_backup_in_the_term_of_its_primary(copy: list[bytes]) -> None:
    primaries = Primaries()
    other = replica_pb2.ReplicaHello.FromString(copy[0][8:])
    other.server = "eve"
    with primaries.open(copy[0][8:]) as first:
        assert answer(first) is Frame.END
        with primaries.open(other.SerializeToString()) as lane, pytest.raises(errors.Moved, match="p is the primary"):
            answer(lane)
        other.term += 1
        with primaries.open(other.SerializeToString()) as lane:
            assert answer(lane) is Frame.END


@pytest.fixture(scope="module")
def rig() -> Iterator[SecureRig]:
    with secure_rig() as running:
        yield running


PRIMARY: dict[str, Any] = {"job": JOB, "worker": "p", "incarnation": 1}


@pytest.mark.parametrize(
    ("role", "other", "says"),
    [
        (AccessRole.PEER, {"job": "other"}, "the ticket is for"),
        (AccessRole.PEER, {"worker": "eve"}, "the ticket is for"),
        (AccessRole.PEER, {"incarnation": 2}, "the ticket is for"),
        (AccessRole.TRAINER, {}, "is no server"),
        (AccessRole.OBSERVER, {}, "the ticket is for"),
    ],
    ids=["job", "server", "incarnation", "trainer", "observer"],
)
@pytest.mark.parametrize("direction", [Frame.INPUTS, Frame.COPIED], ids=["inputs", "copies"])
def test_only_the_server_of_the_ticket_is_a_primary(
    rig: SecureRig, copy: list[bytes], role: AccessRole, other: dict[str, Any], says: str, direction: Frame
) -> None:
    ticket = rig.token(role, **{**PRIMARY, **other})
    payload = copy[0][8:] if direction is Frame.INPUTS else hello().SerializeToString()
    with closing(GrpcCalls(rig.server.address, Credentials(token=lambda: ticket))) as calls:
        address = _rpc.parse_address(calls.attach().address)
    before = rig.server.store.load()
    with closing(Lane.connect(*address, PARAMETER_SERVER, timeout_s=5)) as lane:
        open_handshake(lane, TokenSecurity(ticket.encode()), pb.LaneHello(), within_s=5)
        lane.send(Frame.REPLICA, [payload])
        with pytest.raises(errors.Forbidden, match=says):
            answer(lane)
    assert rig.server.store.load() == before, "memory for a backup of a stranger"
