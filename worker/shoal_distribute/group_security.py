"""Security of a group: how its ranks prove to each other that they belong to it.

Ranks that know the same secret, or have certificates of servers from the same CA, are one group. On loopback alone,
the secret is a file that only this user can read, and nobody has to make it.
"""

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from shoal import _rpc, errors
from shoal._security import INSECURE_VARIABLE, AccessRole, Credentials, PortCheck
from shoal._system import docs_url, private_files
from shoal._system.listeners import loopback_addresses
from shoal._transport import ByteStream, Security, TokenSecurity, secured

SECRET_VARIABLE = "SHOAL_GROUP_SECRET_FILE"  # noqa: S105 - the name of a variable
_MIN_BYTES, _MAX_BYTES = 16, 4096

_LOG = logging.getLogger("shoal")


class _SecretSecurity(TokenSecurity):
    """Security by a secret, which is not sent to a port of loopback on which another user listens."""

    def protect(self, stream: ByteStream, peer: str, *, accepted: bool) -> ByteStream:
        if not accepted:
            # Another host gets only a proof of the secret.
            PortCheck(peer, always=True, insecure=True)("")
        return stream


def group_security(addresses: Sequence[str], environment: Mapping[str, str] = os.environ) -> Security:
    """Returns the security of a group, as the environment says.

    - `SHOAL_GROUP_SECRET_FILE` names a file with a secret of 16 bytes or more, the same one at each rank.
    - With `SHOAL_TLS_CA`, `SHOAL_TLS_CERT` and `SHOAL_TLS_KEY`, connections are encrypted, and both ends show
      certificates of the CA. Each end requires that the other's certificate names the role of a server.
    - Without these, all ranks must be on loopback, or `SHOAL_INSECURE=1` must be set. On loopback, the secret is in a
      file of this user.

    If other hosts have ranks and there is no TLS, a warning and the metric `shoal_group_insecure` say so.

    Args:
        addresses: host:port of each rank.
        environment: the environment variables.

    Returns:
        The security.

    Raises:
        BadRequest: the secret or the TLS files cannot be used, or there are none and a rank is on another host.
    """
    credentials = Credentials.find(role=AccessRole.SERVER, environment=environment)
    local = all(loopback_addresses(_rpc.parse_address(address)[0]) for address in addresses)
    if named := environment.get(SECRET_VARIABLE):
        secret = _read(Path(named))
    elif credentials.tls or environment.get(INSECURE_VARIABLE) == "1":
        secret = b""
    elif local:
        secret = _own_secret(private_files.state_folder(environment) / "group-secret")
    else:
        raise errors.BadRequest(
            f"ranks of this group are on other hosts, and nothing proves who belongs to it; set {SECRET_VARIABLE} to a "
            "file with the same secret at each rank, set SHOAL_TLS_CA, SHOAL_TLS_CERT and SHOAL_TLS_KEY, or set "
            f"{INSECURE_VARIABLE}=1 to accept everybody",
            variable=SECRET_VARIABLE,
        )
    # The secret itself stays here, however many connections it protects.
    token = hmac.digest(secret, b"shoal group", hashlib.sha256)
    if credentials.tls:
        return secured(TokenSecurity(token), credentials, callers=AccessRole.SERVER)
    if not local:
        _note_insecure()
        others = "only a secret that they share" if secret else f"nothing, because of {INSECURE_VARIABLE}=1"
        _LOG.warning(
            f"ranks of this group are on other hosts, without TLS: all who reach the network can read and change what "
            f"the ranks exchange, and {others} protects the group from other processes. Set SHOAL_TLS_CA, "
            f"SHOAL_TLS_CERT and SHOAL_TLS_KEY ({docs_url('how-to/security')})"
        )
    return _SecretSecurity(token)


@cache
def _note_insecure() -> None:
    """Sets the metric of groups without TLS, in the registry that a script serves."""
    from prometheus_client import Gauge  # noqa: PLC0415 - most groups do not need it

    Gauge("shoal_group_insecure", "1 if a group of this process connects to other hosts without TLS.").set(1)


def _read(file: Path) -> bytes:
    try:
        secret = private_files.read_secret("the secret of the group", file, errors.BadRequest, _MAX_BYTES + 1)
    except OSError as error:
        raise errors.BadRequest(f"cannot read the secret of the group: {error}", file=file) from None
    if not _MIN_BYTES <= len(secret.strip()) <= _MAX_BYTES:
        raise errors.BadRequest(
            f"{file} has {len(secret.strip())} bytes; a secret has {_MIN_BYTES} to {_MAX_BYTES:,}. Make one with: "
            f"head -c 32 /dev/urandom | base64 > {file}",
            file=file,
        )
    return secret.strip()


def _own_secret(file: Path) -> bytes:
    """Returns the secret of this user on this machine, and makes it if there is none."""
    if not file.exists():
        unfinished = file.with_name(f"{file.name}-{secrets.token_hex(8)}")
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(private_files.create(unfinished), "w") as created:
                created.write(secrets.token_hex(32))
            with suppress(FileExistsError):  # another rank was faster, and its file counts
                os.link(unfinished, file)
            unfinished.unlink()
        except OSError as error:
            raise errors.BadRequest(
                f"cannot write the secret of this user's groups to {file}: {error}. Set XDG_STATE_HOME to a folder "
                f"that this user may write to, or set {SECRET_VARIABLE}",
                file=file,
            ) from None
    return _read(file)


__all__ = ["SECRET_VARIABLE", "group_security"]
