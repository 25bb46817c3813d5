"""The coordinator's tokens for servers: one for each server, which is renewed before it expires."""

import pytest

from shoal import errors
from shoal._security import AccessRole
from shoal._security.tokens import TokenSigner, TokenVerifier
from shoal_coordinator.server_tokens import ServerTokens


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_each_server_gets_a_token_of_its_own_which_is_renewed() -> None:
    clock = Clock()
    signer = TokenSigner(TokenSigner.new_key(), clock)
    tokens = ServerTokens(signer, clock)
    verifiers = {name: TokenVerifier(signer.public_key, clock, server=name) for name in ("a", "b")}
    first = tokens.token_for("a")
    assert tokens.token_for("a") == first
    assert verifiers["a"].identify(first).role is AccessRole.COORDINATOR
    with pytest.raises(errors.Unauthenticated, match="server 'b' refuses it"):
        verifiers["b"].identify(first)
    verifiers["b"].identify(tokens.token_for("b"))
    clock.now += 240.0
    renewed = tokens.token_for("a")
    assert renewed != first
    clock.now += 360.0
    verifiers["a"].identify(renewed)
    with pytest.raises(errors.Unauthenticated, match="expired"):
        verifiers["a"].identify(first)


def test_a_token_is_replaced_when_the_clock_is_set_back() -> None:
    """By the clock that was set back, the old token is valid for too long, and would not be replaced for as long."""
    clock = Clock()
    tokens = ServerTokens(TokenSigner(TokenSigner.new_key(), clock), clock)
    first = tokens.token_for("a")
    clock.now -= 3_600.0
    assert tokens.token_for("a") != first
