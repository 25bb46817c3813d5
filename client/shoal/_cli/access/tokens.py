"""Commands on tokens: `token create`, `revoke` and `ls`."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from shoal import errors
from shoal._cli import options
from shoal._cli.output import Output, Row
from shoal._security import GIVEN_ROLES, AccessRole
from shoal._system import docs_url, private_files
from shoal._system.terminal import printable
from shoal.v1 import token_pb2

app = typer.Typer(
    no_args_is_help=True, help="Makes, revokes and lists tokens, which identify the callers of a cluster."
)

_DAY_S = 86_400.0
_UNKNOWN = "-"
_ROLES = ", ".join(role.value for role in GIVEN_ROLES)


@app.command()
@options.connected
def create(
    connect: options.ConnectCoordinator,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the holder: 1 to 63 characters of a-z, 0-9 and -.")
    ],
    role: Annotated[str, typer.Option(help=f"Access role of the holder: {_ROLES}.")] = AccessRole.SUBMITTER.value,
    days: Annotated[float, typer.Option(help="Days until the token expires.")] = 30.0,
    file: Annotated[
        Path | None, typer.Option(help="New file for the token. It must not exist yet. Default: standard output.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Makes a token. Its holder stores it in a file that others cannot read, and sets SHOAL_TOKEN_FILE to the path."""
    with Output(as_json) as out, connect() as client:
        descriptor = _created(file) if file else None
        try:
            request = token_pb2.CreateTokenRequest(name=name, role=role, valid_s=days * _DAY_S)
            reply = client.call(client.tokens.CreateToken, request)
        except BaseException:
            if file and descriptor is not None:
                os.close(descriptor)
                file.unlink()
            raise
        record = {**_record(reply.token), "file": str(file or ""), "secret": "" if file else reply.secret}
        if descriptor is not None:
            with open(descriptor, "w") as private:
                private.write(f"{reply.secret}\n")
            out.message(f"token {reply.token.id} of {name} is in {file}", record)
        else:
            out.message(reply.secret, record)


@app.command()
@options.connected
def revoke(
    connect: options.ConnectCoordinator,
    token: Annotated[
        str, typer.Argument(metavar="TOKEN", help="Id of a token, name of a holder, or cert:SERIAL of a certificate.")
    ] = "",
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate to revoke, in PEM format. Its key is not needed.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Revokes a token, all tokens of one holder, or a certificate.

    The cluster then refuses calls with them. TLS clients do not look at revocations: the holder of the key of a
    coordinator or a server can pose as this role until the certificate expires, or the cluster has another CA.
    """
    with Output(as_json) as out:
        if bool(token) == bool(certificate):
            raise errors.BadRequest("give either TOKEN or --certificate FILE")
        token, roles = _read(certificate) if certificate else (token, "")
        with connect() as client:
            reply = client.call(client.tokens.RevokeToken, token_pb2.RevokeTokenRequest(token=token))
        if roles:
            typer.echo(
                f"warning: the certificate has the name {printable(roles)}. The cluster refuses calls with it, but TLS "
                "clients and ranks of groups do not look at revocations: who has its key can still pose as this role "
                f"until it expires. If the key has leaked, make a new CA; see {docs_url('how-to/security')}",
                err=True,
            )
        revoked = [_record(each) for each in reply.tokens]
        ids = ", ".join(each.id for each in reply.tokens)
        out.message(f"revoked {ids}" if ids else f"{token} was already revoked", {"revoked": revoked})


@app.command()
@options.connected
def ls(
    connect: options.ConnectCoordinator,
    as_json: options.JsonOption = False,
) -> None:
    """Lists the tokens that have not expired, and the revoked certificates."""
    with Output(as_json) as out, connect() as client:
        reply = client.call(client.tokens.ListTokens, token_pb2.ListTokensRequest())
        if as_json:
            for token in reply.tokens:
                out.record(_record(token))
            return
        rows: list[tuple[list[str], Row]] = [
            (
                [
                    token.id,
                    token.name or _UNKNOWN,
                    token.role or _UNKNOWN,
                    _local_time(token.expires_at) if token.expires_at else _UNKNOWN,
                    "revoked" if token.revoked else "valid",
                ],
                {},
            )
            for token in reply.tokens
        ]
        out.rows("tokens", ["id", "holder", "access role", "expires", "state"], rows)


def _read(file: Path) -> tuple[str, str]:
    """Returns the id of the certificate in a file, and the names of roles that it has."""
    from shoal._security.certificate_identity import certificate_id, roles_shown  # noqa: PLC0415 - slow

    try:
        pem = file.read_bytes()
        return certificate_id(pem), ", ".join(roles_shown(pem))
    except OSError as error:
        raise errors.BadRequest(f"cannot read the certificate {file}: {error.strerror}") from None
    except errors.BadRequest as error:
        raise errors.BadRequest(f"cannot revoke {file}: {error.message}") from None


def _created(file: Path) -> int:
    try:
        return private_files.create(file)
    except FileExistsError:
        raise errors.BadRequest(f"{file} exists, and is not overwritten; name a new file") from None
    except OSError as error:
        raise errors.BadRequest(f"cannot write the token to {file}: {error.strerror}") from None


def _local_time(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def _record(token: token_pb2.Token) -> Row:
    return {
        "id": token.id,
        "holder": token.name,
        "role": token.role,
        "expires_at": token.expires_at,
        "revoked": token.revoked,
    }


__all__ = ["app"]
