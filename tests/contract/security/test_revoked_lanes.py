"""Idle lanes of a revoked token: `shoal token revoke` ends them within 5 s, however seldom servers send heartbeats."""

import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal import _rpc, errors
from shoal._cli.app import app
from shoal._rpc import CoordinatorClient
from shoal._security import VARIABLES, Credentials
from shoal._security.certificates import make_certificates
from shoal._transport import (
    PARAMETER_SERVER,
    Frame,
    GrpcCalls,
    Lane,
    TlsSecurity,
    TokenSecurity,
    open_handshake,
)
from shoal.v1 import header_pb2 as headers
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import token_pb2
from support.certificates import tls_files
from support.clusters.secure_rig import SecureRig, secure_rig

# As in a large cluster: servers then send their heartbeats as seldom as they ever do, every 2 s.
SELDOM: dict[str, Any] = {"heartbeat_interval_s": 10.0, "heartbeat_timeout_s": 30.0}
# What the threat model promises.
WITHIN_S = 5.0


@contextmanager
def idle_lane(rig: SecureRig, folder: Path | None, token: str) -> Iterator[Lane]:
    """Opens a lane to the server, as a reader of the job "job" does, and pulls over it once."""
    tls = tls_files(folder, "reader") if folder else None
    presented = Credentials(tls, token=lambda: token)
    with closing(CoordinatorClient(rig.coordinator.address, credentials=presented)) as client:
        ticket = client.call(client.tokens.GetTicket, token_pb2.GetTicketRequest(job="job")).ticket
    with closing(GrpcCalls(rig.server.address, Credentials(tls, token=lambda: ticket))) as calls:
        host, port = _rpc.parse_address(calls.attach().address)
    with closing(Lane.connect(host, port, PARAMETER_SERVER, timeout_s=5)) as lane:
        security = TokenSecurity(ticket.encode())
        open_handshake(lane, TlsSecurity(security, tls) if tls else security, pb.LaneHello(), within_s=5)
        pull(lane)
        yield lane


def pull(lane: Lane) -> None:
    request = pb.PullRequest(stamp=headers.Stamp(job="job", generation=1), shards=[0])
    lane.send(Frame.PULL, [request.SerializeToString()])
    while lane.receive()[0] is not Frame.END:
        pass


def seconds_until_its_end(lane: Lane) -> float:
    begun = time.monotonic()
    with pytest.raises(errors.Unreachable):
        lane.begin(within_s=4 * WITHIN_S)
    return time.monotonic() - begun


def revoke(rig: SecureRig, folder: Path | None, token: str) -> None:
    """Runs `shoal token revoke`, as the coordinator's user does."""
    files = [str(folder / name) for name in ("ca.pem", "admin.pem", "admin-key.pem")] if folder else [""] * 3
    command = ["token", "revoke", token, "--coordinator", rig.coordinator.address]
    done = CliRunner().invoke(app, command, env=dict(zip(VARIABLES, files, strict=True)))
    assert done.exit_code == 0, done.output


def test_idle_lanes_of_a_revoked_token_end_within_5_s(tmp_path: Path) -> None:
    certificates = tmp_path / "certificates"
    make_certificates(certificates)
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(2))
        ends, others = [], []
        for folder in (None, certificates):  # at a time, because each takes almost two intervals
            rig = stack.enter_context(secure_rig(certificates=folder, **SELDOM))
            leaked, secret = rig.access.create("ann", "reader", 600)
            _, other = rig.access.create("bob", "reader", 600)
            lane = stack.enter_context(idle_lane(rig, folder, secret))
            others.append(stack.enter_context(idle_lane(rig, folder, other)))
            revoke(rig, folder, leaked.id)
            ends.append(threads.submit(seconds_until_its_end, lane))
        assert max(end.result() for end in ends) < WITHIN_S
        for lane in others:
            assert not select.select([lane], [], [], 0)[0], "the lane of another token stays open"
            pull(lane)
