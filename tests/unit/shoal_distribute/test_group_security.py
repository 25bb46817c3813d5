"""Security of a group: from a secret's file, certificates, or the user's own secret on loopback."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from shoal import errors
from shoal._security import Credentials
from shoal._security.certificates import make_certificates
from shoal._transport import TlsSecurity, TokenSecurity
from shoal_distribute.group_security import group_security

LOCAL = ["localhost:1", "127.0.0.1:2", "[::1]:3"]
REMOTE = ["localhost:1", "host.example:2"]


def secret_file(folder: Path, content: bytes, mode: int = 0o600) -> dict[str, str]:
    file = folder / "secret"
    file.write_bytes(content)
    file.chmod(mode)
    return {"SHOAL_GROUP_SECRET_FILE": str(file)}


def test_ranks_with_one_secret_accept_each_other(tmp_path: Path) -> None:
    environment = secret_file(tmp_path, b"0123456789abcdef\n")
    token = group_security(REMOTE, environment).credential()
    assert b"0123456789abcdef" not in token
    security = group_security(LOCAL, environment)
    assert security.identify(token, "peer") is None
    with pytest.raises(errors.Unauthenticated):
        security.identify(b"another", "peer")


def test_on_loopback_the_user_has_a_secret(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    token = group_security(LOCAL, environment).credential()
    assert group_security(LOCAL, environment).credential() == token
    (file,) = (tmp_path / "shoal").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert group_security(LOCAL, {"XDG_STATE_HOME": str(tmp_path / "other")}).credential() != token


def test_ranks_on_other_hosts_need_a_secret_or_certificates() -> None:
    with pytest.raises(errors.BadRequest, match="set SHOAL_GROUP_SECRET_FILE"):
        group_security(REMOTE, {})
    assert group_security(REMOTE, {"SHOAL_INSECURE": "1"}).credential()


def test_a_group_on_other_hosts_without_tls_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_certificates(tmp_path)
    secret = secret_file(tmp_path, b"0123456789abcdef")
    for addresses, environment in ((LOCAL, secret), (REMOTE, secret | certificate(tmp_path, "server"))):
        group_security(addresses, environment)
    assert not caplog.messages
    for environment, said in ((secret, "only a secret that they share"), ({"SHOAL_INSECURE": "1"}, "nothing, because")):
        caplog.clear()
        group_security(REMOTE, environment)
        (warning,) = caplog.messages
        assert "on other hosts, without TLS" in warning
        assert said in warning
    assert REGISTRY.get_sample_value("shoal_group_insecure") == 1


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [(b"short", 0o600, "has 5 bytes"), (b"x" * 5_000, 0o600, "bytes"), (b"0" * 16, 0o644, "is not private")],
)
def test_a_secret_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, mode: int, said: str) -> None:
    with pytest.raises(errors.BadRequest, match=said):
        group_security(LOCAL, secret_file(tmp_path, content, mode))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.BadRequest, match=r"cannot read the secret of the group.*missing"):
        group_security(LOCAL, {"SHOAL_GROUP_SECRET_FILE": str(tmp_path / "missing")})


def certificate(folder: Path, role: str) -> dict[str, str]:
    """Returns an environment with the certificate of a role."""
    names = {"CA": "ca.pem", "CERT": f"{role}.pem", "KEY": f"{role}-key.pem"}
    return {f"SHOAL_TLS_{variable}": str(folder / name) for variable, name in names.items()}


def first_byte(folder: Path, role: str) -> int:
    """Opens a connection to a rank with the certificate of a role, and returns the byte that arrives there."""
    make_certificates(folder)
    tls = Credentials.find(environment=certificate(folder, role)).tls
    assert tls
    near, far = socket.socketpair()
    near.settimeout(30)
    with near, far, ThreadPoolExecutor(1) as thread:
        rank = group_security(REMOTE, certificate(folder, "server")).protect(far, "near", accepted=True)
        caller = TlsSecurity(TokenSecurity(b""), tls).protect(near, "far", accepted=False)
        buffer = memoryview(bytearray(1))
        received = thread.submit(rank.recv_into, buffer)
        try:
            caller.sendmsg([b"x"])
        finally:
            near.shutdown(socket.SHUT_RDWR)  # so that the rank does not wait for more
            received.result(30)
        return buffer[0]


def test_ranks_with_certificates_of_servers_accept_each_other(tmp_path: Path) -> None:
    assert first_byte(tmp_path, "server") == ord("x")


@pytest.mark.parametrize("role", ["reader", "worker"])
def test_a_rank_refuses_the_certificate_of_another_role(tmp_path: Path, role: str) -> None:
    with pytest.raises(errors.Unauthenticated, match=r"has no DNS name server\.role\.shoal\.internal") as refused:
        first_byte(tmp_path, role)
    assert isinstance(refused.value.__context__, errors.Unauthenticated), "the caller learns why"
    assert "server.pem and server-key.pem" in refused.value.__context__.message
