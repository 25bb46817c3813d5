"""Login of the page: who makes a request, as a cookie with a key or as a token proves, and what that caller may do.

A session needs both its cookie and its key, which are the halves of one random text. Browsers send a cookie to all
ports of a host, so a process of another user at another port can get it and can set it. The page's script keeps the key
in the browser's storage, which is separate for each port, and sends it in a header. A script that is not the page's can
read neither: the cookie is `HttpOnly`.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from shoal import errors
from shoal._rpc import CallOutcome, OnOutcome
from shoal._security import Principal, check_permitted, token_in
from shoal_coordinator.logins import SESSION_S, Logins

# The header with the key of a session.
KEY_HEADER = "x-shoal-key"
# The paths under /api/ that need no login, because they begin and end a session.
LOGIN_PATH, LOGOUT_PATH = "/api/login", "/api/logout"
# The key of the request's scope that holds the caller.
_SCOPE_KEY = "shoal.principal"

RequestHandler = Callable[[Request], Awaitable[Response]]


class PageLogin:
    """The login of one page.

    Args:
        logins: the codes and sessions.
        port: the port of the page. The name of the cookie contains it, because browsers send cookies to all ports of a
            host.
        tls: whether the page is served over TLS.
    """

    def __init__(self, logins: Logins, port: int, *, tls: bool) -> None:
        self._logins, self._tls = logins, tls
        # Browsers accept a cookie with this prefix only over TLS, and only from the host itself.
        self._name = f"{'__Host-' if tls else ''}shoal-{port}"

    def principal(self, headers: Headers, on_identified: Callable[[Principal], object] = lambda _: None) -> Principal:
        """Returns who makes a request.

        Args:
            headers: the headers of the request.
            on_identified: as that of `Logins.principal`.

        Raises:
            Unauthenticated: nobody has logged in, or the login has ended.
        """
        token = token_in([("authorization", headers.get("authorization", ""))])
        return self._logins.principal(session=self._session(headers), token=token, on_identified=on_identified)

    def caller_of(self, headers: Headers) -> Principal | None:
        """Returns whom a genuine login or token of a refused request identifies, if it has one. Never raises."""
        who: list[Principal] = []
        with suppress(errors.ShoalError):
            self.principal(headers, who.append)
        return next(iter(who), None)

    def log_in(
        self, *, code: str, token: str, on_identified: Callable[[Principal], object] = lambda _: None
    ) -> tuple[Principal, str, dict[str, str]]:
        """Begins a session; raises as `Logins.log_in`.

        Args:
            code: the code of a login link.
            token: the caller's own token, in place of a code.
            on_identified: as that of `Logins.log_in`.

        Returns:
            Who has logged in, the key of the session, and the headers of the response.
        """
        session, principal = self._logins.log_in(code=code, token=token, on_identified=on_identified)
        half = len(session) // 2
        return principal, session[half:], self._cookie(session[:half], int(SESSION_S))

    def log_out(self, headers: Headers) -> tuple[Principal | None, dict[str, str]]:
        """Ends a session. Returns whose it was, or None if there is none, and the headers of the response."""
        return self._logins.log_out(self._session(headers)), self._cookie("", 0)

    def _session(self, headers: Headers) -> str:
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            return ""
        return cookies[self._name].value + headers.get(KEY_HEADER, "") if self._name in cookies else ""

    def _cookie(self, value: str, max_age_s: int) -> dict[str, str]:
        secure = "; Secure" if self._tls else ""
        return {"set-cookie": f"{self._name}={value}; Path=/; Max-Age={max_age_s}; HttpOnly; SameSite=Strict{secure}"}


def needs_login(path: str) -> bool:
    """Returns whether a path shows or changes the cluster. All other paths serve the page's own files, or the login."""
    return path.startswith("/api/") and path not in (LOGIN_PATH, LOGOUT_PATH)


def principal_of(request: Request) -> Principal | None:
    """Returns who makes a request; None if the cluster asks for no tokens."""
    found: Principal | None = request.scope.get(_SCOPE_KEY)
    return found


def set_principal(scope: Scope, principal: Principal) -> None:
    """Sets who makes a request."""
    scope[_SCOPE_KEY] = principal


def note_refusal(
    on_outcome: OnOutcome, scope: Scope, call: str, principal: Principal | None, error: errors.ShoalError
) -> None:
    """Reports that a request was refused because of who made it.

    Args:
        on_outcome: Receives the report.
        scope: The request.
        call: What the request asked for.
        principal: Who made it; None if that is not known.
        error: The reason.
    """
    host = (scope.get("client") or ("", 0))[0]
    on_outcome(CallOutcome(call, principal, host, error.status, reason=error.message))


def permitted(call: str, endpoint: RequestHandler, on_outcome: OnOutcome) -> RequestHandler:
    """Wraps an endpoint, so that only callers that may make a given RPC can use it.

    Args:
        call: SERVICE/METHOD of the RPC, as in the table of permissions.
        endpoint: the endpoint.
        on_outcome: called with each request that is refused.

    Returns:
        The wrapped endpoint. It raises Forbidden if the caller may not make the RPC.
    """

    async def checked(request: Request) -> Response:
        if principal := principal_of(request):
            try:
                check_permitted(principal, call)
            except errors.Forbidden as error:
                note_refusal(on_outcome, request.scope, call, principal, error)
                raise
        return await endpoint(request)

    return checked


__all__ = [
    "KEY_HEADER",
    "LOGIN_PATH",
    "LOGOUT_PATH",
    "PageLogin",
    "RequestHandler",
    "needs_login",
    "note_refusal",
    "permitted",
    "principal_of",
    "set_principal",
]
