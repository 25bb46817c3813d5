"""Features that every role has in any deployment: metrics, health, reflection, JSON logs, a clean end."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from numba.core.event import install_recorder
from prometheus_client import CollectorRegistry

import shoal
from shoal import _rpc, errors, optim
from shoal.v1 import coordinator_pb2, coordinator_pb2_grpc
from shoal_coordinator.process import CoordinatorConfig, start_coordinator
from shoal_server.optimizers import compilation
from shoal_server.process import Server, ServerConfig
from support.clusters.presented import as_admin
from support.clusters.supervised import until_ready
from support.scraping import scrape
from support.waiting import wait_until

pytestmark = pytest.mark.cluster

ROLES = [("coordinator", 0), ("server", 1), ("worker", 2)]
# What a label may be: none of these grows with users, jobs, variables or clients.
LABELS = {"role", "state", "outcome", "reason", "event", "code", "effect", "device", "le", "kind"} | {
    *("transport", "pool", "call", "called", "limit")
}
BASE_UNITS = ("_seconds", "_bytes", "_total", "_info", "_versions", "_ratio")


@pytest.fixture(scope="module")
def trained(shared_cluster: shoal.LocalCluster) -> Iterator[shoal.LocalCluster]:
    with shared_cluster.client() as client:
        job = shoal.Job("support.programs.broken:fine", workers=4, optimizer=optim.SGD(1.0), batch_size=8)
        client.submit(job).wait(timeout_s=60)
        yield shared_cluster


@pytest.mark.parametrize(("role", "index"), ROLES, ids=str)
class TestEveryRole:
    def test_serves_metrics(self, trained: shoal.LocalCluster, role: str, index: int) -> None:
        families = scrape(trained.process(role, index).metrics)
        ours = {name: family for name, family in families.items() if name.startswith("shoal_")}
        others = {name for name in families if not name.startswith(("shoal_", "process_", "python_"))}
        assert not others
        assert all(name.startswith(f"shoal_{role}_") for name in ours)
        assert len(ours) >= 5
        for family in ours.values():
            assert family.documentation
            labels = {label for sample in family.samples for label in sample.labels}
            assert labels <= LABELS, family.name
            if family.type == "histogram":
                assert family.name.endswith(BASE_UNITS)
            assert not re.search(r"(milli|micro|_ms|_mb|_kb|minutes|percent)", family.name)

    def test_says_over_http_that_it_serves(self, trained: shoal.LocalCluster, role: str, index: int) -> None:
        with urllib.request.urlopen(f"http://{trained.process(role, index).metrics}/healthz", timeout=5) as reply:
            assert (reply.status, reply.read()) == (200, b"ok\n")

    def test_is_healthy_and_lists_its_services(self, trained: shoal.LocalCluster, role: str, index: int) -> None:
        with _rpc.channel(trained.process(role, index).address) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            if role == "worker":  # it answers only probes
                return
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            presented = as_admin(trained.address).metadata()
            (answer,) = reflection.ServerReflectionInfo(iter([request]), timeout=5, metadata=presented)
        names = {service.name for service in answer.list_services_response.service}
        expected = {
            "coordinator": {"shoal.v1.Coordinator", "shoal.v1.Jobs", "shoal.v1.Tokens"},
            "server": {"shoal.v1.ParameterServer"},
        }
        assert names >= {"grpc.health.v1.Health", *expected[role]}


def test_the_servers_count_what_was_trained(trained: shoal.LocalCluster) -> None:
    server = scrape(trained.metrics["server-0"]) | scrape(trained.metrics["server-1"])
    assert server["shoal_server_pushes"].samples
    coordinator = scrape(trained.metrics["coordinator"])
    alive = {
        tuple(sorted(sample.labels.items())): sample.value
        for sample in coordinator["shoal_coordinator_members"].samples
    }
    assert alive[("role", "server"), ("state", "alive")] == 3
    assert alive[("role", "worker"), ("state", "alive")] == 4


def test_json_logs_have_one_object_a_line() -> None:
    command = [sys.executable, "-m", "shoal", "coordinator", "--store", "memory", "--listen", "127.0.0.1:0"]
    done = until_ready([*command, "--log-format", "json"])
    ready = json.loads(done.stdout)
    assert ready["role"] == "coordinator"
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines][:1] == ["ready"]
    assert lines[-1]["event"] == "stopped"
    for line in lines:
        assert line["role"] == "coordinator"
        assert line["level"] == "info"
        assert line["timestamp"].endswith("Z")


def test_role_is_chosen_by_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"cluster": {"chief": ["localhost:7070"], "ps": ["localhost:7071"]}, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    done = until_ready([sys.executable, "-m", "shoal", "run", "--store", "memory", "--listen", "127.0.0.1:0"])
    ready = json.loads(done.stdout)
    assert ready["role"] == "coordinator"
    assert ready["address"].startswith("localhost:")
    assert not ready["address"].endswith(":7070"), "the flag wins"


def test_a_wrong_flag_names_the_right_ones() -> None:
    command = [sys.executable, "-m", "shoal", "worker", "--log-format", "yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "json" in done.stderr


def test_variables_of_the_environment_are_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HEARTBEAT_TIMEOUT", "1")
    monkeypatch.setenv("SHOAL_HEARTBEAT_INTERVAL", "5")
    command = [sys.executable, "-m", "shoal", "coordinator", "--store", "memory", "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "less than half the timeout" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("role", ["server", "worker"])
def test_role_waiting_for_coordinator_ends_on_a_signal(role: str, number: signal.Signals) -> None:
    with socket.socket() as silent:  # it takes connections, and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "shoal", role, "--coordinator", address, "--retry-for", "600"]
        process = subprocess.Popen([*command, "--log-format", "json"], stderr=subprocess.PIPE, text=True)
        silent.accept()[0].close()
        process.send_signal(number)
        _, logs = process.communicate(timeout=20)
    assert process.returncode == 0, logs
    assert json.loads(logs.splitlines()[-1])["event"] == "stopped before it was ready"


@pytest.fixture
def cold_kernels() -> Iterator[dict[Any, Any]]:
    """Unloads the kernels, as in a new process, because other tests may have compiled them in this one."""
    for kernel, _ in compilation.registered:
        kernel._make_finalizer()()  # noqa: SLF001 - Numba has no public way to forget what it has compiled
        kernel._reset_overloads()  # noqa: SLF001
        kernel.disable_compile(False)
    yield dict(compilation.registered)
    compilation.warm_up()


def test_a_server_compiles_its_kernels_before_it_is_ready_and_none_at_a_push(cold_kernels: dict[Any, Any]) -> None:
    """The server runs in this process, where the test can watch the compiler."""
    assert not any(kernel.signatures for kernel in cold_kernels)
    coordinator = start_coordinator(CoordinatorConfig(listen="127.0.0.1:0"), CollectorRegistry())
    server = Server(ServerConfig("server-0", coordinator.address), CollectorRegistry())
    try:
        for kernel, signatures in cold_kernels.items():
            assert set(kernel.signatures) == set(signatures), kernel
        with shoal.Client(coordinator.address) as client, install_recorder("numba:compile") as compiled:
            with client.session("first", variables={"w": np.ones(100)}, optimizer=optim.Adam(0.1)) as session:
                session.push({"w": np.ones(100)})
            assert client.pull("first")["w"] == pytest.approx(0.9)
        assert not compiled.buffer
        for kernel, signatures in cold_kernels.items():
            assert set(kernel.signatures) == set(signatures), kernel
    finally:
        server.stop()
        coordinator.stop()


def test_server_does_not_start_with_an_unwritable_checkpoint_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, error in ((str(tmp_path / "file"), errors.StorageFailed), ("memory://x", errors.BadRequest)):
        with pytest.raises(error, match=folder):
            Server(ServerConfig("server-0", "127.0.0.1:1", checkpoints=folder), CollectorRegistry())


def incarnation_of(client: shoal.Client) -> int:
    """Returns the incarnation of server-0, or 0 while it is not a member."""
    members = client.status().members
    return next((member.incarnation for member in members if member.member == "server-0"), 0)


def test_expired_server_frees_its_shards_and_registers_again() -> None:
    """Both roles run in this process, so that the test can expire the server without a wait."""
    coordinator = start_coordinator(
        CoordinatorConfig(listen="127.0.0.1:0", heartbeat_interval_s=0.05), CollectorRegistry()
    )
    server = Server(ServerConfig("server-0", coordinator.address), CollectorRegistry())
    try:
        with shoal.Client(coordinator.address) as client:
            with client.session("held", variables={"w": shoal.Variable((100,))}) as session:
                session.pull()
            assert server.store.load() == (1, 400)
            first = incarnation_of(client)
            leave = coordinator_pb2.LeaveRequest(member="server-0", incarnation=first)
            with _rpc.channel(coordinator.address) as channel:
                coordinator_pb2_grpc.CoordinatorStub(channel).Leave(leave, timeout=5)
            wait_until(lambda: incarnation_of(client) > first, what="the new life")
            wait_until(lambda: server.store.load() == (0, 0), what="the shards' end")
            assert [member.alive for member in client.status().members if member.member == "server-0"] == [True]
    finally:
        server.stop()
        coordinator.stop()
