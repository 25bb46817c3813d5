"""The certificates of a run, which are made again before they expire."""

import datetime
import secrets
import shutil
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from shoal._security.certificates import ROLES, make_certificates

# An allocation can wait, and then run, for weeks.
_LEFT = datetime.timedelta(days=60)


def ensure_certificates(folder: Path, now: datetime.datetime | None = None) -> None:
    """Makes new certificates if some are missing, damaged, or valid for less than 60 days.

    Args:
        folder: folder of the certificates.
        now: the current time. None means that the clock gives it.

    Raises:
        OSError: the folder cannot be written.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    if all(_usable(folder, holder, now) for holder in ("ca", *ROLES)):
        return
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        make_certificates(fresh, now=now)
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _usable(folder: Path, holder: str, now: datetime.datetime) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate((folder / f"{holder}.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / f"{holder}-key.pem").read_bytes(), None)
    except (OSError, ValueError):
        return False
    return certificate.public_key() == key.public_key() and certificate.not_valid_after_utc - now > _LEFT


__all__ = ["ensure_certificates"]
