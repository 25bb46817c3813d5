"""Tokens, which prove the identity of callers. The coordinator signs them with Ed25519.

A token is a JSON Web Token (RFC 7519) with the algorithm EdDSA (RFC 8037). A *ticket* is a token for one participant of
one job. Servers have only the coordinator's public key, with which they check tokens without a call to the coordinator.
"""

import math
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jwt
from cryptography.exceptions import InvalidKey, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shoal import errors
from shoal._limits import catalogue
from shoal._security.bearer import MAX_TOKEN_BYTES
from shoal._security.port_check import USER_MARK, user_mark
from shoal._security.principal import AccessRole, Principal

# Tokens whose signature was checked are remembered, at most so many, until they expire. Each session and each worker of
# a job has a ticket of its own, so many tokens expire in a busy cluster. Expired ones are removed at most this often.
_REMEMBERED, _SWEEP_S = 4_096, 60.0
_ALGORITHM = "EdDSA"
_KEY_BYTES = 32
# What the library and conversions of claims raise for texts that are no tokens.
_INVALID = (jwt.InvalidTokenError, ValueError, TypeError, OverflowError)


class TokenSigner:
    """Makes tokens. Only the coordinator has a signer.

    Args:
        key: 32 bytes of an Ed25519 private key.
        clock: returns the time in seconds since 1970.
    """

    def __init__(self, key: bytes, clock: Callable[[], float] = time.time) -> None:
        self._key, self._clock = Ed25519PrivateKey.from_private_bytes(key), clock

    @staticmethod
    def new_key() -> bytes:
        """Returns a new random key."""
        return secrets.token_bytes(_KEY_BYTES)

    @property
    def public_key(self) -> bytes:
        """The 32 bytes with which `TokenVerifier` checks the tokens."""
        return self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def sign(self, principal: Principal, *, valid_s: float, audience: str = "") -> str:
        """Returns a token.

        Args:
            principal: whom the token identifies.
            valid_s: seconds until the token expires. It expires earlier if `principal.expires_at` is earlier, so a
                ticket or a login never outlives the token for which it was made.
            audience: the only place that accepts the token. Empty, except for calls of the coordinator:
                `server_audience` of the server.

        Returns:
            The token, in letters, digits, dots, - and _.
        """
        now = self._clock()
        claims = {
            "sub": principal.name,
            "role": principal.role.value,
            "jti": principal.token,
            "iat": int(now),
            "exp": int(min(now + valid_s, principal.expires_at)),
            USER_MARK: user_mark(os.geteuid()),  # as whom the processes of the cluster on this machine run
        }
        if principal.expires_at < math.inf:
            claims["until"] = int(principal.expires_at)
        if audience:
            claims |= {"aud": audience, "sid": secrets.token_hex(8)}  # so that no two tokens are the same
        if principal.job:
            claims |= {"job": principal.job, "life": principal.incarnation}
        return jwt.encode(claims, self._key, algorithm=_ALGORITHM)

    def sign_claims(self, claims: Mapping[str, str | int], *, audience: str, valid_s: float) -> str:
        """Returns signed claims that identify no caller, so that no call accepts them as a token.

        Args:
            claims: the claims.
            audience: the only place that accepts them.
            valid_s: seconds until they expire.
        """
        now = self._clock()
        times = {"iat": int(now), "exp": int(now + valid_s)}
        return jwt.encode({**claims, "aud": audience, **times}, self._key, algorithm=_ALGORITHM)


def server_audience(member: str) -> str:
    """Returns the audience of the coordinator's token for the server with this member id."""
    return f"server:{member}"


class TokenVerifier:
    """Checks tokens. Thread-safe.

    Args:
        public_key: 32 bytes, from `TokenSigner.public_key`.
        clock: returns the time in seconds since 1970.
        server: member id of the server that checks the tokens. It accepts a token of the coordinator only if the token
            was made for it. If it is empty, no token of the coordinator is accepted.

    Raises:
        BadRequest: the key is not an Ed25519 public key.
    """

    def __init__(self, public_key: bytes, clock: Callable[[], float] = time.time, *, server: str = "") -> None:
        self._server = server
        try:
            self._key = Ed25519PublicKey.from_public_bytes(public_key)
        except (ValueError, InvalidKey, UnsupportedAlgorithm) as error:
            raise errors.BadRequest(f"the key of the tokens is not an Ed25519 public key: {error}") from None
        self._clock = clock
        self._lock = threading.Lock()  # guards the next three
        # By token, with the time of expiry.
        self._known: OrderedDict[str, tuple[Principal, float]] = OrderedDict()
        self._swept_at = clock()  # when expired ones were last removed
        self._revoked: frozenset[str] = frozenset()

    @property
    def revoked(self) -> frozenset[str]:
        """Ids of tokens that are refused although they have not expired."""
        return self._revoked

    @property
    def remembered(self) -> int:
        """The number of tokens whose signature need not be checked again."""
        return len(self._known)

    def revoke(self, tokens: frozenset[str]) -> None:
        """Sets the ids of the tokens that are refused."""
        with self._lock:
            self._revoked = tokens

    @property
    def now(self) -> float:
        """The time in seconds since 1970, by the clock of this process."""
        return self._clock()

    def claims(self, signed: str, required: Iterable[str]) -> dict[str, Any]:
        """Returns the claims of a token, or those that `TokenSigner.sign_claims` has signed.

        The caller checks their audience and their expiry.

        Args:
            signed: the text.
            required: the names of the claims that must be there.

        Raises:
            Unauthenticated: this cluster's coordinator did not sign it, a claim is missing, or it is too long.
        """
        if len(signed) > MAX_TOKEN_BYTES:
            raise catalogue.MAX_TOKEN_BYTES.refusal(f"the token has {len(signed)} characters")
        try:
            return jwt.decode(
                signed,
                self._key,
                algorithms=[_ALGORITHM],
                options={"require": [*required], "verify_exp": False, "verify_iat": False, "verify_aud": False},
            )
        except _INVALID:
            raise _foreign_token() from None

    def identify(self, token: str, *, on_identified: Callable[[Principal], object] = bool) -> Principal:
        """Returns whom a token identifies.

        Args:
            token: the token.
            on_identified: called with whom a genuine token identifies, before the token is checked for its expiry and
                for revocation.

        Raises:
            Unauthenticated: it is not a token of this cluster, it is for another place, or it has expired or was
                revoked.
        """
        with self._lock:
            known = self._known.get(token)
        principal, expires = known or self._read(token)
        on_identified(principal)
        self.check(principal)
        now = self._clock()
        if (late_s := now - expires) >= 0:
            raise _late_token(principal, late_s)
        if known is None:
            self._remember(token, principal, expires, now)
        return principal

    def check(self, principal: Principal) -> None:
        """Checks that the token or the certificate which identified a caller earlier is still valid.

        A ticket or a login is valid for as long as the token or the certificate for which it was made.

        Raises:
            Unauthenticated: the token or the certificate has expired or was revoked.
        """
        late_s = self._clock() - principal.expires_at
        if late_s >= 0:
            raise (
                _late_certificate(principal, late_s)
                if principal.proof == "certificate"
                else _late_token(principal, late_s)
            )
        if principal.token in self._revoked:
            raise errors.Unauthenticated(
                f"the {principal.proof} of {principal} was revoked; get a new one from an admin"
            )

    def _remember(self, token: str, principal: Principal, expires: float, now: float) -> None:
        with self._lock:
            if abs(now - self._swept_at) >= _SWEEP_S:  # the clock may go back
                for late in [known for known, (_, until) in self._known.items() if until <= now]:
                    del self._known[late]
                self._swept_at = now
            self._known[token] = principal, expires
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)

    def _read(self, token: str) -> tuple[Principal, float]:
        claims = self.claims(token, ["sub", "role", "jti", "exp"])
        try:
            role = AccessRole(claims["role"])
            self._check_audience(role, claims.get("aud", ""))  # it depends on the role
            expires = float(claims["exp"])
            principal = Principal(
                str(claims["sub"]),
                role,
                claims["jti"],
                str(claims.get("job", "")),
                int(claims.get("life", 0)),
                float(claims.get("until", expires)),
            )
        except _INVALID:
            raise _foreign_token() from None
        return principal, expires

    def _check_audience(self, role: AccessRole, found: object) -> None:
        if role is not AccessRole.COORDINATOR:
            if found != "":  # only the tokens of the coordinator have one
                raise jwt.InvalidAudienceError
        elif not self._server or found != server_audience(self._server):
            here = f"server {self._server!r}" if self._server else "this process"
            raise errors.Unauthenticated(
                f"the coordinator's token is for {str(found) or 'no server'!r}, and {here} refuses it. Only the server "
                "that the token names accepts it; check that the server is registered with its own address"
            )


def _foreign_token() -> errors.Unauthenticated:
    return errors.Unauthenticated(
        "this cluster's coordinator did not make the token. Use a token of this cluster: the one in the access "
        "file on the coordinator's machine, or one from `shoal token create`"
    )


def _late_certificate(principal: Principal, late_s: float) -> errors.Unauthenticated:
    return errors.Unauthenticated(
        f"the certificate of {principal} expired {late_s:.0f} s ago by the clock of the process that refuses "
        "it. Replace the files of the certificate, and connect again"
    )


def _late_token(principal: Principal, late_s: float) -> errors.Unauthenticated:
    return errors.Unauthenticated(
        f"the token of {principal} expired {late_s:.0f} s ago by the clock of the process "
        "that refuses it. Get a new one with `shoal token create`; if it should be valid, compare this clock "
        "with that of the coordinator"
    )


__all__ = ["TokenSigner", "TokenVerifier", "server_audience"]
