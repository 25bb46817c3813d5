"""Credentials: what a process presents to the processes that it calls, and which CAs it trusts."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal import errors
from shoal._security.access_files import TokenSource
from shoal._security.bearer import authorization
from shoal._security.port_check import INSECURE_VARIABLE, PortCheck
from shoal._security.principal import AccessRole

if TYPE_CHECKING:
    from shoal._security.tls import TlsFiles

# The variables with the paths of the CA's certificate, and of the certificate and key of the process.
VARIABLES = ("SHOAL_TLS_CA", "SHOAL_TLS_CERT", "SHOAL_TLS_KEY")


def no_token() -> str:
    """Returns no token."""
    return ""


def _keep() -> None:
    """Does nothing: the next call presents the same token."""


def _unchecked(token: str) -> None:
    """Does nothing: the token needs no check."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a process presents to others, and which CAs it trusts. An argument of each channel, client and server.

    Attributes:
        tls: TLS settings of connections. None means connections without TLS.
        token: returns the token or the ticket for a call, or an empty string if the call has none.
        discard_token: called when a server has refused the token, so that `token` gets another one.
        closed: whether this is a role without --insecure. Such a role joins no cluster that asks for no tokens. Without
            TLS, it calls no other host, and checks the user of a port of loopback, even if it has no token to send.
            Otherwise, while the coordinator is down, others could take its address and assign jobs to the role.
        insecure: whether tokens may be sent to other hosts without TLS, because this process was started with
            --insecure or SHOAL_INSECURE.
    """

    tls: "TlsFiles | None" = None
    token: Callable[[], str] = no_token
    discard_token: Callable[[], None] = _keep
    closed: bool = False
    insecure: bool = False

    def with_token(self, token: Callable[[], str], discard: Callable[[], None] = _keep) -> "Credentials":
        """Returns these credentials with another token."""
        return replace(self, token=token, discard_token=discard)

    def for_coordinator(self, address: str, role: AccessRole) -> "Credentials":
        """Returns these credentials. If they have no token, adds the one that this process finds for a coordinator.

        Args:
            address: host:port of the coordinator.
            role: the access role of the process.
        """
        return self if self.token is not no_token else self.with_token(TokenSource(address, role))

    def metadata(self, check: Callable[[str], object] = _unchecked) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of a call.

        Args:
            check: called with the token before it is sent; see `port_check`. By default, the caller has checked.

        Raises:
            ShoalError: the token cannot be read.
            Unauthenticated: `check` refuses.
        """
        token = self.token()
        check(token)
        return authorization(token)

    def port_check(self, address: str, every_s: float = 0.0) -> Callable[[str], object]:
        """Returns the check of who would receive a token that this process sends to an address.

        With TLS, the certificate of the other end proves who it is.

        Args:
            address: host:port.
            every_s: seconds for which a check is valid.
        """
        if self.tls:
            return _unchecked
        return PortCheck(address, every_s=every_s, always=self.closed, insecure=self.insecure)

    @classmethod
    def find(
        cls,
        ca: str = "",
        certificate: str = "",
        key: str = "",
        *,
        client_certificates: bool = True,
        role: AccessRole | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> "Credentials":
        """Returns the credentials with the TLS files of these paths. An empty path means the one in the environment.

        Args:
            ca: file with the certificates of the trusted CAs. Default: SHOAL_TLS_CA.
            certificate: file with the certificate of this process. Default: SHOAL_TLS_CERT. A client needs none if the
                servers do not require one.
            key: file with the key of the certificate. Default: SHOAL_TLS_KEY.
            client_certificates: whether servers of this process require a certificate of each client.
            role: access role in which this process serves; None for a client.
            environment: the environment variables.

        Returns:
            The credentials. They have no TLS if no path is given or set; SHOAL_INSECURE=1 then makes them insecure.

        Raises:
            BadRequest: the files are not valid; see `TlsFiles`.
        """
        given = zip((ca, certificate, key), VARIABLES, strict=True)
        paths = [path or environment.get(variable, "") for path, variable in given]
        if not any(paths):
            return cls(insecure=environment.get(INSECURE_VARIABLE) == "1")
        if not paths[0]:
            raise errors.BadRequest(
                "TLS has a certificate or a key, but no CA; give --tls-ca or SHOAL_TLS_CA, the certificate of the CA "
                "that issued the certificates of the cluster"
            )
        from shoal._security.tls import TlsFiles  # noqa: PLC0415 - cryptography is slow to import

        return cls(TlsFiles(*paths, client_certificates=client_certificates, role=role))


NO_CREDENTIALS = Credentials()

__all__ = ["NO_CREDENTIALS", "VARIABLES", "Credentials"]
