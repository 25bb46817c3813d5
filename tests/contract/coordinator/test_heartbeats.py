"""Heartbeats of a server whose shards are locked, and of a worker that also sends reports."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from shoal import errors
from shoal._rpc import CoordinatorClient, MembershipClient
from shoal._training.participant import Participant, Report
from shoal.consistency import Asynchronous
from shoal.optim._optimizers import SGD
from shoal.v1 import coordinator_pb2
from shoal.variables import Variable
from shoal_coordinator.cluster import plan_shards
from shoal_server.process import Server, ServerConfig
from shoal_server.shards import Arena
from shoal_server.shards.values.shard import JobShardConfig
from support.clusters.fake_coordinator import FakeCoordinator
from support.waiting import wait_until


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as fake:
        yield fake


def test_they_and_scrapes_go_on_while_shards_are_restored_however_long_that_takes(coordinator: FakeCoordinator) -> None:
    """A restore holds a lock group's lock while it reads the storage. The heartbeat timeout must not expire then."""
    reading, over = threading.Event(), threading.Event()

    def read(_: Arena) -> None:
        reading.set()
        assert over.wait(60)

    registry = CollectorRegistry()
    server = Server(ServerConfig("server-0", coordinator.address), registry)
    try:
        config = JobShardConfig("a", 1, {"w": Variable((4,))}, SGD(0.1), Asynchronous(), seed=0)
        server.store.create(config, plan_shards(config.variables, 1))
        [group] = server.store.hosted.all()
        with ThreadPoolExecutor(2) as pool:
            restored = pool.submit(group.restore, 1, 1, read)
            try:
                assert reading.wait(20)
                before = coordinator.beats
                wait_until(lambda: coordinator.beats > before + 5, what="heartbeats")
                scraped = pool.submit(generate_latest, registry).result(20)
                assert b"shoal_server_shards 1.0" in scraped
                assert b"shoal_server_waiting_pulls 0.0" in scraped
            finally:
                over.set()
            restored.result(20)
    finally:
        server.stop()


@pytest.fixture
def member(coordinator: FakeCoordinator) -> Iterator[MembershipClient]:
    client = CoordinatorClient(coordinator.address)
    request = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member="w0")
    with MembershipClient(client, request) as membership:
        membership.start()
        yield membership
    client.close()


def test_an_answered_report_takes_the_place_of_heartbeats(
    coordinator: FakeCoordinator, member: MembershipClient
) -> None:
    wait_until(lambda: coordinator.beats >= 2, what="heartbeats of a member that does not report")
    coordinator.interval_s = 3600.0
    client = CoordinatorClient(coordinator.address)
    Participant(client, "a", "w0", member.incarnation).report(Report(step=1, accepted=1), member.pace)
    client.close()
    assert member.pace.heartbeat_due_s > 3000
    beats = coordinator.beats
    member.heartbeat_now()
    wait_until(lambda: coordinator.beats > beats, what="a heartbeat that was asked for")


def test_a_report_that_nobody_answers_stops_no_heartbeat(
    coordinator: FakeCoordinator, member: MembershipClient
) -> None:
    client = CoordinatorClient("127.0.0.1:1")
    with pytest.raises(errors.Unreachable):
        Participant(client, "a", "w0", member.incarnation).report(Report(step=1), member.pace)
    client.close()
    beats = coordinator.beats
    wait_until(lambda: coordinator.beats > beats + 2, what="heartbeats")


def test_a_member_tries_again_soon_after_a_heartbeat_without_an_answer(
    coordinator: FakeCoordinator, member: MembershipClient
) -> None:
    coordinator.stop()
    wait_until(lambda: member.pace.heartbeat_due_s == 0, what="a heartbeat that is due")
    coordinator.start()
    beats = coordinator.beats
    wait_until(lambda: coordinator.beats > beats, what="a heartbeat")


def test_a_member_says_once_that_the_coordinator_does_not_answer_and_once_that_it_answers_again(
    coordinator: FakeCoordinator, member: MembershipClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    unanswered: list[float] = []
    monkeypatch.setattr("shoal._rpc.heartbeat_notices.SILENCE_S", 0.0)
    monkeypatch.setattr(member.pace, "unanswered", lambda: unanswered.append(member.pace.now))  # tries again at once
    with capture_logs() as logs:
        coordinator.stop()
        wait_until(lambda: len(unanswered) > 5, what="heartbeats that fail")
        coordinator.start()
        beats = coordinator.beats
        wait_until(lambda: coordinator.beats > beats + 1, what="heartbeats")
    silent, again = [entry for entry in logs if "coordinator" in entry["event"]]
    assert (silent["log_level"], silent["event"]) == ("warning", "the coordinator does not answer; trying again")
    assert f"{coordinator.address} did not answer (" in silent["reason"]
    assert (again["log_level"], again["event"]) == ("info", "the coordinator answers again")
    assert again["seconds"] >= 0
