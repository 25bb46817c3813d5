"""The certificates of a run, which are made again before they expire."""

import datetime
import secrets
import shutil
import ssl
from pathlib import Path

from shoal import errors
from shoal._security.certificate_identity import principal_in
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
    if _usable(folder, now):
        return
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        make_certificates(fresh, now=now)
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _usable(folder: Path, now: datetime.datetime) -> bool:
    try:
        for holder in ("ca", *ROLES):
            pair = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            pair.load_cert_chain(folder / f"{holder}.pem", folder / f"{holder}-key.pem")
        expires_at = principal_in((folder / "admin.pem").read_bytes()).expires_at  # all expire together
    except (OSError, errors.Unauthenticated):  # also of a damaged file
        return False
    return expires_at - now.timestamp() > _LEFT.total_seconds()


__all__ = ["ensure_certificates"]
