"""Transports of a running cluster: the requested one or the next best is used, and each trains the same bits."""

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal import _rpc, optim
from shoal._security import authorization
from shoal._transport.segment import FOLDER_VARIABLE
from shoal.status import Role
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub
from support.clusters.presented import as_admin
from support.transport_observer import ports

pytestmark = pytest.mark.cluster

# Large enough for memory to be shared with each of three servers.
LARGE = {"w": np.zeros(300_000, np.float32)}
SESSION = """
import sys, numpy as np, shoal
with shoal.Client(sys.argv[1]) as client:
    variables = {"w": np.zeros(300_000, np.float32)}
    with client.session(sys.argv[2], variables=variables, optimizer=shoal.optim.SGD(1.0)) as session:
        session.push({"w": np.ones_like(session.pull()["w"])})
        print("pulled", *np.unique(session.pull()["w"]))
"""


def offer(address: str, ticket: str = "") -> pb.AttachReply:
    """Returns a server's offer of lanes."""
    with _rpc.channel(address) as channel:
        stub = ParameterServerStub(channel)
        return stub.Attach(pb.AttachRequest(), timeout=5, metadata=authorization(ticket))


def train(client: shoal.Client, job: str, steps: int = 3) -> list[int]:
    """Trains in a session of this process. Returns the ports that the session was connected to."""
    with client.session(job, variables=LARGE, optimizer=optim.SGD(1.0)) as session:
        for step in range(steps):
            values = session.pull()["w"]
            np.testing.assert_array_equal(values, -step)
            session.push({"w": np.ones_like(values)})
        return ports()


def test_each_transport_trains_the_same_bits(shared_cluster: shoal.LocalCluster, client: shoal.Client) -> None:
    servers = [member.address for member in client.status().alive(Role.SERVER)]
    jobs = {
        transport: client.submit(
            shoal.Job(
                "support.transport_observer:TransportObserver",
                settings={"transport": transport, "hidden": 4096},
                workers=2,
                optimizer=optim.Momentum(0.1),
                max_steps=4,
                seed=3,
            )
        )
        for transport in ("grpc", "tcp", "auto")
    }
    with closing(_rpc.CoordinatorClient(client.address, credentials=as_admin(client.address))) as coordinator:
        ticket = _rpc.TicketSource.of(coordinator, jobs["grpc"].name)()
    lanes = {_rpc.parse_address(offer(address, ticket).address)[1] for address in servers}
    seen, values = {}, {}
    for transport, job in jobs.items():
        job.wait(timeout_s=60)
        said = [json.loads(line.partition(": ")[2]) for line in job.logs()]
        assert len(said) == 8
        seen[transport] = {(line["segments"], len(lanes.intersection(line["ports"]))) for line in said[-2:]}
        values[transport] = client.pull(job)
    # Connected to the lanes of three servers; two segments shared with each, for pulls and for pushes.
    assert seen == {"grpc": {(0, 0)}, "tcp": {(0, 3)}, "auto": {(6, 3)}}
    for name, expected in values["grpc"].items():
        np.testing.assert_array_equal(values["tcp"][name], expected)
        np.testing.assert_array_equal(values["auto"][name], expected)


def test_session_falls_back_to_tcp_when_dev_shm_is_full(shared_cluster: shoal.LocalCluster) -> None:
    """The session runs in a mount namespace of its own, with 1 MiB of /dev/shm."""
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    command = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
    if subprocess.run([*alone, command, "sh", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    session = [sys.executable, "-c", SESSION, shared_cluster.address, "cramped"]
    environment = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    done = subprocess.run(
        [*alone, command, "sh", *session], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "pulled -1.0" in done.stdout
    assert "its bytes go over TCP" in done.stderr
    assert "too little space in /dev/shm" in done.stderr
    assert "gRPC" not in done.stderr


def test_lanes_listen_on_the_given_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = {"server": ["--lane-port", str(port), "--insecure"], "coordinator": ["--insecure"]}
    with shoal.LocalCluster(servers=1, workers=0, flags=flags) as cluster, cluster.client() as client:
        assert offer(cluster.process("server").address).address == f"127.0.0.1:{port}"
        assert port in train(client, "first")

        another = [sys.executable, "-m", "shoal", "server", "--coordinator", cluster.address, *flags["server"]]
        done = subprocess.run(another, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 3
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
        assert "choose another port" in done.stderr
        assert "Traceback" not in done.stderr

        assert [member.member for member in client.status().members if member.role is Role.SERVER] == ["server-0"]
        assert port in train(client, "second")


def test_server_without_lanes_trains_and_unknown_transport_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_TRANSPORT", raising=False)
    wrong = {"SHOAL_TRANSPORT": "udp"}
    complaint = "SHOAL_TRANSPORT is 'udp'; set it to auto, tcp or grpc"
    with (
        shoal.LocalCluster(1, 1, env={"SHOAL_LANES": "0", "SHOAL_INSECURE": "1"}) as cluster,
        cluster.client() as client,
    ):
        address = cluster.process("server").address
        assert offer(address) == pb.AttachReply()
        server = _rpc.parse_address(address)[1]
        assert set(train(client, "fine")) >= {server}

        pull = [sys.executable, "-m", "shoal", "pull", "fine", str(tmp_path / "fine.npz"), "-c", cluster.address]
        done = subprocess.run(pull, env={**os.environ, **wrong}, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert complaint in " ".join(done.stderr.split())

        monkeypatch.setenv("SHOAL_TRANSPORT", "udp")
        with pytest.raises(shoal.errors.BadRequest, match=complaint):
            train(client, "wrong")
        assert [job.name for job in client.jobs()] == ["fine"], "no job was started"


@pytest.mark.parametrize("role", ["coordinator", "server", "worker"])
def test_a_role_refuses_an_unknown_transport_at_its_start(role: str) -> None:
    command = [sys.executable, "-m", "shoal", role, "--listen", "127.0.0.1:0"]
    command += ["--store", "memory"] if role == "coordinator" else ["--coordinator", "127.0.0.1:1"]
    environment = {**os.environ, "SHOAL_TRANSPORT": "udp"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "SHOAL_TRANSPORT is 'udp'; set it to auto, tcp or grpc, or not at all" in done.stderr
