"""What keeps the page to those it is for, without a login: which requests are refused, and what browsers are told.

Whoever reaches the port may watch, and act unless the page is for reading alone. What is kept out are the pages of
other sites in the browser of somebody who does: by a name that leads here (DNS rebinding), by a form or a script that
has the browser send what it would send for this page (cross-site requests), by a frame.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal import errors
from shoal_coordinator.page.responses import failure

# No request of another site's page has it: browsers ask first whether they may send it, and are not told that they may.
ACTION_HEADER = "x-shoal-page"
_READING = {"GET", "HEAD"}
# Nothing but our own files runs or is shown, and no text becomes HTML or a script.
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
class Rules:
    """Who may ask for what.

    Attributes:
        hosts: names that the page is asked for by, in lower case, beside those of loopback.
        numeric: any address in numbers will do: such a name leads nowhere else.
        read_only: nothing can be changed.
    """

    hosts: frozenset[str] = frozenset()
    numeric: bool = False
    read_only: bool = False

    def check(self, method: str, path: str, headers: Mapping[str, str] | _Fields) -> None:
        """Looks at a request.

        Raises:
            Forbidden: it is not for this page, comes from another one, or would change what may only be read.
        """
        host = headers.get("host", "")
        if not self.knows(_name(host)):
            raise errors.Forbidden(
                f"this page is not served as {host!r:.200}; ask for it by an address of this machine, or start the "
                "coordinator with --page-host for that name",
                host=host[:200],
            )
        if method in _READING:
            if path.startswith("/api/") and headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}:
                raise errors.Forbidden("another site's page asks for this; it is for this page's own scripts")
            return
        if self.read_only:
            raise errors.Forbidden("this page is for reading alone (--page-read-only); use the command line")
        _check_action(host, headers)

    def knows(self, host: str) -> bool:
        """Whether the page is served by that name, which has no port."""
        if host in self.hosts or host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return self.numeric or address.is_loopback


class Guard:
    """Refuses requests by the rules, and gives every answer the headers that tell browsers what a page may do.

    Args:
        app: what answers.
        rules: who may ask.
    """

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                # What is shown is never old; the page's own files are asked for again, and mostly have not changed.
                headers.setdefault("cache-control", "no-cache" if scope["path"].startswith("/static/") else "no-store")
            await send(message)

        if scope["type"] != "http":
            return
        app = self._app
        try:
            self._rules.check(scope["method"], scope["path"], Headers(scope=scope))
        except errors.ShoalError as error:
            app = failure(error)
        await app(scope, receive, with_headers)


def _check_action(host: str, headers: Mapping[str, str] | _Fields) -> None:
    """Looks whether this page's own script sent what changes something."""
    site, origin = headers.get("sec-fetch-site", ""), headers.get("origin", "")
    ours = site == "same-origin" if site else urlsplit(origin).netloc.lower() == host.lower()
    if not ours or (origin and urlsplit(origin).netloc.lower() != host.lower()):
        raise errors.Forbidden(
            "what changes something has to come from this page: Sec-Fetch-Site or Origin say that it does not",
            origin=origin[:200],
        )
    if not headers.get(ACTION_HEADER, ""):
        raise errors.Forbidden(f"what changes something needs the header {ACTION_HEADER}: 1")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise errors.BadRequest("the content type is not application/json")


def _name(host: str) -> str:
    """The name of a Host header, without its port."""
    bracket = host.rfind("]")
    colon = host.rfind(":")
    return (host[:colon] if colon > bracket else host).lower().removesuffix(".")


__all__ = ["ACTION_HEADER", "Guard", "Rules"]
