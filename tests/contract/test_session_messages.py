"""What a session tells a person who uses it in a way that cannot work. The test plays the coordinator."""

import logging
from collections.abc import Iterator

import numpy as np
import pytest

import shoal
from support.clusters.fake_coordinator import FakeCoordinator
from support.clusters.shard_servers import ShardServers


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as coordinator:
        yield coordinator


@pytest.fixture
def client(coordinator: FakeCoordinator) -> Iterator[shoal.Client]:
    with shoal.Client(coordinator.address, retry_for_s=0) as client:
        yield client


@pytest.fixture
def servers(coordinator: FakeCoordinator) -> Iterator[ShardServers]:
    with ShardServers({"w": np.zeros(3)}) as servers:
        coordinator.placement = servers.placement.to_proto()
        servers.admit("me", incarnation=1)
        yield servers


@pytest.fixture
def session(client: shoal.Client, servers: ShardServers) -> Iterator[shoal.Session]:
    with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
        yield session


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.message for it in caplog.records if it.name == "shoal" and it.levelno == logging.WARNING]


def test_a_session_without_trainable_variables_warns(
    coordinator: FakeCoordinator, client: shoal.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with ShardServers({"w": np.array([1, 2, 3])}) as servers:
        coordinator.placement = servers.placement.to_proto()
        servers.admit("me", incarnation=1)
        with client.session("job", variables={"w": [1, 2, 3]}, worker="me"):
            pass
    (said,) = warnings(caplog)
    assert "session me (job job) has no trainable variable" in said
    assert "w is int64. A float dtype means trainable" in said
