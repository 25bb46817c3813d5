"""Tokens: whom they identify, and until when."""

import pytest

from shoal import errors
from shoal._security import MAX_TOKEN_BYTES, AccessRole, Principal, authorization, token_in
from shoal._security.tokens import TokenSigner, TokenVerifier, server_audience


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def pair(clock: Clock) -> tuple[TokenSigner, TokenVerifier]:
    """Returns a signer, and the verifier of its tokens."""
    signer = TokenSigner(TokenSigner.new_key(), clock)
    return signer, TokenVerifier(signer.public_key, clock)


def test_a_token_identifies_its_holder_until_it_expires() -> None:
    clock = Clock()
    signer, verifier = pair(clock)
    ticket = Principal("worker-0", AccessRole.TRAINER, "t1", "job", 7)
    token = signer.sign(ticket, valid_s=60)
    assert verifier.identify(token) == ticket
    clock.now += 59
    assert verifier.identify(token) == ticket
    clock.now += 86_401
    with pytest.raises(errors.Unauthenticated, match=r"expired \d+ s ago.*compare this clock"):
        verifier.identify(token)


def test_expired_tokens_are_not_remembered() -> None:
    clock = Clock()
    signer, verifier = pair(clock)
    for life in range(50):
        verifier.identify(signer.sign(Principal("worker-0", AccessRole.TRAINER, "t1", "job", life), valid_s=600))
    clock.now += 601
    admin = signer.sign(Principal("ann", AccessRole.ADMIN, "t2"), valid_s=60)
    verifier.identify(admin)
    assert verifier.remembered == 1


def test_a_changed_token_is_refused() -> None:
    signer, verifier = pair(Clock())
    token = signer.sign(Principal("ann", AccessRole.READER, "t1"), valid_s=60)
    head, claims, signature = token.split(".")
    forged = signer.sign(Principal("ann", AccessRole.ADMIN, "t1"), valid_s=60).split(".")[1]
    unsigned = "eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0"  # {"alg":"none","typ":"JWT"}
    for other in (
        f"{head}.{forged}.{signature}",
        f"{unsigned}.{claims}.",
        f"{head}.{claims}",
        "a" * (MAX_TOKEN_BYTES + 1),
        "\udcff.x.y",
        "",
    ):
        with pytest.raises(errors.Unauthenticated):
            verifier.identify(other)


def test_a_revoked_token_and_its_tickets_are_refused() -> None:
    signer, verifier = pair(Clock())
    token = signer.sign(Principal("ann", AccessRole.SUBMITTER, "t1"), valid_s=60)
    ticket = signer.sign(Principal("s", AccessRole.TRAINER, "t1", "job", 1), valid_s=60)
    verifier.identify(token)
    verifier.revoke(frozenset({"t1"}))
    for revoked in (token, ticket):
        with pytest.raises(errors.Unauthenticated, match="was revoked"):
            verifier.identify(revoked)


def test_a_token_of_the_coordinator_is_accepted_only_by_the_server_that_it_names() -> None:
    clock = Clock()
    signer, elsewhere = pair(clock)
    here = TokenVerifier(signer.public_key, clock, server="server-0")
    coordinator = Principal("coordinator", AccessRole.COORDINATOR)
    token = signer.sign(coordinator, valid_s=60, audience=server_audience("server-0"))
    assert here.identify(token) == coordinator
    for verifier, refused in [
        (here, signer.sign(coordinator, valid_s=60, audience=server_audience("server-1"))),
        (here, signer.sign(coordinator, valid_s=60)),
        (elsewhere, token),
        (elsewhere, signer.sign(coordinator, valid_s=60)),
    ]:
        with pytest.raises(errors.Unauthenticated, match="the coordinator's token is for"):
            verifier.identify(refused)


def test_a_server_does_not_accept_a_token_of_another_role_with_its_audience() -> None:
    signer, _ = pair(Clock())
    here = TokenVerifier(signer.public_key, Clock(), server="server-0")
    token = signer.sign(Principal("ann", AccessRole.ADMIN, "t1"), valid_s=60, audience=server_audience("server-0"))
    with pytest.raises(errors.Unauthenticated):
        here.identify(token)


def test_a_key_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(errors.BadRequest, match="not an Ed25519 public key"):
        TokenVerifier(b"short")


def test_a_token_travels_in_the_metadata_of_a_call() -> None:
    assert token_in((("x", "y"), *authorization("abc"))) == "abc"
    assert token_in(authorization("")) == ""
    assert token_in((("authorization", "Basic abc"),)) == ""
    assert token_in(None) == ""
