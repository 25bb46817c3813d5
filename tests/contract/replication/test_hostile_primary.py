"""Refusals of a server that keeps a backup: of its primary, and of a process that says that it is the primary."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import pytest

from shoal import _rpc, consistency, errors, optim
from shoal._security import AccessRole, CopyGrant, Credentials
from shoal._security.tokens import TokenSigner
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


def split_off(*shards: int) -> bytes:
    return inputs(replica_pb2.ReplicaInput(number=1, group_split=replica_pb2.GroupSplitInput(shards=shards, term=4)))


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
        (split_off(9), errors.BadRequest, r"the shards \[9\], which this backup cannot do"),
        (split_off(0), errors.BadRequest, r"the shards \[0\], which this backup cannot do"),
        (split_off(), errors.BadRequest, r"the shards \[\], which this backup cannot do"),
    ],
    ids=["start", "long", "short frame", "slab", "incomplete", "weight", "number", "shards", "name", "no shards"],
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
    before = rig.server.store.load()
    with replica_lane(rig, ticket, payload) as lane, pytest.raises(errors.Forbidden, match=says):
        answer(lane)
    assert rig.server.store.load() == before, "memory for a backup of a stranger"


@contextmanager
def replica_lane(rig: SecureRig, ticket: str, payload: bytes) -> Iterator[Lane]:
    """Opens a connection of a replica to the server, which has not answered yet."""
    with closing(GrpcCalls(rig.server.address, Credentials(token=lambda: ticket))) as calls:
        address = _rpc.parse_address(calls.attach().address)
    with closing(Lane.connect(*address, PARAMETER_SERVER, timeout_s=5)) as lane:
        open_handshake(lane, TokenSecurity(ticket.encode()), pb.LaneHello(), within_s=5)
        lane.send(Frame.REPLICA, [payload])
        yield lane


# The copy of a job that has no shards on the server of the rig. The primary is a server of the job, with a ticket.
GRANTED = CopyGrant("copied", generation=1, group=0, term=3, server="p", incarnation=1)


def incarnation_of(rig: SecureRig) -> int:
    return next(each.incarnation for each in rig.client.status().members if each.member == "server-0")


@contextmanager
def granted_lane(
    rig: SecureRig, copy: list[bytes], asked: CopyGrant, grant: Callable[..., str] | None = None
) -> Iterator[Lane]:
    """Opens the first connection of a copy.

    Args:
        rig: the cluster.
        copy: frames of a copy.
        asked: the copy that the primary asks for.
        grant: returns its grant, for the rig, its server and the server's incarnation; None for a valid one.
    """
    ticket = rig.token(AccessRole.PEER, job=asked.job, worker=asked.server, incarnation=asked.incarnation)
    backup = "server-0", incarnation_of(rig)
    message = replica_pb2.ReplicaHello.FromString(copy[0][8:])
    message.job = message.config.job = asked.job
    message.generation = message.config.generation = asked.generation
    message.group, message.term = asked.group, asked.term
    message.server, message.incarnation = asked.server, asked.incarnation
    message.grant = grant(rig, *backup) if grant else asked.signed(rig.signer, *backup)
    with replica_lane(rig, ticket, message.SerializeToString()) as lane:
        yield lane


def expired(rig: SecureRig, backup: str, incarnation: int) -> str:
    return rig.signer.sign_claims(asdict(GRANTED), audience=f"backup:{backup}:{incarnation}", valid_s=-1)


@pytest.mark.parametrize(
    ("grant", "says"),
    [
        (lambda *_: "", "it has no grant"),
        (lambda rig, *backup: GRANTED.signed(TokenSigner(TokenSigner.new_key()), *backup), "did not sign"),
        (lambda rig, *_: rig.token(AccessRole.PEER, job=GRANTED.job, worker="p", incarnation=1), "did not sign"),
        (expired, "expired"),
        (lambda rig, _, life: GRANTED.signed(rig.signer, "server-1", life), "for 'backup:server-1:"),
        (lambda rig, server, life: GRANTED.signed(rig.signer, server, life + 1), "and this is 'backup:server-0:"),
        (lambda rig, *backup: replace(GRANTED, job="other").signed(rig.signer, *backup), "for job"),
        (lambda rig, *backup: replace(GRANTED, generation=2).signed(rig.signer, *backup), "for generation"),
        (lambda rig, *backup: replace(GRANTED, group=1).signed(rig.signer, *backup), "for group"),
        (lambda rig, *backup: replace(GRANTED, term=4).signed(rig.signer, *backup), "for term"),
        (lambda rig, *backup: replace(GRANTED, server="q").signed(rig.signer, *backup), "for server"),
        (lambda rig, *backup: replace(GRANTED, incarnation=2).signed(rig.signer, *backup), "for incarnation"),
    ],
    ids=[
        "none",
        "forged",
        "ticket",
        "expired",
        "backup",
        "life of the backup",
        "job",
        "generation",
        "group",
        "term",
        "server",
        "incarnation",
    ],
)
def test_a_server_of_the_job_needs_the_grant_of_this_copy(
    rig: SecureRig, copy: list[bytes], grant: Callable[..., str], says: str
) -> None:
    before = rig.server.store.load()
    with granted_lane(rig, copy, GRANTED, grant) as lane, pytest.raises(errors.Forbidden, match=says):
        answer(lane)
    assert rig.server.store.load() == before, "memory for a copy that was not granted"


def test_the_coordinator_grants_a_copy(rig: SecureRig, copy: list[bytes]) -> None:
    with granted_lane(rig, copy, GRANTED) as lane:
        assert answer(lane) is Frame.END


def test_a_grant_of_an_earlier_term_is_worth_nothing(rig: SecureRig, copy: list[bytes]) -> None:
    later = replace(GRANTED, job="moved", term=4, server="q")
    with granted_lane(rig, copy, later) as lane:
        assert answer(lane) is Frame.END
        earlier = replace(later, term=3, server="p")
        with (
            granted_lane(rig, copy, earlier) as replayed,
            pytest.raises(errors.Moved, match="term 3 of lock group 0 is over"),
        ):
            answer(replayed)
