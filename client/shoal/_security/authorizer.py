"""Authorization of the calls that a server receives: who makes a call, and whether that caller may make it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal import errors
from shoal._security.grants import CopyGrant
from shoal._security.member_secrets import MemberSecrets
from shoal._security.permissions import OPEN_CALLS, check_own, check_permitted
from shoal._security.principal import Principal

if TYPE_CHECKING:
    from shoal._security.tokens import TokenVerifier


class Authorizer:
    """Authorizes the calls of one gRPC server. Thread-safe.

    A server learns the public key of the tokens when it registers. Until then it refuses all calls except those that
    anybody may make. The callers repeat the refused calls.

    Args:
        verifier: checks tokens. If it is None, the caller must call `require`, `use_key` or `allow_all` later.
        server: member id of this server. It accepts only those tokens of the coordinator that were made for it. Empty
            for other processes, which accept no token of the coordinator.
        members: the secrets of the cluster's members, at the coordinator.
    """

    def __init__(
        self, verifier: "TokenVerifier | None" = None, *, server: str = "", members: MemberSecrets | None = None
    ) -> None:
        self._verifier, self._server, self._open, self._members = verifier, server, False, members
        self._on_revoked: Callable[[], object] = bool  # does nothing

    @property
    def is_open(self) -> bool:
        """Whether all calls are allowed, without a token."""
        return self._open

    @property
    def verifier(self) -> "TokenVerifier | None":
        """Checks tokens; None if there is no key yet."""
        return self._verifier

    def require(self, verifier: "TokenVerifier") -> None:
        """Requires tokens that this verifier accepts."""
        self._verifier, self._open = verifier, False

    def use_key(self, key: bytes, revoked: Iterable[str]) -> None:
        """Requires tokens that this public key verifies. An empty key allows all calls.

        Args:
            key: the public key.
            revoked: ids of the tokens that are refused from the first call on. A server that registers again may have
                calls that wait, whose tokens were revoked meanwhile. So this counts as a revocation.

        Raises:
            BadRequest: the key is not valid.
        """
        if not key:
            self.allow_all()
            return
        from shoal._security.tokens import TokenVerifier  # noqa: PLC0415 - cryptography is slow to import

        verifier = TokenVerifier(key, server=self._server)
        verifier.revoke(frozenset(revoked))
        self.require(verifier)
        self._on_revoked()

    def revoke(self, tokens: Iterable[str]) -> None:
        """Sets the ids of the tokens that are refused."""
        revoked = frozenset(tokens)
        if self._verifier and revoked != self._verifier.revoked:
            self._verifier.revoke(revoked)
            self._on_revoked()

    def on_revoked(self, callback: Callable[[], object]) -> None:
        """Sets what is called when other tokens are refused than before, on the thread that sets their ids."""
        self._on_revoked = callback

    def allow_all(self) -> None:
        """Allows all calls, as in a cluster that was started with --insecure."""
        self._verifier, self._open = None, True

    def authorize(
        self,
        call: str,
        token: str,
        certificate: Callable[[], bytes] = bytes,
        on_identified: Callable[[Principal], object] = bool,
    ) -> Principal | None:
        """Returns who makes a call, or None if the call needs no identity.

        Args:
            call: SERVICE/METHOD.
            token: the token of the call; empty if it has none.
            certificate: returns the certificate of the caller as PEM; empty if the connection has none. It identifies a
                caller without a token.
            on_identified: called with the caller when its token or its certificate is known to be genuine, also if the
                call is then refused because it is revoked or has expired, or because the caller may not make the call.

        Raises:
            Unauthenticated: the call has no valid token.
            Forbidden: its caller may not make it.
            Unreachable: this server has no key yet.
        """
        if self._open or call in OPEN_CALLS:
            return None
        verifier = self._key_holder()
        if not token:
            return self._authorize_certificate(call, certificate(), on_identified)
        principal = verifier.identify(token, on_identified=on_identified)
        check_permitted(principal, call)
        return principal

    def _authorize_certificate(self, call: str, pem: bytes, on_identified: Callable[[Principal], object]) -> Principal:
        if not pem:
            raise errors.Unauthenticated(
                f"{call.rpartition('/')[2]} was called without a token. Processes of the coordinator's user on its "
                "machine find a token by themselves. For all others, set SHOAL_TOKEN_FILE to a file "
                "with a token from `shoal token create`, or use TLS with a certificate that names a role"
            )
        from shoal._security.certificate_identity import principal_in  # noqa: PLC0415 - cryptography is slow to import

        principal = principal_in(pem)
        on_identified(principal)
        self.check_valid(principal)
        check_permitted(principal, call)
        return principal

    def with_member(self, principal: Principal | None, secret: str) -> Principal | None:
        """Returns a caller with the registration whose secret it has shown.

        Args:
            principal: the caller.
            secret: the secret; empty if the call shows none.

        Raises:
            SecretRefused: the secret is not genuine.
        """
        if not (principal and secret and self._members):
            return principal
        return replace(principal, member=self._members.identify(secret))

    def check_valid(self, principal: Principal) -> None:
        """Checks that the token or the certificate which identified a caller earlier is still valid.

        Raises:
            Unauthenticated: it has expired or was revoked.
        """
        if self._verifier:
            self._verifier.check(principal)

    def check_participant(
        self, principal: Principal | None, job: str, worker: str, incarnation: int, *, reading: bool
    ) -> None:
        """Checks that a caller acts only as the participant that its ticket names, while its token is valid.

        Args:
            principal: the caller. None is not checked.
            job: the job that the request names.
            worker: the participant that the request names; empty for a reader.
            incarnation: the participant's incarnation.
            reading: whether the request only reads.

        Raises:
            Forbidden: the ticket is for another participant.
            Unauthenticated: the token of the ticket expired or was revoked after the caller connected.
        """
        if principal is None:
            return
        self.check_valid(principal)
        check_own(principal, job, worker, incarnation, reading=reading)

    def check_copy(self, copy: CopyGrant, grant: str, incarnation: int) -> None:
        """Checks that the coordinator has granted a copy of a lock group to this server.

        Args:
            copy: the copy that another server asks for.
            grant: the grant that it presents.
            incarnation: the incarnation of this server.

        Raises:
            Forbidden: the coordinator has not granted it.
            Unreachable: this server has no key yet.
        """
        if self._open:
            return
        copy.check(grant, self._key_holder(), self._server, incarnation)

    def _key_holder(self) -> "TokenVerifier":
        if self._verifier is None:
            raise errors.Unreachable("this server is not registered yet; try again")
        return self._verifier


def open_authorizer() -> Authorizer:
    """Returns an authorizer that allows all calls."""
    authorizer = Authorizer()
    authorizer.allow_all()
    return authorizer


__all__ = ["Authorizer", "open_authorizer"]
