"""Certificates for tests, and TLS settings with them."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from shoal._security import Credentials
from shoal._security.certificates import make_certificates
from shoal._security.tls import TlsFiles


def tls_files(
    folder: Path, role: str = "server", *, ca: Path | None = None, client_certificates: bool = True
) -> TlsFiles:
    """Returns the TLS settings of a role, with the files that `make_certificates` wrote to a folder."""
    certificate, key = folder / f"{role}.pem", folder / f"{role}-key.pem"
    return TlsFiles(ca or folder / "ca.pem", certificate, key, client_certificates=client_certificates)


def credentials(folder: Path, role: str = "server") -> Credentials:
    """Returns the credentials of a role, with the files of a folder."""
    return Credentials(tls_files(folder, role))


def replace_certificates(folder: Path, scratch: Path, roles: Sequence[str] = ("server", "worker")) -> None:
    """Replaces the certificates of roles by new ones of the same CA, one file after the other."""
    make_certificates(scratch, ca=folder)
    for role in roles:
        for name in (f"{role}.pem", f"{role}-key.pem"):
            shutil.copy(scratch / name, scratch / f"{name}.new")
            os.replace(scratch / f"{name}.new", folder / name)
