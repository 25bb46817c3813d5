"""Authorization: every call of every service, with each kind of token that is not enough for it."""

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import shoal
from shoal import _rpc, errors
from shoal._role.http_endpoints import METRICS_CALL
from shoal._rpc.callers import set_caller
from shoal._security import (
    OPEN_CALLS,
    PERMISSIONS,
    AccessFile,
    AccessRole,
    Authorizer,
    Credentials,
    Principal,
    authorization,
    check_own,
)
from shoal._security.tokens import TokenVerifier
from shoal._transport import (
    PARAMETER_SERVER,
    Frame,
    GrpcCalls,
    Lane,
    ServerConnection,
    TokenSecurity,
    open_handshake,
    received_error,
)
from shoal._wire import CallLayout, SlabArrays
from shoal.v1 import coordinator_pb2, job_pb2, token_pb2
from shoal.v1 import header_pb2 as headers
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub
from shoal_coordinator.process import CoordinatorConfig, start_coordinator
from shoal_server.metrics import ServerMetrics
from shoal_server.serving.service import DataService
from shoal_server.shards.machine.consistency import SynchronousMode
from shoal_server.shards.machine.mode import PermitLimits
from support.clusters.secure_rig import (
    SecureRig,
    calls_on_jobs,
    expired,
    of_another_cluster,
    request_of,
    secure_rig,
)
from support.waiting import wait_until

# Without that of /metrics, which is no gRPC call.
CLOSED = sorted(PERMISSIONS.keys() - OPEN_CALLS - {METRICS_CALL})


@pytest.fixture(scope="module")
def rig() -> Iterator[SecureRig]:
    with secure_rig() as running:
        yield running


def address_of(rig: SecureRig, call: str) -> str:
    """Returns the address of the process that answers a call."""
    return rig.server.address if "ParameterServer" in call else rig.coordinator.address


def statuses_without_message(address: str, calls: Iterable[tuple[str, str]]) -> list[grpc.StatusCode]:
    """Makes calls, each with a token, that send their headers and never a message. Returns how they end."""
    never = threading.Event()

    def requests() -> Iterator[Any]:
        never.wait(20)
        yield from ()

    with grpc.insecure_channel(address) as channel:
        made: list[Any] = [
            channel.stream_stream(f"/{call}")(requests(), timeout=10, metadata=authorization(token))
            for call, token in calls
        ]
        try:
            return [replies.code() for replies in made]
        finally:
            never.set()


def statuses(rig: SecureRig, tokens: list[tuple[str, str]]) -> dict[tuple[str, str], grpc.StatusCode]:
    """Makes calls without a message, each with a token. Returns how they end."""
    found: dict[tuple[str, str], grpc.StatusCode] = {}
    for address in (rig.coordinator.address, rig.server.address):
        own = [(call, token) for call, token in tokens if address_of(rig, call) == address]
        found |= zip(own, statuses_without_message(address, own), strict=True)
    return found


def calling(rig: SecureRig, token: str) -> _rpc.CoordinatorClient:
    """Returns a client of the coordinator that presents a token."""
    return _rpc.CoordinatorClient(rig.coordinator.address, credentials=Credentials(token=lambda: token))


def revoked(rig: SecureRig, role: AccessRole) -> str:
    """Returns a token that was revoked."""
    made, _ = rig.access.create("leaked", "reader", 60)
    rig.access.revoke(made.id)
    rig.server.authorizer.revoke(rig.access.revoked)  # as with the next heartbeat
    return rig.signer.sign(Principal("leaked", role, made.id), valid_s=60)


Token = Callable[[SecureRig, AccessRole], str]
BAD: dict[str, Token] = {
    "none": lambda _rig, _role: "",
    "nonsense": lambda _rig, _role: "nonsense",
    "of another cluster": lambda _rig, role: of_another_cluster(role),
    "expired": expired,
    "revoked": revoked,
}


@pytest.mark.parametrize("kind", BAD)
def test_every_call_without_a_valid_token_is_refused_before_its_message(rig: SecureRig, kind: str) -> None:
    roles = {call: min(PERMISSIONS[call]) for call in CLOSED}
    tokens = {role: BAD[kind](rig, role) for role in {*roles.values()}}
    made = [(call, tokens[roles[call]]) for call in CLOSED]
    assert statuses(rig, made) == dict.fromkeys(made, grpc.StatusCode.UNAUTHENTICATED)


def test_every_call_of_another_role_is_refused_before_its_message(rig: SecureRig) -> None:
    # A token of the coordinator is accepted only by the server that it names.
    tokens = {role: rig.token(role) for role in frozenset(AccessRole) - {AccessRole.COORDINATOR}}
    made = [(call, token) for role, token in tokens.items() for call in CLOSED if role not in PERMISSIONS[call]]
    assert statuses(rig, made) == dict.fromkeys(made, grpc.StatusCode.PERMISSION_DENIED)


def test_a_server_accepts_only_the_coordinators_token_for_itself(rig: SecureRig) -> None:
    """Each other server knows the token that the coordinator presents to it, and could use it here."""
    call = "shoal.v1.ParameterServer/DropShards"
    own = rig.access.servers.token_for("server-0")
    refused = [
        (rig.server.address, call, rig.token(AccessRole.COORDINATOR)),  # for no server
        (rig.server.address, call, rig.access.servers.token_for("server-1")),
        (rig.coordinator.address, "shoal.v1.Coordinator/GetStatus", own),
    ]
    for address, method, token in refused:
        assert statuses_without_message(address, [(method, token)]) == [grpc.StatusCode.UNAUTHENTICATED]
    with grpc.insecure_channel(rig.server.address) as channel:
        drop: Any = channel.unary_unary(f"/{call}", request_serializer=pb.DropShardsRequest.SerializeToString)
        drop(pb.DropShardsRequest(job="none"), timeout=10, metadata=authorization(own))


def test_probes_need_no_token(rig: SecureRig) -> None:
    for address in (rig.coordinator.address, rig.server.address):
        with grpc.insecure_channel(address) as channel:
            check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert check(b"", timeout=10)


@pytest.mark.parametrize("call", calls_on_jobs(role=AccessRole.TRAINER))
def test_a_ticket_of_another_job_is_refused_by_the_coordinator(rig: SecureRig, call: str) -> None:
    own: dict[str, Any] = {"job": "job", "worker": "w", "incarnation": 1}
    request = request_of(call, **own)
    wrong: dict[str, Any] = {"job": "other", "worker": "x", "incarnation": 2}
    others = [
        rig.token(AccessRole.TRAINER, **{**own, name: value})
        for name, value in wrong.items()
        if name in request.DESCRIPTOR.fields_by_name
    ]
    for ticket in others:
        client = calling(rig, ticket)
        try:
            with pytest.raises(errors.Forbidden, match="the ticket is for"):
                client.call(getattr(client.jobs, call), request, retry_for_s=0)
        finally:
            client.close()


def stamp(rig: SecureRig) -> headers.Stamp:
    """Returns the stamp of the rig's session."""
    return headers.Stamp(job="job", worker=rig.session.worker, incarnation=rig.incarnation, generation=1)


@pytest.mark.parametrize("method", ["pull", "push", "assign", "commit"])
@pytest.mark.parametrize(
    "other", [{"job": "other"}, {"worker": "somebody"}, {"incarnation": 99}], ids=["job", "worker", "incarnation"]
)
def test_a_ticket_of_another_participant_is_refused_by_the_server(
    rig: SecureRig, method: str, other: dict[str, Any]
) -> None:
    own = {"job": "job", "worker": rig.session.worker, "incarnation": rig.incarnation}
    ticket = rig.token(AccessRole.TRAINER, **{**own, **other})
    calls = GrpcCalls(rig.server.address, Credentials(token=lambda: ticket))
    push = pb.PushRequest(header=pb.PushHeader(stamp=stamp(rig), shards=[0])).SerializeToString()
    made: dict[str, Callable[[], object]] = {
        "pull": lambda: list(calls.pull(pb.PullRequest(stamp=stamp(rig), shards=[0]), 0)),
        "push": lambda: calls.push(iter([[push]]), 0),
        "assign": lambda: calls.assign(iter([[push]]), 0),
        "commit": lambda: calls.commit(pb.CommitRequest(stamp=stamp(rig), shards=[0])),
    }
    prefix = "shoal.v1.ParameterServer/"
    with_tickets = {name for name, roles in PERMISSIONS.items() if AccessRole.TRAINER in roles and prefix in name}
    assert with_tickets == {prefix + name.title() for name in (*made, "attach")}  # test_trainer_tickets has Attach
    try:
        with pytest.raises(errors.Forbidden, match="the ticket is for"):
            made[method]()
    finally:
        calls.close()


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_a_pull_that_waits_ends_when_its_token_is_revoked(
    rig: SecureRig, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TRANSPORT", transport)
    job, store = f"waits-{transport}", rig.server.store
    with rig.client.session(job, variables={"w": np.zeros(3)}, consistency=shoal.Synchronous()) as session:
        life = next(each.incarnation for each in rig.client.status().members if each.member == session.worker)
        ticket = rig.token(AccessRole.TRAINER, job=job, worker=session.worker, incarnation=life)
        [generation] = [group.config.generation for group in store.hosted.all() if group.config.name == job]
        own = headers.Stamp(job=job, worker=session.worker, incarnation=life, generation=generation)
        connection = ServerConnection(rig.server.address, CallLayout([]), transport, Credentials(token=lambda: ticket))
        with ThreadPoolExecutor(1) as thread, closing(connection):
            pulled = thread.submit(connection.pull, pb.PullRequest(stamp=own, shards=[0], ahead=1), None)
            wait_until(lambda: store.queues()[0] or pulled.done(), what="a pull that waits")
            rig.server.authorizer.revoke(["test"])
            with pytest.raises(errors.Unauthenticated, match="was revoked"):
                pulled.result(10)
        rig.server.authorizer.revoke([])
        assert store.queues()[0] == 0


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_a_push_that_waits_is_refused_when_its_token_is_revoked(
    rig: SecureRig, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TRANSPORT", transport)
    monkeypatch.setattr(SynchronousMode, "permit_limits", lambda _mode, _nbytes: PermitLimits(1, 1))
    job, store = f"pushes-{transport}", rig.server.store
    options: dict[str, Any] = {"variables": {"w": np.zeros(3)}, "consistency": shoal.Synchronous(), "workers": 3}
    with ExitStack() as stack, ThreadPoolExecutor(3) as threads:
        opened = [threads.submit(rig.client.session, job, **options) for _ in range(3)]
        first, second, last = sorted(
            (stack.enter_context(each.result(20)) for each in opened), key=lambda session: session.rank
        )
        life = next(each.incarnation for each in rig.client.status().members if each.member == last.worker)
        ticket = rig.token(AccessRole.TRAINER, job=job, worker=last.worker, incarnation=life)
        [generation] = [group.config.generation for group in store.hosted.all() if group.config.name == job]
        own = headers.Stamp(job=job, worker=last.worker, incarnation=life, generation=generation)
        header = pb.PushHeader(stamp=own, shards=[0], versions=[0], weight=1, commit=True)
        calls = GrpcCalls(rig.server.address, Credentials(token=lambda: ticket))
        stack.callback(calls.close)
        pushed = threads.submit(calls.push, iter([[pb.PushRequest(header=header).SerializeToString()]]), 0)
        wait_until(lambda: store.queues()[2] or pushed.done(), what="a push that waits")
        rig.server.authorizer.revoke(["test"])
        for other in (first, second):
            other.push({"w": np.ones(3)})
        with pytest.raises(errors.Unauthenticated, match="was revoked"):
            pushed.result(10)
        rig.server.authorizer.revoke([])


def test_a_push_or_an_assignment_ends_when_its_token_is_revoked_while_it_is_received(rig: SecureRig) -> None:
    authorizer = Authorizer(TokenVerifier(rig.access.signer.public_key))
    service = DataService(rig.server.store, ServerMetrics(CollectorRegistry()), authorizer)

    def revoke(*_: object) -> SlabArrays:
        authorizer.revoke(["test"])
        return {}

    header = pb.PushHeader(stamp=stamp(rig), shards=[0], versions=[0], weight=1, commit=True)
    caller = Principal(rig.session.worker, AccessRole.TRAINER, "test", "job", rig.incarnation)
    calls: list[Callable[[], object]] = [
        lambda: service.push(lambda: (header, revoke), end=int),
        lambda: service.assign(header, revoke),
    ]
    context = contextvars.copy_context()
    context.run(set_caller, caller)
    before = [group.version for group in rig.server.store.hosted.all()]
    for call in calls:
        authorizer.revoke([])
        with pytest.raises(errors.Unauthenticated, match="was revoked"):
            context.run(call)
    assert [group.version for group in rig.server.store.hosted.all()] == before


def test_a_lane_ends_when_its_token_is_revoked(rig: SecureRig) -> None:
    ticket = rig.token(AccessRole.TRAINER, job="job")
    with closing(GrpcCalls(rig.server.address, Credentials(token=lambda: ticket))) as calls:
        host, port = _rpc.parse_address(calls.attach().address)
    with closing(Lane.connect(host, port, PARAMETER_SERVER, timeout_s=5)) as lane:
        open_handshake(lane, TokenSecurity(ticket.encode()), pb.LaneHello(), within_s=5)
        rig.server.authorizer.revoke(["test"])
        with pytest.raises(errors.Unreachable):
            lane.begin(within_s=5)
    rig.server.authorizer.revoke([])


@pytest.mark.parametrize("transport", ["grpc", "tcp", "auto"])
def test_a_session_trains_with_its_own_ticket(rig: SecureRig, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TRANSPORT", transport)
    with rig.client.session(f"by-{transport}", variables={"w": np.zeros(70_000)}) as session:
        session.pull()
        assert session.push({"w": np.ones(70_000)}).outcome == "accepted"
        assert rig.client.pull(f"by-{transport}")["w"].any()


def test_a_ticket_is_given_only_for_what_its_holder_may_do(rig: SecureRig) -> None:
    own = token_pb2.GetTicketRequest(job="job", worker=rig.session.worker, incarnation=rig.incarnation)
    for role, request, error in [
        (AccessRole.WORKER, own, errors.Forbidden),  # a session's ticket is for its user
        (AccessRole.READER, own, errors.Forbidden),
        (AccessRole.SUBMITTER, token_pb2.GetTicketRequest(job="none"), errors.UnknownJob),
        (AccessRole.SUBMITTER, token_pb2.GetTicketRequest(job="job", worker="gone", incarnation=1), errors.Fenced),
    ]:
        client = calling(rig, rig.token(role))
        try:
            with pytest.raises(error):
                client.call(client.tokens.GetTicket, request, retry_for_s=0)
        finally:
            client.close()


def test_a_member_registers_only_in_the_role_of_its_token(rig: SecureRig) -> None:
    for role, member in [
        (AccessRole.WORKER, coordinator_pb2.SERVER),
        (AccessRole.SERVER, coordinator_pb2.WORKER),
        (AccessRole.WORKER, coordinator_pb2.SESSION),
    ]:
        client = calling(rig, rig.token(role))
        request = coordinator_pb2.RegisterRequest(role=member, member="m", process="p", address="127.0.0.1:1")
        try:
            with pytest.raises(errors.Forbidden, match="may not register"):
                client.register(request, retry_for_s=0)
        finally:
            client.close()


def test_a_revoked_token_is_refused_everywhere(rig: SecureRig) -> None:
    made, secret = rig.access.create("ann", "submitter", 60)
    assert "ann" in [token.name for token in rig.access.tokens()]
    client = calling(rig, secret)
    try:
        client.call(client.jobs.List, job_pb2.ListRequest(), retry_for_s=0)
        assert [token.id for token in rig.access.revoke("ann")] == [made.id]
        with pytest.raises(errors.Unauthenticated, match="revoked"):
            client.call(client.jobs.List, job_pb2.ListRequest(), retry_for_s=0)
    finally:
        client.close()


def test_a_member_knows_the_revoked_tokens_from_its_registration(rig: SecureRig) -> None:
    """Until its first heartbeat, it would answer their holders. It gets them again only when there are others."""
    made, _ = rig.access.create("early", "submitter", 60)
    rig.access.revoke(made.id)
    daemon = calling(rig, rig.token(AccessRole.WORKER))
    try:
        asked = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member="late", process="p")
        known = daemon.register(asked, retry_for_s=0)
        assert made.id in known.revoked_tokens
        authorizer, told = Authorizer(), list[Any]()
        authorizer.on_revoked(lambda: told.append(authorizer.verifier))
        authorizer.use_key(known.token_key, known.revoked_tokens)
        [verifier] = told
        assert verifier
        assert verifier.revoked == set(known.revoked_tokens)

        beat = coordinator_pb2.HeartbeatRequest(member="late", incarnation=known.incarnation)
        beat.revoked_revision = known.revoked_revision
        assert not daemon.call(daemon.members.Heartbeat, beat, retry_for_s=0).revoked_tokens
        rig.access.revoke("cert:123")
        reply = daemon.call(daemon.members.Heartbeat, beat, retry_for_s=0)
        assert set(reply.revoked_tokens) == {*known.revoked_tokens, "cert:123"}
        assert reply.revoked_revision != known.revoked_revision
        left = coordinator_pb2.LeaveRequest(member="late", incarnation=known.incarnation)
        daemon.call(daemon.members.Leave, left, retry_for_s=0)
    finally:
        daemon.close()


def test_revoked_tokens_of_the_access_file_are_replaced() -> None:
    """Its own processes go on with other tokens. The caller loses its token with this call."""
    with secure_rig() as rig:
        earlier = AccessFile(rig.coordinator.address).read()
        leaked = calling(rig, earlier["admin"])
        try:
            revoked = leaked.call(leaked.tokens.RevokeToken, token_pb2.RevokeTokenRequest(token="local")).tokens
            assert {token.name for token in revoked} == {"local"}
            with pytest.raises(errors.Unauthenticated, match="revoked"):
                leaked.call(leaked.jobs.List, job_pb2.ListRequest(), retry_for_s=0)
        finally:
            leaked.close()
        assert set(AccessFile(rig.coordinator.address).read().values()).isdisjoint(earlier.values())
        assert rig.client.status().members
        rig.session.pull()
        rig.session.push({"w": np.ones(3)})


@pytest.mark.parametrize(
    ("kind", "request_type"), [(Frame.PULL, pb.PullRequest), (Frame.COMMIT, pb.CommitRequest)], ids=["pull", "commit"]
)
def test_a_server_reads_and_commits_nothing_over_a_lane(
    rig: SecureRig, kind: Frame, request_type: type[pb.PullRequest | pb.CommitRequest]
) -> None:
    """The table of permissions is for the calls on lanes, too: its ticket is accepted when the lane opens."""
    ticket = rig.token(AccessRole.PEER, job="job", worker="server-1", incarnation=1)
    with closing(GrpcCalls(rig.server.address, Credentials(token=lambda: ticket))) as calls:
        host, port = _rpc.parse_address(calls.attach().address)
    with closing(Lane.connect(host, port, PARAMETER_SERVER, timeout_s=5)) as lane:
        open_handshake(lane, TokenSecurity(ticket.encode()), pb.LaneHello(), within_s=5)
        stamp = headers.Stamp(job="job", generation=1)
        lane.send(kind, [request_type(stamp=stamp, shards=[0]).SerializeToString()])
        assert lane.begin(within_s=5) is Frame.ERROR
        with pytest.raises(errors.Forbidden, match=r"only these roles may: (observer, )?trainer"):
            raise received_error(lane)


def test_a_ticket_changes_nothing_without_the_name_of_its_holder() -> None:
    own = Principal("w", AccessRole.TRAINER, "t", "job", 1)
    check_own(own, "job", "", 0)
    with pytest.raises(errors.Forbidden):
        check_own(own, "job", "", 0, reading=False)
    check_own(own, "job", "w", 1, reading=False)


def test_the_file_with_the_tokens_is_private_and_goes_with_the_coordinator() -> None:
    with secure_rig() as rig:
        path = AccessFile(rig.coordinator.address).path
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


@pytest.mark.parametrize("left", [None, "damaged"])
def test_a_coordinator_without_tokens_removes_those_of_an_earlier_start(left: str | None) -> None:
    """Clients would send them to it. They are still valid for a later start with tokens."""
    with secure_rig() as rig:
        address = rig.coordinator.address
        file = AccessFile(address).path
        text = left or file.read_text()
    file.touch(0o600)  # as if that coordinator had been killed
    file.write_text(text)
    coordinator = start_coordinator(CoordinatorConfig(listen=address, secure=False), CollectorRegistry())
    try:
        with shoal.Client(address) as client:
            assert client.status().cluster
        assert not file.exists()
    finally:
        coordinator.stop()


def test_a_token_file_for_everybody_is_refused(rig: SecureRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text(rig.token(AccessRole.READER))
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(token))
    with shoal.Client(rig.coordinator.address, retry_for_s=0) as client:
        token.chmod(0o644)
        with pytest.raises(errors.Unauthenticated, match="is not private"):
            client.status()
        token.chmod(0o600)
        client.status()
        with pytest.raises(errors.Forbidden, match="may not submit jobs"):
            client.submit(shoal.Job("digits:Digits"))
        token.write_text(expired(rig, AccessRole.READER))
        with pytest.raises(errors.Unauthenticated, match=r"expired 36\d\d s ago"):
            client.status()


def test_a_server_gets_tickets_only_for_jobs_that_have_shards_on_it(rig: SecureRig) -> None:
    (life,) = (it.incarnation for it in rig.client.status().members if it.member == "server-0")
    own: dict[str, Any] = {"job": "job", "worker": "server-0", "incarnation": life}
    server = calling(rig, rig.token(AccessRole.SERVER, worker="local"))
    admin = calling(rig, rig.token(AccessRole.ADMIN))
    request = coordinator_pb2.RegisterRequest(
        role=coordinator_pb2.SERVER, member="idle", process="p", address="127.0.0.1:1"
    )
    try:
        server.member_secrets["server-0"] = rig.access.members.of("server-0", life)
        ticket = server.call(server.tokens.GetTicket, token_pb2.GetTicketRequest(**own), retry_for_s=0).ticket
        assert rig.access.verifier.identify(ticket).role is AccessRole.PEER
        idle = server.register(request, retry_for_s=0).incarnation
        for fields in ({"job": "job"}, {"job": "job", "worker": "idle", "incarnation": idle}):
            with pytest.raises(errors.Forbidden, match="only for servers with shards of job"):
                server.call(server.tokens.GetTicket, token_pb2.GetTicketRequest(**fields), retry_for_s=0)
        session = {**own, "worker": rig.session.worker, "incarnation": rig.incarnation}
        for caller, fields in ((server, session), (admin, own)):
            with pytest.raises(errors.Forbidden):
                caller.call(caller.tokens.GetTicket, token_pb2.GetTicketRequest(**fields), retry_for_s=0)
        left = coordinator_pb2.LeaveRequest(member="idle", incarnation=idle)
        server.call(server.members.Leave, left, retry_for_s=0)
    finally:
        server.close()
        admin.close()


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"job": "other"}, errors.Forbidden),
        ({"worker": "server-2"}, errors.Forbidden),
        ({"incarnation": 99}, errors.Forbidden),
        ({}, errors.BadRequest),  # its job has no norms
    ],
    ids=str,
)
def test_a_norm_comes_only_from_the_server_of_the_ticket(
    rig: SecureRig, other: dict[str, Any], error: type[errors.ShoalError]
) -> None:
    own = {"job": "job", "worker": "server-1", "incarnation": 1}
    ticket = rig.token(AccessRole.PEER, **{**own, **other})
    request = pb.ShareNormRequest(job="job", generation=1, server="server-1", incarnation=1, squares=[1.0])
    with grpc.insecure_channel(rig.server.address) as channel:
        share = ParameterServerStub(channel).ShareNorm
        with pytest.raises(error), _rpc.as_shoal_errors(rig.server.address):
            share(request, timeout=10, metadata=authorization(ticket))
