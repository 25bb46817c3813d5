"""The audit log of a running coordinator: control calls, refused calls, and actions on the page. It holds no secret."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal import errors
from shoal._rpc import CoordinatorClient
from shoal._security import AccessRole, Credentials
from shoal.v1 import coordinator_pb2, job_pb2, token_pb2
from support.clusters.secure_rig import SecureRig, secure_rig
from support.waiting import wait_until

ACTION = {"sec-fetch-site": "same-origin", "x-shoal-page": "1"}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SecureRig]:
    with secure_rig(page_listen="127.0.0.1:0", audit_log=str(tmp_path / "audit.jsonl")) as running:
        yield running


def calling(rig: SecureRig, token: str) -> Any:
    return closing(CoordinatorClient(rig.coordinator.address, credentials=Credentials(token=lambda: token)))


def test_what_callers_did_is_in_the_log_and_no_secret(rig: SecureRig, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    admin, reader = rig.token(AccessRole.ADMIN, worker="root"), rig.token(AccessRole.READER, worker="ann")
    with calling(rig, admin) as client:
        made = client.call(
            client.tokens.CreateToken, token_pb2.CreateTokenRequest(name="bob", role="reader", valid_s=60)
        )
        client.call(client.tokens.RevokeToken, token_pb2.RevokeTokenRequest(token=made.token.id))
        link = client.call(client.tokens.GetLoginLink, token_pb2.GetLoginLinkRequest()).link
    with calling(rig, admin) as client, pytest.raises(errors.UnknownMember, match="'nobody' cannot leave"):
        client.call(client.members.Leave, coordinator_pb2.LeaveRequest(member="nobody", incarnation=1))
    refusals = (
        (reader, errors.Forbidden),
        (made.secret, errors.Unauthenticated),
        ("nonsense", errors.Unauthenticated),
    )
    for token, refused in refusals:
        with calling(rig, token) as client, pytest.raises(refused):
            client.call(client.jobs.Cancel, job_pb2.CancelRequest(job="job"), retry_for_s=0)
    page = rig.coordinator.page
    headers = ACTION | {"authorization": f"Bearer {admin}"}
    with httpx.Client(base_url=page, headers=ACTION, timeout=10) as browser:
        key = browser.post("/api/login", json={"code": link.rpartition("=")[2]}).json()["key"]
        for _ in range(2):  # the second one ends no session
            browser.post("/api/logout", json={}, headers={"x-shoal-key": key})
    httpx.post(f"{page}/api/jobs/job/cancel", json={}, headers=headers, timeout=10)
    httpx.post(f"{page}/api/jobs/job/cancel", json={}, headers=ACTION, timeout=10)
    as_reader = ACTION | {"authorization": f"Bearer {reader}"}
    httpx.post(f"{page}/api/jobs/job/cancel", json={}, headers=as_reader, timeout=10)
    revoked, process = ({"authorization": f"Bearer {token}"} for token in (made.secret, rig.token(AccessRole.WORKER)))
    httpx.get(f"{page}/api/jobs", headers=revoked, timeout=10)
    httpx.get(f"{page}/api/jobs", headers=process, timeout=10)
    httpx.post(f"{page}/api/login", json={"token": made.secret}, headers=ACTION, timeout=10)
    from_another_site = headers | {"sec-fetch-site": "cross-site"}
    httpx.post(f"{page}/api/jobs/job/cancel", json={}, headers=from_another_site, timeout=10)
    httpx.get(f"{page}/", headers={"host": "evil.example"}, timeout=10)

    def seen() -> set[tuple[str, str, str]]:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        return {(each["call"], each["outcome"], each.get("name", "")) for each in records}

    wanted = {
        ("Coordinator/Register", "OK", "local"),
        ("Jobs/Submit", "OK", "local"),
        ("Tokens/CreateToken", "OK", "root"),
        ("Tokens/RevokeToken", "OK", "root"),
        ("Tokens/GetLoginLink", "OK", "root"),
        ("Coordinator/Leave", "NOT_FOUND", "root"),
        ("Jobs/Cancel", "PERMISSION_DENIED", "ann"),
        ("Jobs/Cancel", "UNAUTHENTICATED", ""),
        ("Jobs/Cancel", "UNAUTHENTICATED", "bob"),
        ("page/login", "OK", "root"),
        ("page/logout", "OK", "root"),
        ("Jobs/Cancel", "OK", "root"),
        ("Jobs/Cancel", "PERMISSION_DENIED", "ann"),
        ("page/request", "UNAUTHENTICATED", ""),
        ("page/request", "UNAUTHENTICATED", "bob"),
        ("page/request", "PERMISSION_DENIED", "somebody"),
        ("page/login", "UNAUTHENTICATED", "bob"),
        ("page/request", "PERMISSION_DENIED", "root"),
        ("page/request", "PERMISSION_DENIED", ""),
    }
    wait_until(lambda: wanted <= seen(), what="the records")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert {each["host"] for each in records} == {"127.0.0.1"}, "one form for gRPC and for the page"
    assert sum(each["call"] == "page/logout" for each in records) == 1
    text = file.read_text()
    for secret in (admin, reader, made.secret, link.rpartition("=")[2]):
        assert secret not in text
        assert secret.rpartition(".")[2] not in text
