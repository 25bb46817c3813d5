"""Logins of the page: short-lived single-use codes of login links, and the sessions of browsers.

Both are random texts. This module keeps only their hashes, and only in memory. So a session that has logged out never
becomes valid again, and a restart of the coordinator ends all sessions.
"""

import hashlib
import secrets
import threading
from collections.abc import Callable

from shoal import errors
from shoal._limits import catalogue
from shoal._security import PAGE_ROLES, Principal
from shoal_coordinator.access import Access

# Seconds for which a login link can be used, and for which a browser stays logged in.
CODE_S, SESSION_S = 600.0, 12 * 3_600.0
# The page divides the text of a session into two halves, each of which nobody can guess.
_CODE_BYTES, _SESSION_BYTES = 24, 48
_LOG_IN = "log in first: open the link that `shoal page` prints, or give a token"


# Whom a code or a session stands for, and when it expires, by its hash.
_ByHash = dict[bytes, tuple[Principal, float]]


class Logins:
    """The codes and sessions of one coordinator's page. Thread-safe.

    Args:
        access: the tokens of the cluster. A code or a session ends with the token that it was made for.
        clock: returns Unix time in seconds.
    """

    def __init__(self, access: Access, clock: Callable[[], float]) -> None:
        self._access, self._clock = access, clock
        self._lock = threading.Lock()  # guards the next two
        # By hash, oldest first, with the time of expiry.
        self._codes: _ByHash = {}
        self._sessions: _ByHash = {}

    def new_code(self, principal: Principal) -> str:
        """Returns a code that logs a browser in as this caller, once, within `CODE_S` seconds.

        If the caller's token has too many of them, the oldest one ends.
        """
        code, now = secrets.token_urlsafe(_CODE_BYTES), self._clock()
        with self._lock:
            self._codes = _with_room(self._codes, principal, catalogue.PAGE_LOGIN_CODES.default, now)
            self._codes[_hash(code)] = principal, now + CODE_S
        return code

    def log_in(
        self, *, code: str = "", token: str = "", on_identified: Callable[[Principal], object] = lambda _: None
    ) -> tuple[str, Principal]:
        """Begins a session. If the token has too many of them, its oldest one ends.

        Args:
            code: the code of a login link.
            token: the caller's own token, in place of a code.
            on_identified: called with whom a genuine code or token identifies, also if the login is then refused.

        Returns:
            The text that proves the session, and who has logged in.

        Raises:
            Unauthenticated: the code or the token is wrong, has expired or was revoked.
            Forbidden: the page does not accept tokens of this role, or the token is a ticket.
        """
        if token:
            principal = self._access.verifier.identify(token, on_identified=on_identified)
        else:
            principal = self._of_code(code)
            on_identified(principal)
        _check_role(principal)
        self._access.check_valid(principal)
        session, now = secrets.token_urlsafe(_SESSION_BYTES), self._clock()
        with self._lock:
            self._sessions = _with_room(self._sessions, principal, catalogue.PAGE_LOGINS.default, now)
            self._sessions[_hash(session)] = principal, now + SESSION_S
        return session, principal

    def log_out(self, session: str) -> Principal | None:
        """Ends a session. Returns whose it was, or None if the text proves no session."""
        with self._lock:
            return self._sessions.pop(_hash(session), (None, 0.0))[0]

    def principal(
        self, *, session: str = "", token: str = "", on_identified: Callable[[Principal], object] = lambda _: None
    ) -> Principal:
        """Returns who makes a request.

        Args:
            session: the text that proves a session.
            token: a token, in place of a session.
            on_identified: called with whom a genuine session or token identifies, also if the request is then refused.

        Raises:
            Unauthenticated: the session does not exist or has ended, or the token is not valid.
            Forbidden: the page does not accept tokens of this role, or the token is a ticket.
        """
        if token:
            principal = self._access.verifier.identify(token, on_identified=on_identified)
            _check_role(principal)
            return principal
        with self._lock:
            found, expires_at = self._sessions.get(_hash(session), (None, 0.0))
        if found is None:
            raise errors.Unauthenticated(_LOG_IN)
        on_identified(found)
        if self._clock() >= expires_at:
            raise errors.Unauthenticated(_LOG_IN)
        self._access.verifier.check(found)  # its errors say more
        self._access.check_valid(found)
        return found

    def _of_code(self, code: str) -> Principal:
        with self._lock:
            found, expires_at = self._codes.pop(_hash(code), (None, 0.0))
        if found is None or self._clock() >= expires_at:
            raise errors.Unauthenticated("the login link has expired or was used; `shoal page` prints another one")
        return found


def _check_role(principal: Principal) -> None:
    if principal.job or principal.role not in PAGE_ROLES:
        raise errors.Forbidden(
            f"the page does not accept the token of {principal}; use a token of the role "
            f"{', '.join(role.value for role in PAGE_ROLES[:-1])} or {PAGE_ROLES[-1].value}"
        )


def _with_room(entries: _ByHash, principal: Principal, most: int, now: float) -> _ByHash:
    """Returns the entries that have not expired, without the oldest one of a caller's token that has `most` of them.

    Each token has a limit of its own, so that nobody ends the codes and sessions of others.
    """
    kept = {key: it for key, it in entries.items() if it[1] > now}
    own = [key for key, (other, _) in kept.items() if other.token == principal.token]
    if len(own) >= most:
        del kept[own[0]]
    return kept


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()


__all__ = ["CODE_S", "SESSION_S", "Logins"]
