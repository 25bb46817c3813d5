"""Identity by certificate: callers over mutual TLS that present no token."""

import datetime
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from prometheus_client import CollectorRegistry

import shoal
from shoal import errors
from shoal._rpc import CoordinatorClient
from shoal._security import AccessRole, Credentials
from shoal._security.certificate_identity import principal_in
from shoal._security.certificates import issue_certificate, make_certificates
from shoal._security.tls import TlsFiles
from shoal.events import StateChanged
from shoal.v1 import coordinator_pb2, token_pb2
from shoal_coordinator.process import CoordinatorConfig, CoordinatorProcess, start_coordinator
from shoal_server.process import Server, ServerConfig
from support.certificates import credentials

ROLES = ("admin", "submitter", "reader", "worker", "server")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "certificates"
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def coordinator(folder: Path) -> Iterator[CoordinatorProcess]:
    config = CoordinatorConfig(listen="127.0.0.1:0", secure=True, credentials=credentials(folder, "coordinator"))
    running = start_coordinator(config, CollectorRegistry())
    yield running
    running.stop()


@pytest.fixture
def no_access_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on another machine: there is no token to be found."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


pytestmark = pytest.mark.usefixtures("no_access_files")


def status_as(coordinator: CoordinatorProcess, presented: Credentials) -> coordinator_pb2.GetStatusReply:
    with closing(CoordinatorClient(coordinator.address, credentials=presented)) as client:
        request = coordinator_pb2.GetStatusRequest()
        reply: coordinator_pb2.GetStatusReply = client.call(client.members.GetStatus, request, retry_for_s=0)
        return reply


def issued(folder: Path, scratch: Path, uris: Sequence[str], holders: Sequence[str] = ("ann",)) -> Credentials:
    """Returns credentials with a certificate of the folder's CA that has these URIs and common names."""
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    ca_key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, holder) for holder in holders]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    )
    if uris:
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate, private = scratch / "ann.pem", scratch / "ann-key.pem"
    certificate.write_bytes(builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    private.touch(0o600)
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return Credentials(TlsFiles(folder / "ca.pem", certificate, private))


@pytest.mark.parametrize("role", ROLES)
def test_a_certificate_gives_the_role_that_it_names(coordinator: CoordinatorProcess, folder: Path, role: str) -> None:
    presented = credentials(folder, role)
    assert status_as(coordinator, presented).cluster
    with closing(CoordinatorClient(coordinator.address, credentials=presented)) as client:
        request = token_pb2.CreateTokenRequest(name="ann", role="reader", valid_s=60)
        if role == "admin":
            assert client.call(client.tokens.CreateToken, request, retry_for_s=0).secret
        else:
            with pytest.raises(errors.Forbidden, match=f"{role} '{role}' may not make tokens"):
                client.call(client.tokens.CreateToken, request, retry_for_s=0)


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["spiffe://shoal/coordinator"],
        ["spiffe://shoal/trainer"],
        ["spiffe://shoal/admin", "spiffe://shoal/reader"],
        ["spiffe://shoal/"],
        ["spiffe://shoal/Admin"],
        ["spiffe://other/admin"],
    ],
)
def test_a_certificate_that_names_no_role_is_refused(
    coordinator: CoordinatorProcess, folder: Path, tmp_path: Path, uris: Sequence[str]
) -> None:
    with pytest.raises(errors.Unauthenticated, match="must name one role"):
        status_as(coordinator, issued(folder, tmp_path, uris))


@pytest.mark.parametrize(
    "holders",
    [[], ["a\nb@submitter\x00"], ["Ann"], ["a" * 64], ["local"], ["ann", "bob"]],
    ids=["none", "control characters", "capitals", "long", "reserved", "two"],
)
def test_a_certificate_without_a_name_of_its_holder_is_refused(
    coordinator: CoordinatorProcess, folder: Path, tmp_path: Path, holders: Sequence[str]
) -> None:
    """Jobs and members belong to names, and those whose submitter or holder is not known have an empty name."""
    presented = issued(folder, tmp_path, ["spiffe://shoal/submitter"], holders)
    with pytest.raises(errors.Unauthenticated, match=r"must have one common name.*or a token"):
        status_as(coordinator, presented)
    assert coordinator.access is not None
    _, token = coordinator.access.create("ann", "reader", 60.0)
    assert status_as(coordinator, presented.with_token(lambda: token)).cluster


@pytest.mark.parametrize("name", ["local", "", "Ann", "a b"])
def test_a_token_has_a_name_of_a_holder(coordinator: CoordinatorProcess, folder: Path, name: str) -> None:
    """Otherwise, the holder of a token with the name `local` could change the jobs of the coordinator's user."""
    with closing(CoordinatorClient(coordinator.address, credentials=credentials(folder, "admin"))) as client:
        request = token_pb2.CreateTokenRequest(name=name, role="submitter", valid_s=60)
        with pytest.raises(errors.BadRequest, match=r"cannot be the name of a token's holder.*is not 'local'"):
            client.call(client.tokens.CreateToken, request, retry_for_s=0)


def test_a_certificate_of_another_ca_is_refused(coordinator: CoordinatorProcess, folder: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "others")
    others = tmp_path / "others"
    (others / "both.pem").write_bytes((folder / "ca.pem").read_bytes() + (others / "ca.pem").read_bytes())
    presented = Credentials(TlsFiles(others / "both.pem", others / "admin.pem", others / "admin-key.pem"))
    with pytest.raises(errors.Unauthenticated):
        status_as(coordinator, presented)


def test_a_token_decides_before_the_certificate(coordinator: CoordinatorProcess, folder: Path) -> None:
    admin = credentials(folder, "admin")
    assert coordinator.access is not None
    _, token = coordinator.access.create("ann", "reader", 60.0)
    with (
        closing(CoordinatorClient(coordinator.address, credentials=admin.with_token(lambda: token))) as client,
        pytest.raises(errors.Forbidden, match="reader 'ann'"),
    ):
        client.call(client.tokens.ListTokens, token_pb2.ListTokensRequest(), retry_for_s=0)
    with pytest.raises(errors.Unauthenticated):
        status_as(coordinator, admin.with_token(lambda: "nonsense"))


def test_a_revoked_certificate_is_refused(coordinator: CoordinatorProcess, folder: Path, tmp_path: Path) -> None:
    presented = issued(folder, tmp_path, ["spiffe://shoal/reader"])
    assert status_as(coordinator, presented).cluster
    serial = x509.load_pem_x509_certificate((tmp_path / "ann.pem").read_bytes()).serial_number
    with closing(CoordinatorClient(coordinator.address, credentials=credentials(folder, "admin"))) as client:
        request = token_pb2.RevokeTokenRequest(token=f"cert:0{serial:X}")  # padded, as OpenSSL does
        assert len(client.call(client.tokens.RevokeToken, request).tokens) == 1
        listed = client.call(client.tokens.ListTokens, token_pb2.ListTokensRequest()).tokens
    assert token_pb2.Token(id=f"cert:{serial:x}", name="ann", role="reader", revoked=True) in listed
    with pytest.raises(errors.Unauthenticated, match="revoked"):
        status_as(coordinator, presented)
    assert status_as(coordinator, credentials(folder, "reader")).cluster


def test_a_cluster_trains_with_certificates_alone(coordinator: CoordinatorProcess, folder: Path) -> None:
    config = ServerConfig("server-0", coordinator.address, credentials=credentials(folder, "server"))
    server = Server(config, CollectorRegistry())
    try:
        presented = credentials(folder, AccessRole.SUBMITTER.value)
        with (
            shoal.Client(coordinator.address, credentials=presented) as client,
            client.session("job", variables={"w": np.zeros(2, np.float32)}, optimizer=shoal.optim.SGD(1.0)) as session,
        ):
            session.pull()
            session.push({"w": np.ones(2, np.float32)})
            assert session.pull()["w"].tolist() == [-1.0, -1.0]
    finally:
        server.stop()


def short_lived(folder: Path, scratch: Path, role: str, valid_s: float) -> Credentials:
    """Returns the credentials of a holder "ann" with a certificate that expires soon."""
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=valid_s, days=-1)
    certificate, key = issue_certificate(role, "ann", ca=folder, folder=scratch, days=1, now=now)
    return Credentials(TlsFiles(folder / "ca.pem", certificate, key))


@pytest.fixture
def waiting_job(coordinator: CoordinatorProcess, folder: Path) -> Iterator[str]:
    """A job that waits for workers."""
    with shoal.Client(coordinator.address, credentials=credentials(folder, "admin")) as client:
        job = client.submit(shoal.Job("m:f", name="waiting"))
        yield job.name
        job.cancel()


def test_a_ticket_ends_with_the_certificate_of_its_holder(
    coordinator: CoordinatorProcess, folder: Path, tmp_path: Path, waiting_job: str
) -> None:
    presented = short_lived(folder, tmp_path, "reader", valid_s=60.0)
    expires_at = principal_in((tmp_path / "ann.pem").read_bytes()).expires_at
    assert 50 < expires_at - time.time() <= 60
    with closing(CoordinatorClient(coordinator.address, credentials=presented)) as client:
        reply = client.call(client.tokens.GetTicket, token_pb2.GetTicketRequest(job=waiting_job), retry_for_s=0)
    assert reply.valid_s <= 60
    assert coordinator.access
    assert coordinator.access.verifier.identify(reply.ticket).expires_at == expires_at


def test_what_a_certificate_began_ends_when_it_expires(
    coordinator: CoordinatorProcess, folder: Path, tmp_path: Path, waiting_job: str
) -> None:
    """Its connection is still open, so TLS does not notice. A stream goes on if the certificate was replaced."""
    old, kept, new = (
        short_lived(folder, tmp_path / name, "reader", s) for name, s in (("a", 3.0), ("b", 3.0), ("c", 60.0))
    )
    with (
        shoal.Client(coordinator.address, credentials=old) as ann,
        shoal.Client(coordinator.address, credentials=kept) as renewed,
        shoal.Client(coordinator.address, credentials=credentials(folder, "admin")) as admin,
        ThreadPoolExecutor(2) as threads,
    ):
        assert ann.job(waiting_job).status().job.name == waiting_job
        watching = threads.submit(lambda: list(renewed.job(waiting_job).events()))
        assert new.tls
        assert kept.tls
        for source, target in zip(new.tls.paths, kept.tls.paths, strict=True):
            if source != target:
                os.replace(source, target)
        with pytest.raises(errors.Unauthenticated, match=r"the certificate of reader 'ann' expired \d+ s ago.*Replace"):
            threads.submit(lambda: list(ann.job(waiting_job).events())).result(10)
        admin.job(waiting_job).cancel()
        last = watching.result(10)[-1]
        assert isinstance(last, StateChanged)
        assert last.state is shoal.JobState.CANCELLED
        with pytest.raises(errors.Unauthenticated, match=r"the certificate of reader 'ann' expired \d+ s ago.*Replace"):
            ann.status()
