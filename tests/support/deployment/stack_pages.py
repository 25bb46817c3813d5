"""HTTP pages of a Compose project: the coordinator's page after a login, and the metrics of a container."""

import json
import ssl
import urllib.request
from http.cookiejar import CookieJar

from support.deployment.compose_stack import Stack

# An action of the page needs these.
_ACTION = {"Sec-Fetch-Site": "same-origin", "X-Shoal-Page": "1", "Content-Type": "application/json"}


class PageVisitor:
    """What a browser does with a login link: it logs in, and then reads as the holder of the link.

    Args:
        link: the login link.
        context: trusts the CA of the cluster.
    """

    def __init__(self, link: str, context: ssl.SSLContext) -> None:
        page, _, code = link.partition("/#login=")
        cookies = urllib.request.HTTPCookieProcessor(CookieJar())
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), cookies)
        body = json.dumps({"code": code}).encode()
        answer = self._read(urllib.request.Request(f"{page}/api/login", body, {"Origin": page, **_ACTION}))
        self._key: str = json.loads(answer)["key"]
        self._page = page

    def get(self, path: str) -> str:
        return self._read(urllib.request.Request(f"{self._page}{path}", headers={"X-Shoal-Key": self._key}))

    def _read(self, request: urllib.request.Request) -> str:
        with self._opener.open(request, timeout=10) as reply:
            text: str = reply.read().decode()
            return text


def metrics_of(stack: Stack, container: str, context: ssl.SSLContext) -> str:
    """Returns the metrics of a container, whose address this host can reach."""
    context.check_hostname = False  # the certificate has the name of the service
    url = f"https://{stack.address(container)}:7090/metrics"
    with urllib.request.urlopen(url, timeout=10, context=context) as reply:
        text: str = reply.read().decode()
        return text
