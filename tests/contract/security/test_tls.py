"""TLS on gRPC, lanes and HTTP, with real sockets: the same results as without, and errors that say what to do."""

import functools
import http.client
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from unittest import mock

import numpy as np
import prometheus_client
import pytest
from cryptography import x509

from shoal import _rpc, consistency, errors, optim
from shoal._limits import catalogue
from shoal._role import http_endpoints
from shoal._role.http_endpoints import RoleHttpServer
from shoal._rpc import tls_channel
from shoal._security import NO_CREDENTIALS, AccessRole, Authorizer, Credentials, role_name
from shoal._security.certificates import ROLES, make_certificates
from shoal._security.tls import TlsFiles
from shoal._security.tokens import TokenSigner, TokenVerifier
from shoal._transport import Listener, ListenerLimits, TlsSecurity, TokenSecurity, listener, open_handshake
from shoal._transport.frames import PARAMETER_SERVER
from shoal._transport.grpc_calls import GrpcCalls
from shoal._transport.grpc_transport import GrpcTransport
from shoal._transport.lane import Lane
from shoal._transport.lane_transport import LaneTransport
from shoal.client import Client
from shoal.v1 import parameter_server_pb2 as pb
from support.certificates import credentials, replace_certificates, tls_files
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

TRANSPORTS = {"tcp": LaneTransport, "grpc": GrpcTransport}
# One variable larger than a socket's buffers, and many small ones, whose pieces travel together.
VARIABLES = {"big": np.arange(3 << 20, dtype=np.float32)} | {
    f"small{index}": np.full(index + 1, index, np.float32) for index in range(100)
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "certificates"
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of another CA."""
    folder = tmp_path_factory.mktemp("tls") / "others"
    make_certificates(folder)
    return folder


@contextmanager
def serving(presented: Credentials, host: str = "127.0.0.1") -> Iterator[str]:
    """Starts a gRPC server without services of its own; yields its address."""
    server = _rpc.RpcServer(f"{host}:0", [], threads=2, credentials=presented)
    server.start()
    try:
        yield server.address
    finally:
        server.stop(0)


def trained(transport: str, presented: Credentials) -> dict[str, np.ndarray]:
    """Returns the values after some steps of one worker, for which the servers call each other, too."""
    random = np.random.default_rng(7)
    mode, optimizer = consistency.Synchronous(), optim.Momentum(0.1, clip_norm=1.0)
    with (
        ShardServers(
            VARIABLES, mode=mode, optimizer=optimizer, servers=2, transport=transport, credentials=presented
        ) as servers,
        servers.worker("w") as worker,
    ):
        for _ in range(3):
            values = worker.pull()
            worker.push({name: random.normal(size=value.shape).astype("f4") for name, value in values.items()})
        used = [each for it in worker.servers.connections for each in (it.pull_transport, it.push_transport)]
        assert {type(each) for each in used} == {TRANSPORTS[transport]}
        return worker.pull()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_training_gives_the_same_bits_with_and_without_tls(certificates: Path, transport: str) -> None:
    plain, encrypted = trained(transport, NO_CREDENTIALS), trained(transport, credentials(certificates))
    assert {name: value.tobytes() for name, value in plain.items()} == {
        name: value.tobytes() for name, value in encrypted.items()
    }


# Ends that do not fit.


def check_fails(address: str, presented: Credentials, message: str) -> None:
    """Checks that a first call fails within 2 s, although the client would repeat an unanswered call for longer."""
    begun = time.monotonic()
    with (
        Client(address, retry_for_s=60, credentials=presented) as client,
        pytest.raises(errors.Unauthenticated, match=message),
    ):
        client.status()
    assert time.monotonic() - begun < 2


def test_a_client_without_tls_learns_that_the_server_uses_it(certificates: Path) -> None:
    with serving(credentials(certificates, "coordinator")) as address:
        check_fails(address, NO_CREDENTIALS, "it uses TLS, and this process does not; give --tls-ca")


def test_a_client_with_tls_learns_that_the_server_does_not_use_it(certificates: Path) -> None:
    with serving(NO_CREDENTIALS) as address:
        check_fails(address, credentials(certificates), "does not use TLS; give both ends TLS files")


def test_a_server_of_another_ca_is_refused(certificates: Path, others: Path) -> None:
    with serving(credentials(others, "coordinator")) as address:
        check_fails(address, credentials(certificates), "give both ends certificates of one CA")


def test_a_client_of_another_ca_is_refused(certificates: Path, others: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes((certificates / "ca.pem").read_bytes() + (others / "ca.pem").read_bytes())
    with serving(credentials(certificates, "coordinator")) as address:
        check_fails(address, Credentials(tls_files(others, "worker", ca=both)), "the other end refuses this connection")


@pytest.mark.parametrize("role", ["server", "worker"])
def test_another_role_cannot_pose_as_a_coordinator(certificates: Path, role: str) -> None:
    missing = r"not valid for 'coordinator\.role\.shoal\.internal'; the other end has another role, .*add this DNS name"
    with serving(credentials(certificates, role)) as address:  # at a host that its certificate names
        check_fails(address, credentials(certificates), missing)


@pytest.mark.parametrize("role", ["coordinator", "worker"])
def test_another_role_cannot_pose_as_a_server(certificates: Path, role: str) -> None:
    missing = r"not valid for 'server\.role\.shoal\.internal'"
    with (
        serving(credentials(certificates, role)) as address,
        closing(GrpcCalls(address, credentials(certificates))) as calls,
        pytest.raises(errors.Unauthenticated, match=missing),
    ):
        calls.attach()
    with (
        accepting_lanes(credentials(certificates, role)) as address,
        closing(lane_to(address)) as lane,
        pytest.raises(errors.Unauthenticated, match=missing),
    ):
        open_handshake(lane, TlsSecurity(TokenSecurity(b""), tls_files(certificates)), pb.LaneHello(), within_s=2)


def test_a_coordinator_needs_no_certificate_of_its_host(certificates: Path) -> None:
    with (
        serving(credentials(certificates, "coordinator"), "127.0.0.2") as address,
        Client(address, retry_for_s=0, credentials=credentials(certificates)) as client,
        pytest.raises(errors.BadRequest, match="no coordinator listens at"),  # this server has no services
    ):
        client.status()


def test_a_client_cannot_pose_as_a_server(certificates: Path) -> None:
    with serving(credentials(certificates, "submitter")) as address:
        check_fails(address, credentials(certificates), "a server needs the certificate of coordinator")


def test_a_client_needs_a_certificate_unless_it_is_optional(certificates: Path) -> None:
    without = Credentials(TlsFiles(certificates / "ca.pem"))
    with serving(credentials(certificates, "coordinator")) as address:
        check_fails(address, without, "if it requires a certificate, give --tls-cert and --tls-key")
    optional = Credentials(tls_files(certificates, client_certificates=False))
    with (
        ShardServers({"w": np.ones(4, np.float32)}, credentials=optional) as servers,
        closing(_rpc.channel(servers.addresses[0], without)) as channel,
    ):
        list_shards = channel.unary_unary(
            "/shoal.v1.ParameterServer/Attach", pb.AttachRequest.SerializeToString, pb.AttachReply.FromString
        )
        assert list_shards(pb.AttachRequest(), timeout=5).address


@contextmanager
def accepting_lanes(presented: Credentials) -> Iterator[str]:
    """Starts a process that shows these credentials on its lanes, which it closes; yields their address."""
    limits = ListenerLimits(catalogue.LANES, catalogue.HOST_LANES, most=2, most_of_host=2)
    security = TlsSecurity(TokenSecurity(b""), presented.tls) if presented.tls else TokenSecurity(b"")
    lanes = Listener(
        _rpc.listen("127.0.0.1", 0),
        PARAMETER_SERVER,
        mock.MagicMock(),
        security=security,
        limits=limits,
        name="lane",
        advice="",
    )
    lanes.start()
    try:
        yield f"127.0.0.1:{lanes.address[1]}"
    finally:
        lanes.stop()


def lane_to(address: str) -> Lane:
    return Lane.connect(*_rpc.parse_address(address), PARAMETER_SERVER, timeout_s=2)


def test_a_plain_lane_to_a_tls_port_says_what_to_do(certificates: Path) -> None:
    with (
        ShardServers({"w": np.ones(4, np.float32)}, credentials=credentials(certificates)) as servers,
        closing(lane_to(servers.lanes[0].offer.address)) as lane,
        pytest.raises(errors.Unreachable, match="the other end uses TLS; give this process --tls-ca"),
    ):
        open_handshake(lane, TokenSecurity(b""), pb.LaneHello(), within_s=2)


def test_a_tls_lane_to_a_plain_port_says_what_to_do(certificates: Path) -> None:
    with (
        ShardServers({"w": np.ones(4, np.float32)}) as servers,
        closing(lane_to(servers.lanes[0].offer.address)) as lane,
        pytest.raises(errors.Unauthenticated, match=r"check that it uses TLS|does not use TLS"),
    ):
        open_handshake(lane, TlsSecurity(TokenSecurity(b""), tls_files(certificates)), pb.LaneHello(), within_s=2)


def test_a_lane_refuses_a_certificate_of_another_ca(certificates: Path, others: Path) -> None:
    with (
        ShardServers({"w": np.ones(4, np.float32)}, credentials=credentials(certificates)) as servers,
        closing(lane_to(servers.lanes[0].offer.address)) as lane,
        pytest.raises(errors.Unauthenticated, match="give both ends certificates of one CA"),
    ):
        open_handshake(lane, TlsSecurity(TokenSecurity(b""), tls_files(others)), pb.LaneHello(), within_s=2)


def test_a_lane_that_does_not_complete_its_tls_handshake_is_closed(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HELLO_TIMEOUT_S", 0.1)
    with ShardServers({"w": np.ones(4, np.float32)}, credentials=credentials(certificates)) as servers:
        host, port = _rpc.parse_address(servers.lanes[0].offer.address)
        with socket.create_connection((host, port), 5) as silent:
            silent.sendall(b"\x16\x03\x01")  # the beginning of a TLS handshake
            assert silent.recv(1) == b""
        wait_until(lambda: not servers.open_lanes, what="the end of the lane")


# Replaced certificates.


def serial(address: str, tls: TlsFiles) -> str:
    """Returns the serial number of the certificate that a server shows."""
    host, port = _rpc.parse_address(address)
    context, name = tls.current().lane_client, role_name(AccessRole.SERVER)
    with socket.create_connection((host, port), 5) as plain, context.wrap_socket(plain, server_hostname=name) as stream:
        return str((stream.getpeercert() or {})["serialNumber"])


def test_certificates_are_replaced_under_load_without_a_failed_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_channel, "LOOK_S", 0.0)
    folder = tmp_path / "certificates"
    make_certificates(folder)
    presented = credentials(folder)
    assert presented.tls
    failures: list[BaseException] = []
    rounds: dict[str, int] = {"tcp": 0, "grpc": 0, "new": 0}
    ended = threading.Event()
    with ShardServers({"w": np.ones(1000, np.float32)}, credentials=presented) as servers:
        address = servers.addresses[0]

        def pull(transport: str, *, reopens: bool) -> None:
            client = servers.client(transport=transport)
            # A repeated call would hide a failure.
            client.servers.calls.on_retry = functools.partial(failures.append, AssertionError("a call was repeated"))
            try:
                while not ended.is_set():
                    client.pull()
                    rounds["new" if reopens else transport] += 1
                    if reopens:
                        client.close()
                        client = servers.client(transport=transport)
            except BaseException as error:
                failures.append(error)
            finally:
                client.close()

        loads = [
            threading.Thread(target=pull, args=("tcp",), kwargs={"reopens": False}),
            threading.Thread(target=pull, args=("grpc",), kwargs={"reopens": False}),
            threading.Thread(target=pull, args=("tcp",), kwargs={"reopens": True}),
        ]
        for each in loads:
            each.start()
        serials = {serial(address, presented.tls)}
        for number in range(3):
            before = dict(rounds)
            replace_certificates(folder, tmp_path / f"new{number}")
            wait_until(lambda old=before: failures or all(rounds[it] > old[it] + 2 for it in rounds), what="more calls")  # type: ignore[misc]
            serials.add(serial(address, presented.tls))
        ended.set()
        for each in loads:
            each.join()
    assert failures == []
    assert len(serials) == 4, "each replacement is in use"


def test_http_endpoints_use_tls_and_new_certificates(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    make_certificates(folder)
    tls = tls_files(folder)
    server = RoleHttpServer("127.0.0.1:0", prometheus_client.CollectorRegistry(), tls=tls)
    server.not_ready = ""
    try:
        host, port = _rpc.parse_address(server.address)

        def health() -> tuple[int, str]:
            context = ssl.create_default_context(cafile=folder / "ca.pem")
            with closing(http.client.HTTPSConnection(host, port, timeout=10, context=context)) as connection:
                connection.connect()
                stream: ssl.SSLSocket = connection.sock
                shown = str((stream.getpeercert() or {})["serialNumber"])
                connection.request("GET", "/healthz")
                return connection.getresponse().status, shown

        status, first = health()
        replace_certificates(folder, tmp_path / "new")
        assert (status, health()[0]) == (200, 200)
        assert health()[1] != first
    finally:
        server.stop()


def test_connections_without_a_handshake_count(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoints, "MAX_HOST_CONNECTIONS", 2)
    server = RoleHttpServer("127.0.0.1:0", prometheus_client.CollectorRegistry(), tls=tls_files(certificates))
    server.not_ready = ""
    address = _rpc.parse_address(server.address)
    try:
        idle = [socket.create_connection(address, timeout=10) for _ in range(2)]
        idle[0].sendall(bytes.fromhex("16030100c8010000c40303"))  # a handshake begins
        assert answers_over_tls(address, certificates), "a probe replaces the oldest connection"
        with suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""
        idle[1].sendall(b"x" * 250)  # what is no handshake ends the connection
        with suppress(ConnectionResetError):
            while idle[1].recv(100):
                pass
        assert answers_over_tls(address, certificates)
    finally:
        for each in idle:
            each.close()
        server.stop()


def answers_over_tls(address: tuple[str, int], folder: Path) -> bool:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    with closing(http.client.HTTPSConnection(*address, timeout=10, context=context)) as connection:
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except OSError:
            return False


class TestMetricsByCertificate:
    """/metrics of a role, for callers that show a certificate and no token."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        make_certificates(tmp_path / "certificates")
        return tmp_path / "certificates"

    @pytest.fixture
    def role(self, folder: Path) -> Iterator[RoleHttpServer]:
        server = RoleHttpServer("127.0.0.1:0", prometheus_client.CollectorRegistry(), tls=tls_files(folder))
        server.authorizer = Authorizer(TokenVerifier(TokenSigner(TokenSigner.new_key()).public_key))
        server.not_ready = ""
        yield server
        server.stop()

    def test_a_certificate_of_a_reader_is_enough(self, role: RoleHttpServer, folder: Path) -> None:
        found = {name: status_of(role, folder, name) for name in ROLES}
        readers = ("admin", "submitter", "reader")
        expected = dict.fromkeys(ROLES, 403) | dict.fromkeys(readers, 200)
        # The certificates of these give no access role to a caller.
        assert found == expected | {"coordinator": 401, "trainer": 401}
        assert status_of(role, folder) == 401
        assert status_of(role, folder, path="/healthz") == 200  # a probe has no certificate

    def test_a_revoked_certificate_is_refused(self, role: RoleHttpServer, folder: Path) -> None:
        reader = x509.load_pem_x509_certificate((folder / "reader.pem").read_bytes())
        role.authorizer.revoke([f"cert:{reader.serial_number:x}"])
        assert status_of(role, folder, "reader") == 401
        assert status_of(role, folder, "submitter") == 200

    def test_a_certificate_of_another_ca_is_refused(self, role: RoleHttpServer, folder: Path, others: Path) -> None:
        with pytest.raises(OSError, match=r"(?i)ssl|reset|closed"):
            status_of(role, others, "reader", ca=folder / "ca.pem")

    def test_a_ca_that_is_replaced_is_trusted_no_longer(self, role: RoleHttpServer, folder: Path, others: Path) -> None:
        context = context_of(folder, "reader")
        assert status_with(role, context) == 200
        for name in ("ca.pem", "server.pem", "server-key.pem"):
            os.replace(shutil.copy(others / name, folder / f"{name}.new"), folder / name)
        assert status_of(role, others, "reader") == 200
        context.load_verify_locations(others / "ca.pem")
        with pytest.raises(OSError, match=r"(?i)ssl|reset|closed"):
            status_with(role, context)


def context_of(folder: Path, role: str = "", ca: Path | None = None) -> ssl.SSLContext:
    """Returns a client's context, with the certificate of a role if one is given."""
    context = ssl.create_default_context(cafile=ca or folder / "ca.pem")
    if role:
        context.load_cert_chain(folder / f"{role}.pem", folder / f"{role}-key.pem")
    return context


def status_of(
    server: RoleHttpServer, folder: Path, role: str = "", *, path: str = "/metrics", ca: Path | None = None
) -> int:
    return status_with(server, context_of(folder, role, ca), path)


def status_with(server: RoleHttpServer, context: ssl.SSLContext, path: str = "/metrics") -> int:
    host, port = _rpc.parse_address(server.address)
    with closing(http.client.HTTPSConnection(host, port, timeout=10, context=context)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


# A first call with TLS to a port that answers plain text, in a process whose environment has no settings of gRPC.
PLAIN = """
import socket, sys, threading
import shoal
from pathlib import Path
from shoal._security import Credentials
def answer():
    while True:
        listening.accept()[0].send(b"hello\\n" * 99)
listening = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=answer, daemon=True).start()
presented = Credentials.find(*sys.argv[1:])
with shoal.Client("127.0.0.1:%s" % listening.getsockname()[1], retry_for_s=0, credentials=presented) as client:
    try:
        client.status()
    except shoal.ShoalError as error:
        print(error.message, file=sys.stderr)
"""


def test_grpc_writes_no_lines_before_ours(certificates: Path) -> None:
    files = [str(certificates / name) for name in ("ca.pem", "admin.pem", "admin-key.pem")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, *files], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    (line,) = done.stderr.splitlines()
    assert "the other end does not use TLS" in line
