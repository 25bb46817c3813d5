"""Hosts, and users of a port of loopback, to which a process sends a token without TLS."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from shoal import errors
from shoal._rpc import CoordinatorClient, MembershipClient
from shoal._security import AccessFile, AccessRole, Credentials, PortCheck, Principal, token_in, user_mark
from shoal._security.port_check import USER_MARK
from shoal._security.tokens import TokenSigner, TokenVerifier
from shoal.v1 import coordinator_pb2

ADDRESS = "127.0.0.1:7070"
OWN = os.geteuid()
OTHER = OWN + 1


def listening(*users: int) -> Callable[[str, int], frozenset[int]]:
    def listeners(host: str, port: int) -> frozenset[int]:
        assert (host, port) == ("127.0.0.1", 7070)
        return frozenset(users)

    return listeners


@pytest.mark.parametrize("users", [(), (OWN,), (0,)], ids=["nobody", "this user", "root"])
def test_a_token_is_sent_if_no_other_user_listens(users: tuple[int, ...]) -> None:
    PortCheck(ADDRESS, listeners=listening(*users))("secret")


@pytest.mark.parametrize("token", ["secret", "a.b.c", "a.bm8.c", "a.WzFd.c", "..", "\x00.\udcff."])
@pytest.mark.parametrize("users", [(OTHER,), (0, OTHER)], ids=["alone", "beside root"])
def test_a_token_is_not_sent_to_another_user(users: tuple[int, ...], token: str) -> None:
    with pytest.raises(errors.Unauthenticated, match=rf"user {OTHER} listens on {ADDRESS}.* The token was not sent"):
        PortCheck(ADDRESS, listeners=listening(*users))(token)


def test_the_user_of_the_coordinator_may_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who has a token for the cluster of another user of the machine."""
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    signer = TokenSigner(TokenSigner.new_key())
    token = signer.sign(Principal("ann", AccessRole.READER, "id"), valid_s=60)
    monkeypatch.undo()
    PortCheck(ADDRESS, listeners=listening(OTHER))(token)
    with pytest.raises(errors.Unauthenticated, match=f"user {OTHER + 1} listens"):
        PortCheck(ADDRESS, listeners=listening(OTHER + 1, OTHER))(token)
    assert TokenVerifier(signer.public_key).identify(token).name == "ann"


def test_a_user_mark_does_not_show_the_user() -> None:
    assert str(OTHER) not in {USER_MARK, user_mark(OTHER)}
    assert user_mark(OTHER) != user_mark(OWN)


@pytest.mark.parametrize("address", ["10.1.2.3:7070", "node:7070", "[2001:db8::1]:7070", "0.0.0.0:7070", "7070"])
def test_another_host_gets_no_token(address: str) -> None:
    with pytest.raises(errors.Unauthenticated, match=r"another host.*The token was not sent. Set SHOAL_TLS_CA"):
        PortCheck(address, listeners=listening())("secret")
    with pytest.raises(errors.Unauthenticated, match=r"another host.*The call was not sent.*SHOAL_INSECURE=1"):
        PortCheck(address, always=True, listeners=listening())("")
    PortCheck(address, listeners=listening())("")
    PortCheck(address, always=True, insecure=True, listeners=listening())("secret")


def test_a_port_of_loopback_without_a_number_is_not_checked() -> None:
    PortCheck("127.0.0.1:http", listeners=listening(OTHER))("secret")


def test_without_a_token_only_roles_check() -> None:
    """Another user's coordinator could make a server ask for no tokens, and could assign jobs to a worker."""
    PortCheck(ADDRESS, listeners=listening(OTHER))("")
    PortCheck(ADDRESS, always=True, listeners=listening(OWN))("")
    with pytest.raises(errors.Unauthenticated, match=rf"user {OTHER} listens on {ADDRESS}.* The call was not sent"):
        PortCheck(ADDRESS, always=True, listeners=listening(OTHER))("")


def test_a_check_is_valid_for_a_while() -> None:
    now, looked = [100.0], []

    def listeners(_host: str, _port: int) -> frozenset[int]:
        looked.append(now[0])
        return frozenset({OWN} if now[0] < 101 else {OTHER})

    check = PortCheck(ADDRESS, every_s=0.5, listeners=listeners, clock=lambda: now[0])
    for now[0] in (100.0, 100.1, 100.4, 100.6, 100.9):
        check("secret")
    assert looked == [100.0, 100.6]
    now[0] = 101.1
    for _ in range(2):  # an error is not remembered as a success
        with pytest.raises(errors.Unauthenticated):
            check("secret")


def test_credentials_without_tls_check_who_listens() -> None:
    assert isinstance(Credentials().port_check(ADDRESS), PortCheck)


FAR = "192.0.2.2:7070"  # of no host (RFC 5737)


def test_a_forgotten_variable_sends_no_token_of_the_access_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator has TLS and is down. Another user of its machine has taken its port, which has no TLS."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    AccessFile(FAR).write({AccessRole.ADMIN: "secret"})
    forgotten = Credentials.find(environment={})
    with (
        closing(CoordinatorClient(FAR, credentials=forgotten.for_coordinator(FAR, AccessRole.ADMIN))) as client,
        pytest.raises(errors.Unauthenticated, match=rf"^{FAR} is on another host.*has no TLS files"),
    ):
        client.call(client.members.GetStatus, coordinator_pb2.GetStatusRequest())
    insecure = Credentials.find(environment={"SHOAL_INSECURE": "1"}).for_coordinator(FAR, AccessRole.ADMIN)
    assert token_in(insecure.metadata(insecure.port_check(FAR))) == "secret"


def test_a_closed_role_calls_no_other_host_without_tls() -> None:
    """The answer could have another key of tokens, and could assign jobs to a worker."""
    presented = Credentials(closed=True)
    with (
        closing(CoordinatorClient(FAR, credentials=presented)) as client,
        pytest.raises(errors.Unauthenticated, match=rf"^{FAR} is on another host.*The call was not sent"),
    ):
        MembershipClient(client, coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member="gpu-1")).start()
