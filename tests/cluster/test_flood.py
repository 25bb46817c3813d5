"""A flood of calls and of connections: probes are answered, memory is bounded, and all is normal when it ends.

In the long form, the flood has 1,000 connections with ten times as many calls a second as the coordinator can answer,
and the role has a core of its own. The short form checks the same without the times, because other tests use the cores.
"""

import os
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import shoal
from shoal import _rpc, errors
from shoal._transport.frames import PARAMETER_SERVER
from shoal._transport.handshake import received_error
from shoal._transport.lane import Lane
from shoal.v1 import parameter_server_pb2, parameter_server_pb2_grpc
from support.clusters.shard_servers import ShardServers
from support.faults.flood import flooding
from support.run_lengths import is_long, size
from support.waiting import wait_until

pytestmark = pytest.mark.cluster

METHOD = "/shoal.v1.Coordinator/GetStatus"
CONNECTIONS, SECONDS = size(100, 1_000), size(2.0, 20.0)
# Memory of the coordinator above what it has at rest. Calls in progress take some 10 KB each.
CAP_BYTES = 512 << 20
PROBE_S, NORMAL_S = 0.25, 5.0
TIMES_CAPACITY = 10
LANES = 4


@dataclass
class Role:
    """A coordinator in a process of its own, on the first core. Nobody needs a token."""

    pid: int
    address: str
    health: str

    @property
    def resident(self) -> int:
        """Bytes of its memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def cores() -> Iterator[tuple[int, int]]:
    """The core of the role and that of the flood. This process is on the second one, too."""
    had = os.sched_getaffinity(0)
    first, *others = sorted(had)
    second = others[0] if others else first
    try:
        os.sched_setaffinity(0, {first})  # processes inherit it
        yield first, second
    finally:
        os.sched_setaffinity(0, had)


@pytest.fixture
def role(cores: tuple[int, int]) -> Iterator[Role]:
    with shoal.LocalCluster(0, 0, flags={"coordinator": ["--insecure"]}, page_listen="") as cluster:
        process = cluster.process("coordinator")
        yield Role(process.pid, cluster.address, f"http://{process.metrics}/healthz")


def grpc_probe(role: Role) -> Generator[None, None, None]:
    """Asks gRPC's health service on one connection, once for each item."""
    with grpc.insecure_channel(role.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
            yield


def http_probe(role: Role) -> Generator[None, None, None]:
    """Asks for /healthz on a new connection, as Docker and Kubernetes do, once for each item."""
    while True:
        httpx.get(role.health, timeout=20).raise_for_status()
        yield


def probed(asking: Iterator[None], seconds: float) -> list[float]:
    """Probes a role for a while, and returns the seconds that each probe took, in order of size."""
    taken: list[float] = []
    pause, end = threading.Event(), time.monotonic() + seconds
    while time.monotonic() < end or len(taken) < 10:
        began = time.monotonic()
        next(asking)
        taken.append(time.monotonic() - began)
        pause.wait(0.01)
    return sorted(taken)


def p99(taken: list[float]) -> float:
    return taken[int(0.99 * (len(taken) - 1))]


def capacity(address: str, core: int) -> float:
    """Returns the calls a second that a role answers to a few connections."""
    with flooding(address, METHOD, connections=10, at_a_time=10, rate=1e5, seconds=2.0, core=core) as flood:
        pass
    return flood.ended / 2.0


def test_a_flood_of_calls_leaves_probes_answered_and_memory_bounded(role: Role, cores: tuple[int, int]) -> None:
    _, core = cores
    os.sched_setaffinity(0, {core})
    rate = TIMES_CAPACITY * (capacity(role.address, core) if is_long() else 2_000)
    at_rest, most = role.resident, 0
    stopped = threading.Event()

    def watch_memory() -> None:
        nonlocal most
        while not stopped.wait(0.05):
            most = max(most, role.resident)

    watching = threading.Thread(target=watch_memory)
    watching.start()
    try:
        with flooding(
            role.address, METHOD, connections=CONNECTIONS, at_a_time=100, rate=rate, seconds=SECONDS, core=core
        ) as flood:
            taken = probed(http_probe(role), SECONDS - 0.5)
        ended = time.monotonic()
    finally:
        stopped.set()
        watching.join()
    with closing(grpc_probe(role)) as asking:
        wait_until(lambda: p99(probed(asking, 0.2)) < PROBE_S, what="the end of the flood's effects")
    normal_s = time.monotonic() - ended
    print(
        f"{CONNECTIONS} connections, {rate:.0f} calls/s offered, {flood.ended / SECONDS:.0f} ended: {len(taken)} "
        f"probes, p50 {1000 * taken[len(taken) // 2]:.0f} ms, p99 {1000 * p99(taken):.0f} ms; memory "
        f"{at_rest >> 20} to {most >> 20} MiB; normal after {normal_s:.1f} s"
    )
    assert flood.ended > 0
    assert most < at_rest + CAP_BYTES
    assert normal_s < NORMAL_S
    if is_long():
        assert p99(taken) < PROBE_S


def test_connections_at_ten_times_the_capacity_are_refused_by_name() -> None:
    with ShardServers({}, max_lanes=LANES) as servers:
        [address] = servers.addresses
        with _rpc.channel(address) as channel:
            stub = parameter_server_pb2_grpc.ParameterServerStub(channel)
            offer = stub.Attach(parameter_server_pb2.AttachRequest(), timeout=5)
        host, _, port = offer.address.rpartition(":")
        lanes = [Lane.connect(host, int(port), PARAMETER_SERVER, timeout_s=5) for _ in range(TIMES_CAPACITY * LANES)]
        try:
            refused = []
            for lane in lanes[LANES:]:
                lane.begin(within_s=5)
                refused.append(received_error(lane))
            assert {type(error) for error in refused} == {errors.Overloaded}
            assert {error.details["limit"] for error in refused} == {"LANES"}
            assert servers.open_lanes == LANES
        finally:
            for lane in lanes:
                lane.close()
        wait_until(lambda: servers.open_lanes == 0, what="their end")
        again = Lane.connect(host, int(port), PARAMETER_SERVER, timeout_s=5)
        wait_until(lambda: servers.open_lanes == 1, what="a lane as before")
        again.close()
