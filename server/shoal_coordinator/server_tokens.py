"""The tokens that the coordinator presents to servers: a token for each server, which no other server accepts."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable

from shoal._security import RENEWED_AFTER, AccessRole, Principal
from shoal._security.tokens import TokenSigner, server_audience

# Seconds for which a token is valid.
_VALID_S = 600.0
# Servers whose tokens are remembered, at most. A token is quick to make.
_REMEMBERED = 1_024


class ServerTokens:
    """The coordinator's tokens for the servers of one cluster. Thread-safe.

    Args:
        signer: makes tokens.
        clock: returns Unix time in seconds.
    """

    def __init__(self, signer: TokenSigner, clock: Callable[[], float]) -> None:
        self._signer, self._clock = signer, clock
        self._lock = threading.Lock()  # guards the next field; no other lock is taken under it
        # By member id, with the time at which it was made. The least recently used first.
        self._tokens: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def token_for(self, server: str) -> str:
        """Returns the token for calls to a server.

        Args:
            server: the member id of the server.
        """
        now = self._clock()
        with self._lock:
            token, made_at = self._tokens.pop(server, ("", math.inf))
            if not made_at <= now < made_at + RENEWED_AFTER * _VALID_S:  # it is old, or the clock has gone back
                holder = Principal("coordinator", AccessRole.COORDINATOR)
                token = self._signer.sign(holder, valid_s=_VALID_S, audience=server_audience(server))
                made_at = now
            self._tokens[server] = token, made_at
            if len(self._tokens) > _REMEMBERED:
                self._tokens.popitem(last=False)
        return token


__all__ = ["ServerTokens"]
