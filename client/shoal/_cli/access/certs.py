"""The commands `certs init` and `certs issue`, which make certificates for TLS."""

from pathlib import Path
from typing import Annotated

import typer

from shoal._cli import options
from shoal._cli.output import Output

app = typer.Typer(no_args_is_help=True, help="Makes certificates for TLS: `shoal certs COMMAND --help`.")

CertificateFolder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Folder to write to. It is created if it is missing.")
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="NAME",
        help="Name or address of a host of the cluster, such as node-1.example or *.servers.example. With ROLE=NAME, "
        "only the certificate of that role (coordinator, server or worker) names the host. Repeatable. The "
        "certificates of these roles also name localhost, 127.0.0.1, ::1 and this machine.",
    ),
]
CaFolder = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FOLDER",
        help="Folder of an earlier `shoal certs init`, whose CA issues the new certificates. Default: a new CA.",
    ),
]


@app.command()
def init(
    folder: CertificateFolder, host: Hosts = None, ca: CaFolder = None, as_json: options.JsonOption = False
) -> None:
    """Makes a CA for development, and a certificate and key for each access role.

    The folder gets ca.pem, ca-key.pem, and NAME.pem and NAME-key.pem for coordinator, server, worker, trainer, admin,
    submitter and reader. Existing files are never overwritten. Certificates are valid for 365 days, and a CA for 10
    years.
    """
    with Output(as_json) as out:
        from shoal._security.certificates import CERTIFICATE_DAYS, ROLES, make_certificates  # noqa: PLC0415 - slow

        files = make_certificates(folder, host or (), ca=ca)
        where = folder.resolve()
        out.message(
            f"wrote {len(files)} files to {where}, valid for {CERTIFICATE_DAYS} days. A server uses them with\n"
            f"  export SHOAL_TLS_CA={where}/ca.pem SHOAL_TLS_CERT={where}/server.pem "
            f"SHOAL_TLS_KEY={where}/server-key.pem\n"
            f"The other access roles have files of their names: {', '.join(ROLES)}. Keep ca-key.pem off the cluster.",
            {"folder": str(where), "files": [file.name for file in files], "days": CERTIFICATE_DAYS},
        )


@app.command()
def issue(
    role: Annotated[
        str,
        typer.Argument(
            metavar="ROLE",
            help="Access role of the holder: coordinator, server, worker, trainer, admin, submitter or reader; or "
            "`up`, for all roles of `shoal up` together.",
        ),
    ],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the holder: 1 to 63 characters of a-z, 0-9 and -.")
    ],
    ca: Annotated[Path, typer.Option("--ca", metavar="FOLDER", help="Folder of an earlier `shoal certs init`.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME",
            help="Name or address of a host of the holder. Only for a coordinator, a server or a worker. Repeatable. "
            "The certificate of such a role also names localhost, 127.0.0.1 and ::1.",
        ),
    ] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Folder to write to. Default: the folder of --ca.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Days until the certificate expires.")] = 365,
    as_json: options.JsonOption = False,
) -> None:
    """Makes a certificate and a key for one more holder, such as another submitter or the worker of another host.

    Writes NAME.pem and NAME-key.pem, and with --out also ca.pem: then that folder has all that the holder needs. The
    cluster identifies the owner of a job or a member by NAME. Existing files are never overwritten.
    """
    with Output(as_json) as out:
        from shoal._security.certificates import issue_certificate  # noqa: PLC0415 - slow

        share = out_folder is not None
        files = issue_certificate(role, name, host or (), ca=ca, folder=out_folder, days=days, with_ca=share)
        certificate, key = (file.resolve() for file in files[:2])
        shared = (out_folder or ca) / "ca.pem"
        if role == "trainer":
            use = f"A worker gives them to its trainers with\n  export SHOAL_TRAINER_TLS_CERT={certificate} "
            use += f"SHOAL_TRAINER_TLS_KEY={key}"
        else:
            holder = "`shoal up`" if role == "up" else f"The {role}"
            use = f"{holder} uses them with\n  export SHOAL_TLS_CA={shared.resolve()} "
            use += f"SHOAL_TLS_CERT={certificate} SHOAL_TLS_KEY={key}"
        out.message(
            f"wrote {certificate} and {key}, valid for {days} days. {use}",
            {
                "folder": str(certificate.parent),
                "files": [file.name for file in files],
                "ca": str(shared.resolve()),
                "days": days,
            },
        )


__all__ = ["app"]
