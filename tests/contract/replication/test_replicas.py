"""Replicas over real connections: a primary and a backup of a lock group in two servers of this process."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from shoal import _rpc, consistency, errors, initializers, optim
from shoal._training.parameters import ParameterClient
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_server.shards import LockGroup
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

VARIABLES = {"w": Variable(shape=(300, 7), initializer=initializers.Normal()), "b": Variable(shape=(7,), dtype="float64")}
MODES = {
    "sync": consistency.Synchronous(),
    "backup workers": consistency.Synchronous(backup_workers=1),
    "async": consistency.Asynchronous(),
    "ssp": consistency.BoundedStaleness(2),
}


class Replicas(ShardServers):
    """Two servers. The shards are on the first one, and the second one gets the backup."""

    def __init__(self, mode: consistency.Consistency, optimizer: optim.Optimizer) -> None:
        super().__init__(VARIABLES, servers=2, shards=1, mode=mode, optimizer=optimizer)

    def call(self, server: int, method: str, request: object) -> object:
        with _rpc.as_shoal_errors(f"server-{server}"):
            return getattr(self.stubs[server], method)(request)

    def add_backup(self, term: int = 1) -> bool:
        backup = pb.Peer(server="server-1", address=self.addresses[1])
        request = pb.AddBackupRequest(job="job", generation=1, group=0, term=term, backup=backup)
        return self.call(0, "AddBackup", request).complete  # type: ignore[attr-defined]

    def copy(self, term: int = 1) -> None:
        wait_until(lambda: self.add_backup(term))

    def promote(self, term: int = 2) -> None:
        self.call(1, "Promote", pb.PromoteRequest(job="job", generation=1, group=0, term=term))
        shards = tuple(replace(it, server="server-1", address=self.addresses[1]) for it in self.placement.shards)
        self.placement = replace(self.placement, shards=shards)

    def group(self, server: int) -> LockGroup:
        (group,) = self.stores[server].groups()
        return group

    def bytes_of(self, server: int) -> list[bytes]:
        group = self.group(server)
        return [
            array.tobytes()
            for shard in group.shards
            for arena in shard.arenas
            for array in (arena.values, *arena.slots.values())
        ]


@pytest.fixture(params=MODES)
def replicas(request: pytest.FixtureRequest) -> Iterator[Replicas]:
    with Replicas(MODES[request.param], optim.Adam(0.1)) as started:
        yield started


def gradients(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {"w": draw.normal(size=(300, 7)).astype(np.float32), "b": draw.normal(size=7)}


def step(worker: ParameterClient, seed: int) -> str:
    worker.pull()
    return worker.push(gradients(seed)).outcome


def test_the_backup_has_the_bits_of_the_primary_and_goes_on_as_the_primary(replicas: Replicas) -> None:
    replicas.admit("w0")
    with replicas.client("w0") as worker:
        step(worker, 0)
        replicas.copy()
        for seed in range(1, 5):
            step(worker, seed)
        wait_until(lambda: replicas.bytes_of(0) == replicas.bytes_of(1))
        last = gradients(9)
        worker.pull()
        at = worker.step
        worker.push(last)
    replicas.promote()
    with replicas.client("w0", step=at) as again:
        before = replicas.group(1).version
        assert again.push(last).outcome == "accepted"
        assert replicas.group(1).version == before, "the push was applied twice"
        assert step(again, 10) == "accepted"
        assert replicas.group(1).version == before + 1


def test_an_old_primary_acknowledges_nothing_after_a_promotion(replicas: Replicas) -> None:
    replicas.admit("w0")
    replicas.copy()
    with replicas.client("w0") as worker:
        step(worker, 0)
        replicas.call(1, "Promote", pb.PromoteRequest(job="job", generation=1, group=0, term=2))
        wait_until(lambda: replicas.group(0).broken_replica)
        assert replicas.group(0).broken_replica.primary  # type: ignore[union-attr]
        replicas.stores[0].clear()  # as when the coordinator has declared the server lost
        with pytest.raises((errors.Moved, errors.UnknownJob)):
            step(worker, 1)
