"""The audit logs of a running coordinator and a running server: control calls, refused calls, and actions on the page.

They hold no secret.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from shoal import _rpc, errors
from shoal._limits import catalogue
from shoal._rpc import CoordinatorClient
from shoal._security import AccessRole, Credentials, Principal
from shoal._transport import PARAMETER_SERVER, GrpcCalls, Lane, ServerConnection, TokenSecurity, open_handshake
from shoal._wire import CallLayout, PushPayload
from shoal.v1 import coordinator_pb2, group_pb2, job_pb2, token_pb2
from shoal.v1 import header_pb2 as headers
from shoal.v1 import parameter_server_pb2 as pb
from support.clusters.secure_rig import SecureRig, secure_rig
from support.waiting import wait_until

ACTION = {"sec-fetch-site": "same-origin", "x-shoal-page": "1"}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SecureRig]:
    log, server_log = str(tmp_path / "audit.jsonl"), str(tmp_path)
    with secure_rig(page_listen="127.0.0.1:0", audit_log=log, server_audit_log=server_log) as running:
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


def test_members_of_groups_and_participants_are_in_the_log(rig: SecureRig, tmp_path: Path) -> None:
    user, worker = rig.token(AccessRole.SUBMITTER, worker="ann"), rig.token(AccessRole.WORKER, worker="eve")
    request = group_pb2.JoinGroupRequest(group="ranks", process_id="p", address="127.0.0.1:1", ranks=2, min_ranks=1)
    with calling(rig, user) as client:
        for _ in range(2):  # a process asks again until the group is complete
            client.call(client.groups.Join, request, retry_for_s=0)
    with calling(rig, worker) as client, pytest.raises(errors.Forbidden):
        client.call(client.groups.Join, request, retry_for_s=0)
    wait_until(lambda: len(found(tmp_path / "audit.jsonl", "Groups/Join")) > 1, what="the records")
    joined, refused = found(tmp_path / "audit.jsonl", "Groups/Join")
    assert (joined["outcome"], joined["name"], joined["about"]) == ("OK", "ann", {"group": "ranks"})
    assert (refused["outcome"], refused["name"]) == ("PERMISSION_DENIED", "eve")
    for call in ("Jobs/Describe", "Jobs/Join", "Tokens/GetTicket"):
        assert found(tmp_path / "audit.jsonl", call)[0]["about"]["job"] == "job"


def test_a_forged_secret_of_a_member_is_in_the_log(rig: SecureRig, tmp_path: Path) -> None:
    with calling(rig, rig.token(AccessRole.SERVER, worker="eve")) as client:
        client.member_secrets["server-0"] = "server-0.1.forged"
        request = coordinator_pb2.HeartbeatRequest(member="server-0", incarnation=1)
        with pytest.raises(errors.SecretRefused):
            client.call(client.members.Heartbeat, request, retry_for_s=0)
    wait_until(lambda: found(tmp_path / "audit.jsonl", "Coordinator/Heartbeat"), what="the record")
    [record] = found(tmp_path / "audit.jsonl", "Coordinator/Heartbeat")
    assert (record["outcome"], record["name"]) == ("PERMISSION_DENIED", "eve")
    assert "forged" not in (tmp_path / "audit.jsonl").read_text()


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_a_server_records_control_calls_and_refused_data_calls(
    rig: SecureRig, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TRANSPORT", transport)
    file = tmp_path / "server-0.audit.jsonl"
    with rig.client.session("other", variables={"w": np.zeros(3)}) as session:
        session.pull()
        session.push({"w": np.ones(3)})
        own = headers.Stamp(job="other", worker=session.worker, incarnation=rig.incarnation, generation=1)
    rig.client.drop("other")
    ticket = rig.token(AccessRole.TRAINER, job="job", worker="eve", incarnation=1)
    credentials = Credentials(token=lambda: ticket)
    header = pb.PushHeader(stamp=own, shards=[0], versions=[0], weight=1)
    no_packer: Any = None
    nothing = PushPayload(no_packer, CallLayout([]), [], copy=np.empty(0, np.uint8))
    connection = ServerConnection(rig.server.address, nothing.layout, transport, credentials)
    with closing(connection):
        for refused in (
            lambda: connection.pull(pb.PullRequest(stamp=own, shards=[0]), None),
            lambda: connection.push(header, nothing),
            lambda: connection.commit(pb.CommitRequest(stamp=own, shards=[0])),
        ):
            with pytest.raises(errors.Forbidden, match="the ticket is for"):
                refused()
    wanted = {
        *(("CreateShards", "OK", name) for name in ("job", "other")),
        *(("AdmitWorkers", "OK", name) for name in ("job", "other")),
        ("DropShards", "OK", "other"),
        *((call, "PERMISSION_DENIED", "eve") for call in ("Pull", "Push", "Commit")),
    }

    def seen() -> set[tuple[str, str, str]]:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        return {
            (each["call"].partition("/")[2], each["outcome"], each.get("about", {}).get("job") or each["name"])
            for each in records
            if each["outcome"] == "OK" or each["name"] == "eve"
        }

    def normal(each: tuple[str, str, str]) -> bool:
        return each[:2] in {("Pull", "OK"), ("Push", "OK"), ("Attach", "OK"), ("Commit", "OK")}

    wait_until(lambda: wanted <= seen(), what="the records")
    assert not any(map(normal, seen()))
    assert ticket.rpartition(".")[2] not in file.read_text()


def test_a_refused_hello_of_a_lane_is_recorded_and_a_flood_is_not(rig: SecureRig, tmp_path: Path) -> None:
    file = tmp_path / "server-0.audit.jsonl"
    late = rig.signer.sign(Principal("eve", AccessRole.TRAINER, "t", "job", 1), valid_s=-3_600)
    good = rig.token(AccessRole.TRAINER, job="job")
    with closing(GrpcCalls(rig.server.address, Credentials(token=lambda: good))) as calls:
        host, port = _rpc.parse_address(calls.attach().address)
    for token in [late] + ["nonsense"] * (3 * catalogue.AUDIT_REFUSALS.default):
        lane = Lane.connect(host, port, PARAMETER_SERVER, timeout_s=5)
        with closing(lane), pytest.raises(errors.Unauthenticated):
            open_handshake(lane, TokenSecurity(token.encode()), pb.LaneHello(), within_s=5)
    wait_until(lambda: len(found(file, "ParameterServer/Attach")) > 1, what="the records")
    records = found(file, "ParameterServer/Attach")
    assert (records[0]["name"], records[0]["outcome"], records[0]["host"]) == ("eve", "UNAUTHENTICATED", "127.0.0.1")
    assert len(records) <= 1 + 2 * catalogue.AUDIT_REFUSALS.default, "20 a second, and this takes less than a second"


def found(file: Path, call: str) -> list[dict[str, Any]]:
    """Returns the records of a call."""
    return [each for each in map(json.loads, file.read_text().splitlines()) if each["call"] == call]
