"""The login of the page: what each caller sees and may do, how a session begins, and when it ends."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shoal._security import AccessRole, Credentials
from support.clusters.presented import login_link
from support.clusters.secure_rig import SecureRig, expired, of_another_cluster, secure_rig

ACTION = {"sec-fetch-site": "same-origin", "x-shoal-page": "1"}
READS = (
    "/api/session",
    "/api/cluster",
    "/api/jobs",
    "/api/jobs/job",
    "/api/jobs/job/data",
    "/api/jobs/job/timings",
    "/api/jobs/job/checkpoints",
)
STREAMS = ("/api/events", "/api/jobs/job/events")
ACTIONS = ("/api/jobs/job/checkpoint", "/api/jobs/job/cancel")


@pytest.fixture(scope="module")
def rig() -> Iterator[SecureRig]:
    with secure_rig(page_listen="127.0.0.1:0") as running:
        yield running


@pytest.fixture
def page(rig: SecureRig) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rig.coordinator.page, timeout=10) as page:
        yield page


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def link_for(rig: SecureRig, token: str) -> str:
    """Returns a login link that the holder of a token gets."""
    return login_link(Credentials(token=lambda: token), rig.coordinator.address)


def log_in(page: httpx.Client, **given: str) -> httpx.Response:
    """Logs in. The client then sends the key of the login with each request, as the page's script does."""
    answered = page.post("/api/login", json=given, headers=ACTION)
    page.headers["x-shoal-key"] = answered.json().get("key", "")
    return answered


def test_the_page_shows_nothing_of_the_cluster_without_a_login(rig: SecureRig, page: httpx.Client) -> None:
    wrong = {
        "none": {},
        "a token of another cluster": bearer(of_another_cluster(AccessRole.ADMIN)),
        "an expired token": bearer(expired(rig, AccessRole.ADMIN)),
        "a made-up cookie": {"cookie": f"shoal-{rig.coordinator.page.rpartition(':')[2]}=guess"},
        "a cookie that cannot be parsed": {"cookie": "\u0001;;=,"},
    }
    for what, headers in wrong.items():
        found = {path: page.get(path, headers=headers).status_code for path in (*READS, *STREAMS)}
        found |= {path: page.post(path, json={}, headers=headers | ACTION).status_code for path in ACTIONS}
        assert found == dict.fromkeys((*READS, *STREAMS, *ACTIONS), 401), what
    assert page.get("/jobs/job").status_code == page.get("/jobs/unknown").status_code == 200
    assert page.get("/jobs/unknown", headers=bearer(rig.token(AccessRole.READER))).status_code == 404
    assert page.get("/healthz").status_code == page.get("/").status_code == 200


@pytest.mark.parametrize("role", [AccessRole.READER, AccessRole.SUBMITTER, AccessRole.ADMIN])
def test_a_caller_reads_by_token_and_acts_by_role(rig: SecureRig, page: httpx.Client, role: AccessRole) -> None:
    token = bearer(rig.token(role))
    assert {page.get(path, headers=token).status_code for path in READS} == {200}
    session = page.get("/api/session", headers=token).json()
    reads_only = role is AccessRole.READER
    assert session == {"name": "somebody", "role": role.value, "acts": not reads_only, "insecure": False}
    answered = page.post("/api/jobs/unknown/cancel", json={}, headers=token | ACTION)
    assert answered.status_code == (403 if reads_only else 404)


@pytest.mark.parametrize(
    ("role", "status"),
    [(AccessRole.WORKER, 403), (AccessRole.SERVER, 403), (AccessRole.COORDINATOR, 401)],  # only servers accept the last
)
def test_the_page_does_not_accept_the_tokens_of_processes(
    rig: SecureRig, page: httpx.Client, role: AccessRole, status: int
) -> None:
    check_refused(page, rig.token(role), status)


@pytest.mark.parametrize("role", [AccessRole.TRAINER, AccessRole.OBSERVER, AccessRole.READER])
def test_the_page_does_not_accept_tickets(rig: SecureRig, page: httpx.Client, role: AccessRole) -> None:
    check_refused(page, rig.token(role, job="job", worker=rig.session.worker, incarnation=rig.incarnation))


def check_refused(page: httpx.Client, token: str, status: int = 403) -> None:
    """Checks that the page accepts a token neither for requests nor for a login."""
    found = {path: page.get(path, headers=bearer(token)).status_code for path in (*READS, *STREAMS)}
    assert found == dict.fromkeys((*READS, *STREAMS), status)
    answered = log_in(page, token=token)
    assert (answered.status_code, "set-cookie" in answered.headers) == (status, False)
    assert page.get("/jobs/unknown", headers=bearer(token)).status_code == 200  # does not say whether the job exists


def test_a_login_link_logs_a_browser_in_and_out(rig: SecureRig, page: httpx.Client) -> None:
    link = link_for(rig, rig.token(AccessRole.READER))
    base, _, code = link.partition("/#login=")
    assert base == rig.coordinator.page
    answered = log_in(page, code=code)
    assert answered.json()["role"] == "reader"
    cookie = answered.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert page.get("/api/jobs").status_code == 200
    assert page.post("/api/logout", json={}, headers=ACTION).status_code == 200
    page.cookies.clear()  # the client still sends the key
    assert page.get("/api/jobs", headers={"cookie": cookie.partition(";")[0]}).status_code == 401


@pytest.mark.parametrize("missing", ["cookie", "x-shoal-key"])
def test_neither_the_cookie_nor_the_key_alone_is_a_login(rig: SecureRig, page: httpx.Client, missing: str) -> None:
    """Browsers send the cookie to each port of the host, and each of them can set it."""
    log_in(page, token=rig.token(AccessRole.READER))
    page.cookies.clear() if missing == "cookie" else page.headers.pop(missing)
    found = {path: page.get(path).status_code for path in (*READS, *STREAMS)}
    assert found == dict.fromkeys((*READS, *STREAMS), 401)


def test_a_cookie_that_another_port_has_set_is_no_login_with_the_own_key(rig: SecureRig, page: httpx.Client) -> None:
    log_in(page, token=rig.token(AccessRole.READER))
    key = page.headers["x-shoal-key"]
    log_in(page, token=rig.token(AccessRole.ADMIN))
    assert page.get("/api/session").json()["role"] == "admin"
    assert page.get("/api/session", headers={"x-shoal-key": key}).status_code == 401


def test_a_token_logs_in_and_a_wrong_one_does_not(rig: SecureRig, page: httpx.Client) -> None:
    for wrong in ({"token": "guess"}, {"code": "guess"}, {"token": ""}, {"code": ""}):
        answered = log_in(page, **wrong)
        assert (answered.status_code, answered.json()["code"]) == (401, "UNAUTHENTICATED"), wrong
        assert "set-cookie" not in answered.headers
    assert log_in(page, token=rig.token(AccessRole.READER)).status_code == 200
    assert page.get("/api/jobs").status_code == 200


@pytest.mark.parametrize("body", [{}, {"token": 1}, {"token": "a", "code": "b"}, [], "text", {"token": ["a"]}])
def test_a_body_that_is_no_login_is_refused(page: httpx.Client, body: Any) -> None:
    assert page.post("/api/login", json=body, headers=ACTION).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-shoal-page": "1", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-origin"},
        {"x-shoal-page": "1"},
    ],
    ids=["nothing", "another site", "a form of the same site", "no origin"],
)
def test_another_site_can_neither_log_in_nor_out(rig: SecureRig, page: httpx.Client, headers: dict[str, str]) -> None:
    token = rig.token(AccessRole.READER)
    for path, body in (("/api/login", {"token": token}), ("/api/logout", {})):
        assert page.post(path, json=body, headers=headers).status_code == 403


def test_revoking_a_token_ends_its_sessions_and_streams(rig: SecureRig, page: httpx.Client) -> None:
    made, token = rig.access.create("ann", "reader", 600.0)
    assert log_in(page, token=token).status_code == 200
    code = link_for(rig, token).rpartition("=")[2]
    with page.stream("GET", "/api/events") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: cluster"
        rig.access.revoke(made.id)
        # It ends at its next reading, within a second; the client's timeout of ten seconds bounds the test.
        assert any("UNAUTHENTICATED" in line for line in lines)
    assert page.get("/api/jobs").status_code == 401
    assert log_in(page, code=code).status_code == 401
