"""Reminder, once a day in the log of a role, that its certificate will expire."""

import datetime
import math
from typing import TYPE_CHECKING

from shoal._system.logs import Log

if TYPE_CHECKING:
    from shoal._security.tls import TlsFiles

DAY_S = 86400.0
# Reminders begin so long before a certificate ends, but not before the last third of its time: a program such as
# cert-manager replaces certificates that are valid for a few days only shortly before their end.
LONGEST_S = 30 * DAY_S
_log = Log(__name__)


class ExpiryReminder:
    """Warns once a day while the certificate of a role is about to expire, or has expired. For one thread.

    Args:
        tls: TLS settings of the role. None means no TLS.
    """

    def __init__(self, tls: "TlsFiles | None") -> None:
        self._tls = tls
        self._checked_at = -math.inf

    def check(self, now: float) -> None:
        """Warns if the certificate expires soon. Does nothing for a day after that; call it as often as you like.

        Args:
            now: Unix time in seconds.
        """
        if self._tls is None or abs(now - self._checked_at) < DAY_S:  # the clock may be set in either direction
            return
        self._checked_at = now
        validity = self._tls.current().validity
        if validity is None:
            return
        left_s = validity.ends_at - now
        if left_s > min(LONGEST_S, (validity.ends_at - validity.begins_at) / 3):
            return
        _log.warning(
            "a certificate expires soon" if left_s > 0 else "a certificate has expired",
            file=str(validity.file),
            expires=f"{datetime.datetime.fromtimestamp(validity.ends_at, datetime.UTC):%Y-%m-%d %H:%M} UTC",
            days=round(left_s / DAY_S, 1),
            fix="replace the files of the certificate and the key, or of the CA; no restart is needed",
        )


__all__ = ["ExpiryReminder"]
