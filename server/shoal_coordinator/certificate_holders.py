"""The holders whose certificates this coordinator has seen in calls, for the list of revoked certificates."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from shoal._security import ID_PREFIX, Principal
from shoal._security.tokens import TokenVerifier

# Certificates that are remembered, those that first called last.
MOST_HOLDERS = 1_024


class HolderVerifier(TokenVerifier):
    """Checks tokens and certificates, and remembers whom the certificates identify. Thread-safe.

    A certificate is revoked by its serial number alone, and the coordinator does not store other certificates. So it
    knows the holder only if a caller has presented the certificate since the coordinator's start.
    """

    def __init__(self, public_key: bytes, clock: Callable[[], float] = time.time) -> None:
        super().__init__(public_key, clock)
        self._noting = threading.Lock()  # guards changes of _holders
        self._holders: OrderedDict[str, Principal] = OrderedDict()  # by the id of the certificate

    def holder(self, certificate: str) -> Principal | None:
        """Returns whom the certificate with this id identifies; None if no caller has presented it."""
        return self._holders.get(certificate)

    def check(self, principal: Principal) -> None:
        """Checks a caller as `TokenVerifier` does, and remembers the holder of a certificate."""
        if principal.token.startswith(ID_PREFIX) and not principal.job and principal.token not in self._holders:
            with self._noting:
                self._holders[principal.token] = principal
                if len(self._holders) > MOST_HOLDERS:
                    self._holders.popitem(last=False)
        super().check(principal)


__all__ = ["MOST_HOLDERS", "HolderVerifier"]
