"""A server's heartbeats, while something holds the locks of its shards."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from shoal.consistency import Asynchronous
from shoal.optim._optimizers import SGD
from shoal.variables import Variable
from shoal_coordinator.cluster import plan_shards
from shoal_server.process import Server, ServerConfig
from shoal_server.shards import Arena
from shoal_server.shards.shard import JobShardConfig
from support.clusters.fake_coordinator import FakeCoordinator
from support.waiting import wait_until


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as fake:
        yield fake


def test_they_and_scrapes_go_on_while_shards_are_restored_however_long_that_takes(coordinator: FakeCoordinator) -> None:
    """A restore holds a group's lock while it reads a storage: the lease must not run out over that."""
    reading, over = threading.Event(), threading.Event()

    def read(_: Arena) -> None:
        reading.set()
        assert over.wait(60)

    registry = CollectorRegistry()
    server = Server(ServerConfig("server-0", coordinator.address), registry)
    try:
        config = JobShardConfig("a", 1, {"w": Variable((4,))}, SGD(0.1), Asynchronous(), seed=0)
        server.store.create(config, plan_shards(config.variables, 1))
        [group] = server.store.groups()
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
