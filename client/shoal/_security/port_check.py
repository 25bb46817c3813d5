"""Check of who would receive a token, before a process without TLS sends it.

Other hosts receive no tokens without TLS, because the network between the hosts could read and answer the calls. On
loopback, the user who listens on the port matters. While a coordinator or a server is down, a process of another user
can listen on its port, and would receive the tokens of its callers. So only the user of the caller, root and the user
of the coordinator that made the token may listen. A token names the last of these as a *user mark*, because a cluster
may belong to another user than its callers.
"""

import base64
import hashlib
import json
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NoReturn

from shoal import errors
from shoal._system import host_id
from shoal._system.listeners import listening_users, loopback_addresses

# Seconds between two checks by the calls to one server. A call can be so short that a check would take a part of it.
CHECK_EVERY_S = 0.1
INSECURE_VARIABLE = "SHOAL_INSECURE"
# The claim of a token that has the user mark.
USER_MARK = "user"
_MACHINE_ID = Path("/etc/machine-id")


def user_mark(user: int) -> str:
    """Returns a text that stands for a user of this machine, and that differs on other machines."""
    return hashlib.sha256(f"shoal {_machine()} {user}".encode()).hexdigest()[:32]


class PortCheck:
    """Checks, before a token is sent without TLS, that nobody else would receive it. Thread-safe.

    A port of loopback on which nobody listens needs no check.

    Args:
        address: host:port to which tokens are sent.
        every_s: seconds for which a check is valid.
        always: whether to check also if there is no token to send.
        insecure: whether other hosts are allowed.
        listeners: returns the ids of the users who listen on a port of loopback. Its arguments are the host and the
            port.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        address: str,
        *,
        every_s: float = 0.0,
        always: bool = False,
        insecure: bool = False,
        listeners: Callable[[str, int], frozenset[int]] = listening_users,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._host, self._port = address, host, int(port) if port.isdecimal() else 0
        self._local = bool(loopback_addresses(host))
        self._needed = bool(self._port) if self._local else not insecure
        self._every_s, self._always, self._listeners, self._clock = every_s, always, listeners, clock
        self._valid_until = 0.0

    def __call__(self, token: str) -> None:
        """Checks who would receive a token.

        Args:
            token: the token; empty if nothing secret is sent.

        Raises:
            Unauthenticated: the address is on another host, or another user listens there.
        """
        if not self._needed or (self._every_s and self._clock() < self._valid_until):
            return
        if not token and not self._always:
            return
        if not self._local:
            self._refuse_host("The token" if token else "The call")
        own = os.geteuid()
        others = self._listeners(self._host, self._port) - {own, 0}
        if others and (mark := _mark_in(token)):
            others = frozenset(user for user in others if user_mark(user) != mark)
        if others:
            nor = ", nor the user of the coordinator that made the token" if token else ""
            raise errors.Unauthenticated(
                f"user {min(others)} listens on {self._address}. That is neither this process's user, {own}, "
                f"nor root{nor}. {'The token' if token else 'The call'} was not sent. If another user has taken "
                "the port, start the coordinator or the server again on another port. If a role is to run as user "
                f"{min(others)}, use TLS",
                address=self._address,
            )
        self._valid_until = self._clock() + self._every_s

    def _refuse_host(self, what: str) -> NoReturn:
        raise errors.Unauthenticated(
            f"{self._address} is on another host, and this process has no TLS files, so others in the network could "
            f"read and answer its calls. {what} was not sent. Set SHOAL_TLS_CA, SHOAL_TLS_CERT and SHOAL_TLS_KEY, or "
            "give --tls-ca, --tls-cert and --tls-key. If the cluster was started with --insecure, it needs no tokens: "
            f"unset SHOAL_TOKEN_FILE, or set {INSECURE_VARIABLE}=1 for this process, too",
            address=self._address,
        )


def _mark_in(token: str) -> str:
    """Returns the user mark of a token, or an empty string. The caller trusts it, so the signature is not checked."""
    # Not with PyJWT: it also imports `cryptography`, which takes 0.14 s, and a client without TLS needs neither.
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return str(claims.get(USER_MARK, ""))
    except (IndexError, ValueError, AttributeError, RecursionError):  # it is no token of a coordinator
        return ""


@cache
def _machine() -> str:
    try:
        return _MACHINE_ID.read_text("ascii", errors="replace").strip() or host_id()
    except OSError:  # as in most containers
        return host_id()


__all__ = ["CHECK_EVERY_S", "INSECURE_VARIABLE", "USER_MARK", "PortCheck", "user_mark"]
