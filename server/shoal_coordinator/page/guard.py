"""Access rules of the page: the requests that it refuses, and its security headers.

The login (`login`) decides who may watch and act. The rules prevent other sites from acting through the browser
of a user who has logged in, or who needs no login. Another site could try this in three ways: with a name that resolves
to this address (DNS rebinding), with a form or a script that sends requests to this page (cross-site requests), or by
showing this page in a frame.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal import errors
from shoal._rpc import OnOutcome
from shoal_coordinator.page.login import (
    LOGIN_PATH,
    LOGOUT_PATH,
    PageLogin,
    needs_login,
    note_refusal,
    set_principal,
)
from shoal_coordinator.page.responses import failure

# Another site's page cannot send this header: browsers ask for permission first, and the server does not grant it.
ACTION_HEADER = "x-shoal-page"
_READING = {"GET", "HEAD"}
# What the audit log calls a request that the rules refuse, or that has no valid login.
_REQUEST = "page/request"
# Only the page's own files run or are shown, and no text becomes HTML or a script.
_POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class _Fields(Protocol):
    def get(self, key: str, default: str = "") -> str: ...


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The rules for requests.

    Attributes:
        hosts: Names of the page in lower case, beside those of loopback.
        numeric: Whether any numeric address is accepted as the host. Such a name cannot resolve to another host.
        read_only: Whether all actions are refused.
    """

    hosts: frozenset[str] = frozenset()
    numeric: bool = False
    read_only: bool = False

    def check(self, method: str, path: str, headers: Mapping[str, str] | _Fields) -> None:
        """Checks a request.

        Args:
            method: The HTTP method.
            path: The path of the request.
            headers: The headers, with names in lower case.

        Raises:
            Forbidden: The request names another host, comes from another site's page, or would act on a read-only page.
            BadRequest: An action has the wrong content type.
        """
        host = headers.get("host", "")
        if not self.knows(_name(host)):
            raise errors.Forbidden(
                f"this page does not answer to the host name {host!r:.200}; use an address of this "
                "machine, or start the coordinator with --page-host for that name",
                host=host[:200],
            )
        if method in _READING:
            if path.startswith("/api/") and headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}:
                raise errors.Forbidden("this request comes from another site; only scripts of this page may send it")
            return
        if self.read_only and path not in (LOGIN_PATH, LOGOUT_PATH):
            raise errors.Forbidden("this page is read-only (--page-read-only); use the command line")
        _check_action(host, headers)

    def knows(self, host: str) -> bool:
        """Returns whether the page is served under a host name without a port."""
        if host in self.hosts or host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return self.numeric or address.is_loopback


class Guard:
    """An ASGI middleware that checks requests by the rules and adds security headers to every response.

    Args:
        app: The application behind it.
        rules: The rules for requests.
        login: Identifies the caller of a request. None means that the cluster asks for no tokens.
        on_outcome: Called with each request that the rules refuse, or that has no valid login.
    """

    def __init__(
        self,
        app: ASGIApp,
        rules: RequestRules,
        login: PageLogin | None = None,
        on_outcome: OnOutcome = lambda _: None,
    ) -> None:
        self._app, self._rules, self._login, self._on_outcome = app, rules, login, on_outcome

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                # Browsers never cache data, and revalidate the page's own files.
                headers.setdefault("cache-control", "no-cache" if scope["path"].startswith("/static/") else "no-store")
            await send(message)

        if scope["type"] != "http":
            return
        app = self._app
        try:
            self._check(scope, Headers(scope=scope))
        except errors.ShoalError as error:
            app = failure(error)
        await app(scope, receive, with_headers)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Checks a request, and sets who makes it.

        Raises:
            Unauthenticated: Nobody has logged in, or the login has ended.
            Forbidden: The rules refuse the request, or the page does not accept this kind of token.
            BadRequest: An action has the wrong content type.
        """
        try:
            self._rules.check(scope["method"], scope["path"], headers)
            if self._login and needs_login(scope["path"]):
                set_principal(scope, self._login.principal(headers))
        except (errors.Unauthenticated, errors.Forbidden) as error:
            caller = self._login.caller_of(headers) if self._login else None
            note_refusal(self._on_outcome, scope, _REQUEST, caller, error)
            raise


def _check_action(host: str, headers: Mapping[str, str] | _Fields) -> None:
    """Checks that this page's own script has sent an action."""
    site, origin = headers.get("sec-fetch-site", ""), headers.get("origin", "")
    ours = site == "same-origin" if site else _authority(origin) == host.lower()
    if not (site or origin):
        raise errors.Forbidden(
            "an action must come from this page, but neither Sec-Fetch-Site nor Origin says where it comes from; in a "
            f"script, send the headers Sec-Fetch-Site: same-origin, {ACTION_HEADER}: 1 and Content-Type: "
            "application/json"
        )
    if not ours or (origin and _authority(origin) != host.lower()):
        raise errors.Forbidden(
            "an action must come from this page, but its header Sec-Fetch-Site or Origin names another site",
            origin=origin[:200],
        )
    if not headers.get(ACTION_HEADER, ""):
        raise errors.Forbidden(f"an action needs the header {ACTION_HEADER}: 1")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise errors.BadRequest("the content type is not application/json; send JSON")


def _authority(origin: str) -> str:
    """Returns the host and port in an Origin header, in lower case; empty if it is not a URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # half an IPv6 address
        return ""


def _name(host: str) -> str:
    """Returns the name in a Host header, without its port."""
    bracket = host.rfind("]")
    colon = host.rfind(":")
    return (host[:colon] if colon > bracket else host).lower().removesuffix(".")


__all__ = ["ACTION_HEADER", "Guard", "RequestRules"]
