"""The rule that a role listens beyond loopback only with TLS or --insecure."""

from types import SimpleNamespace

import pytest

from shoal import errors
from shoal._role.exposure import check_exposure
from shoal._role.lifecycle import find_credentials

LOOPBACK = ("127.0.0.1:0", "127.8.9.1:7070", "localhost:7070", "a.localhost:1", "[::1]:7070", "")
BEYOND = (
    "0.0.0.0:7070",
    "[::]:7070",
    "10.0.0.5:1",
    "node-1.example:7070",
    "localhost.example:1",
    "[fe80::1]:1",
    ":7070",
)


@pytest.mark.parametrize("listen", LOOPBACK)
def test_a_role_on_loopback_needs_nothing(listen: str) -> None:
    check_exposure("server", (listen, "127.0.0.1:0"), tls=False, insecure=False)


@pytest.mark.parametrize("listen", BEYOND)
def test_a_role_beyond_loopback_needs_tls_or_a_word(listen: str) -> None:
    with pytest.raises(errors.BadRequest, match=r"without TLS.*shoal certs init.*--insecure"):
        check_exposure("server", ("127.0.0.1:0", listen), tls=False, insecure=False)
    check_exposure("server", (listen,), tls=True, insecure=False)
    check_exposure("server", (listen,), tls=False, insecure=True)


def test_insecure_and_tls_contradict_each_other() -> None:
    with pytest.raises(errors.BadRequest, match="contradict"):
        check_exposure("coordinator", ("127.0.0.1:0",), tls=True, insecure=True)


@pytest.mark.parametrize("insecure", [False, True])
def test_only_an_insecure_role_calls_coordinators_of_others(insecure: bool) -> None:
    options = SimpleNamespace(tls_ca="", tls_cert="", tls_key="", tls_client_certs="required", insecure=insecure)
    found = find_credentials("worker", options, ["127.0.0.1:0"])
    assert (found.closed, found.insecure) == (not insecure, insecure)
