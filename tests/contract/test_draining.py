"""Draining servers over real gRPC: their calls to the coordinator, their waits, and commits after the last cut."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from shoal import _rpc, errors
from shoal._role.lifecycle import DrainState
from shoal._rpc.coordinator import CoordinatorClient
from shoal._rpc.membership import MembershipClient
from shoal.v1 import coordinator_pb2 as members
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import parameter_server_pb2_grpc
from shoal.variables import Variable
from shoal_server.draining import wait_until_drained
from shoal_server.process import Server, ServerConfig
from support.clusters.cluster_rig import FIXED
from support.clusters.coordinator_rig import Rig, job
from support.clusters.fake_coordinator import FakeCoordinator
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

ONES = {"w": np.ones(4, np.float32)}
V = {"w": Variable((4,))}


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as fake:
        yield fake


@pytest.fixture
def client(coordinator: FakeCoordinator) -> Iterator[CoordinatorClient]:
    with closing(CoordinatorClient(coordinator.address)) as client:
        yield client


@pytest.fixture
def member(client: CoordinatorClient) -> Iterator[MembershipClient]:
    request = members.RegisterRequest(role=members.SERVER, member="s0", address="h:1")
    with MembershipClient(client, request) as member:
        member.start()
        yield member


def test_the_coordinator_names_the_jobs_that_a_server_has_to_wait_for(tmp_path: Path) -> None:
    rig = Rig(checkpoints=str(tmp_path))
    try:
        for name in ("w0", "w1"):
            rig.register(members.WORKER, name, device="cpu")
        rig.run(job(**FIXED), "w0", "w1")

        def drain(member: str, incarnation: int | None = None) -> list[str]:
            request = members.DrainRequest(member=member, incarnation=incarnation or rig.lives[member])
            return list(rig.client.call(rig.client.members.Drain, request).jobs)

        assert drain("s1") == drain("s1") == ["a"]
        status = rig.member_status()
        assert (status["s1"].alive, status["s1"].draining, status["s0"].draining) == (True, True, False)
        rig.job("Cancel", job="a")
        assert drain("s1") == []
        with pytest.raises(errors.BadRequest, match="w0 is a worker"):
            drain("w0")
        with pytest.raises(errors.Fenced):
            drain("s1", rig.lives["s1"] + 1)
    finally:
        rig.stop()


class TestAServer:
    @pytest.fixture
    def leave(self, client: CoordinatorClient, member: MembershipClient) -> Callable[..., None]:
        """Makes the server leave, as `shoal server` does."""

        def leave(grace_s: float = 60.0, enough: threading.Event | None = None, **options: Any) -> None:
            return wait_until_drained(client, member, enough or threading.Event(), grace_s, **options)

        return leave

    def test_leaves_when_no_job_needs_it(self, coordinator: FakeCoordinator, leave: Callable[..., None]) -> None:
        coordinator.drains = [["a", "b"], ["b"], ["b"]]
        leave(grace_s=50.0)
        assert coordinator.drained == [("s0", 1)] * 4
        assert 40.0 < coordinator.left_s[-1] < coordinator.left_s[0] <= 50.0

    def test_names_the_ended_jobs_whose_values_leave_with_it(
        self, coordinator: FakeCoordinator, leave: Callable[..., None]
    ) -> None:
        coordinator.drains = [["live"]]
        with capture_logs() as logs:
            leave(hosted=lambda: ["live", "done"])
        assert [log["jobs"] for log in logs if "values leave" in log["event"]] == [["done"]]

    def test_tells_a_coordinator_that_is_away_as_soon_as_it_is_back(
        self, coordinator: FakeCoordinator, leave: Callable[..., None]
    ) -> None:
        coordinator.drains = [errors.Unreachable("it restarts"), ["a"]]
        with capture_logs() as logs:
            leave()
        assert len(coordinator.drained) == 3
        assert [log["event"] for log in logs if log["log_level"] == "warning"] == [
            "cannot reach the coordinator to drain; retrying"
        ]

    def test_waits_on_for_a_coordinator_that_has_answered_before(
        self, coordinator: FakeCoordinator, leave: Callable[..., None]
    ) -> None:
        """Each time the coordinator is away, the server logs it once."""
        away = errors.Unreachable("it restarts")
        coordinator.drains = [["a"], away, away, away, ["a"], away, away]
        with capture_logs() as logs:
            leave(first_answer_s=0.0)
        assert len(coordinator.drained) == 8
        assert [log["log_level"] for log in logs].count("warning") == 2

    def test_does_not_wait_for_a_coordinator_that_never_answers(
        self, coordinator: FakeCoordinator, leave: Callable[..., None]
    ) -> None:
        coordinator.drains = [errors.Unreachable("it is gone")] * 1000
        start = time.monotonic()
        with capture_logs() as logs:
            leave(first_answer_s=0.5, jitter=lambda: 0.0)
        assert 0.5 <= time.monotonic() - start < 10
        assert len(coordinator.drained) <= 6, "after 0, 50, 150, 350, 500 ms"
        assert [log["event"] for log in logs if log["log_level"] == "warning"] == [
            "cannot reach the coordinator to drain; retrying",
            "stopping before all jobs have moved or are saved",
        ]

    def test_goes_at_once_where_its_life_is_over(
        self, coordinator: FakeCoordinator, leave: Callable[..., None]
    ) -> None:
        coordinator.drains = [errors.Fenced("s0 is dead"), ["a"]]
        leave()
        assert len(coordinator.drained) == 1

    def test_waits_no_longer_than_its_grace(self, coordinator: FakeCoordinator, leave: Callable[..., None]) -> None:
        coordinator.drains = [["a"]] * 1000
        start = time.monotonic()
        leave(0.3)
        assert 0.3 <= time.monotonic() - start < 5
        assert coordinator.drained

    def test_stops_waiting_on_a_second_signal(self, coordinator: FakeCoordinator, leave: Callable[..., None]) -> None:
        coordinator.drains = [["a"]] * 1000
        enough = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(leave, 60, enough)
            enough.set()
            assert waiting.exception(20) is None, "it waited on, up to 60 s"


class TestShards:
    @pytest.fixture
    def servers(self, tmp_path: Path) -> Iterator[ShardServers]:
        with ShardServers({"w": Variable((4,))}, shards=1, checkpoints=tmp_path) as servers:
            yield servers

    @pytest.mark.parametrize("transport", ["auto", "grpc"])
    def test_take_nothing_after_their_last_cut_and_refuse_waiting_calls_when_dropped(
        self, servers: ShardServers, transport: str
    ) -> None:
        servers.admit("w0")
        with servers.client("w0", transport=transport) as worker, ThreadPoolExecutor(1) as pool:
            worker.pull()
            worker.push(ONES)
            saved = servers.cut(servers.hold(), hold_s=20)
            worker.pull()
            pushed = pool.submit(worker.push, ONES)
            manifest = servers.publish(saved)
            assert (manifest.step, servers.versions(), pushed.done()) == (1, [1], False)
            servers.each("DropShards", pb.DropShardsRequest(job="job"))
            with pytest.raises(errors.UnknownJob):
                pushed.result(15)

    @pytest.mark.parametrize("number", [1, 2])
    def test_hear_of_the_end_of_their_last_cut_though_it_holds_back_more_commits_than_they_have_threads(
        self, tmp_path: Path, number: int
    ) -> None:
        """With two servers, a commit is a separate call."""
        with (
            ShardServers({**V, "v": Variable((4,))}, servers=number, rpc_threads=2, checkpoints=tmp_path) as servers,
            ThreadPoolExecutor(6) as pool,
            ExitStack() as stack,
        ):
            names = [f"w{index}" for index in range(6)]
            workers = [stack.enter_context(servers.client(name, transport="grpc")) for name in names]
            for name in names:
                servers.admit(name)
            saved = servers.cut(servers.hold(), hold_s=60)
            gradients = {name: np.ones(4, np.float32) for name in ("w", "v")}
            pushed = [pool.submit(worker.push, gradients) for worker in workers]
            wait_until(
                lambda: sum(len(service.waits.all) for service in servers.services) == 6 * number,
                what="commits that wait",
            )
            servers.publish(saved)  # collects the files
            servers.each("ResumeCommits", pb.ResumeCommitsRequest(job="job", cut=1))
            assert [each.result(15).outcome for each in pushed] == ["accepted"] * 6

    def test_go_on_if_it_is_abandoned(self, servers: ShardServers) -> None:
        servers.admit("w0")
        with servers.client("w0") as worker, ThreadPoolExecutor(1) as pool:
            servers.cut(servers.hold(), hold_s=20)
            worker.pull()
            pushed = pool.submit(worker.push, ONES)
            servers.each("ResumeCommits", pb.ResumeCommitsRequest(job="job", cut=1))
            assert pushed.result(15).outcome == "accepted"
            assert servers.versions() == [1]

    @pytest.mark.parametrize("hold_s", [-1.0, 61.0, float("nan")])
    def test_wait_no_longer_than_is_good_for_them(self, servers: ShardServers, hold_s: float) -> None:
        held = servers.hold()
        with pytest.raises(errors.BadRequest, match=r"hold_s is .* from 0 to 60 s"):
            servers.cut(held, hold_s=hold_s)


def test_a_server_that_is_draining_says_so_by_its_health_and_serves_on(coordinator: FakeCoordinator) -> None:
    coordinator.drains = [["a"]] * 100_000
    server = Server(ServerConfig("s0", coordinator.address), CollectorRegistry())
    enough = threading.Event()
    with ThreadPoolExecutor(1) as pool, closing(_rpc.channel(server.address)) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def says() -> str:
            status = health.Check(health_pb2.HealthCheckRequest()).status
            name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
            return name

        try:
            assert says() == "SERVING"
            drained = pool.submit(server.leave, enough)
            wait_until(lambda: coordinator.drained, what="its word that it is going")
            assert says() == "NOT_SERVING"
            stub = parameter_server_pb2_grpc.ParameterServerStub(channel)
            stub.DropShards(pb.DropShardsRequest(job="none"))
            assert not drained.done()
        finally:
            enough.set()
            server.stop()
        drained.result(20)


def test_a_server_that_has_to_drain_by_an_order_is_not_ready_until_it_is_a_new_incarnation(
    coordinator: FakeCoordinator,
) -> None:
    server = Server(ServerConfig("s0", coordinator.address), CollectorRegistry())
    with closing(_rpc.channel(server.address)) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def is_ready() -> bool:
            return bool(health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING)

        try:
            assert is_ready()
            coordinator.beat = members.HeartbeatReply(drains=True)
            wait_until(lambda: server.drain_state is DrainState.DRAINING, what="the order")
            assert not is_ready()
            coordinator.beat = members.HeartbeatReply()
            wait_until(is_ready, what="its being ready again")
            coordinator.beat = members.HeartbeatReply(drains=True, leave=True)
            wait_until(lambda: server.drain_state is DrainState.DRAINED, what="the end of the drain")
            server.leave(threading.Event())
            assert len(coordinator.drained) == 1, "it asks once whether it may leave"
        finally:
            server.stop()


class TestAnOrder:
    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[Rig]:
        rig = Rig(checkpoints=str(tmp_path))
        for name in ("w0", "w1"):
            rig.register(members.WORKER, name, device="cpu")
        yield rig
        rig.stop()

    @staticmethod
    def order(rig: Rig, member: str, **fields: Any) -> members.Member:
        request = members.DrainServerRequest(member=member, **fields)
        return rig.client.call(rig.client.members.DrainServer, request).server

    def test_drains_a_server_which_learns_of_it_by_a_heartbeat(self, rig: Rig) -> None:
        rig.run(job(**FIXED), "w0", "w1")
        answer = self.order(rig, "s1", stay=True)
        assert (answer.member, answer.draining, answer.drained, [*answer.waiting_jobs]) == ("s1", True, False, ["a"])
        assert (rig.beat("s1").drains, rig.beat("s1").leave) == (True, False)
        assert self.order(rig, "s1", stay=True).draining, "a repeat only reads"
        rig.job("Cancel", job="a")
        status = rig.member_status()["s1"]
        assert (status.drained, [*status.waiting_jobs], [*status.ended_jobs]) == (True, [], ["a"])
        assert not rig.beat("s1").leave
        assert self.order(rig, "s1", incarnation=rig.lives["s1"]).drained
        assert (rig.beat("s1").drains, rig.beat("s1").leave) == (True, True)
        assert not rig.beat("s0").drains

    def test_is_refused(self, rig: Rig) -> None:
        rig.run(job(**FIXED), "w0", "w1")
        for member, error, message in (
            ("nobody", errors.UnknownMember, "is not a member"),
            ("", errors.UnknownMember, "is not a member"),
            ("w0", errors.BadRequest, "w0 is a worker"),
        ):
            with pytest.raises(error, match=message):
                self.order(rig, member)
        with pytest.raises(errors.Fenced):
            self.order(rig, "s1", incarnation=99)
        self.order(rig, "s1", stay=True)
        with pytest.raises(errors.ServerNeeded, match="s0 is the last server that can take shards"):
            self.order(rig, "s0")
        assert self.order(rig, "s0", force=True).draining

    def test_lasts_over_a_restart_of_the_coordinator(self, tmp_path: Path) -> None:
        rig = Rig(store=str(tmp_path / "store"))
        try:
            self.order(rig, "s1", stay=True)
            rig.restart()
            wait_until(lambda: rig.member_status()["s1"].alive, what="the members' return")
            assert (rig.beat("s1").drains, rig.beat("s1").leave) == (True, False)
        finally:
            rig.stop()
