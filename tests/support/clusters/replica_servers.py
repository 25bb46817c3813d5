"""Parameter servers in this process with the copies of one lock group. The test plays the coordinator."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shoal import _rpc, consistency, initializers, optim
from shoal._training.parameters import ParameterClient
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_server.shards import LockGroup
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

VARIABLES = {
    "w": Variable(shape=(300, 7), initializer=initializers.Normal()),
    "b": Variable(shape=(7,), dtype="float64"),
    "count": Variable(shape=(2,), dtype="int64", trainable=False, aggregation="sum"),
}
LARGE = {"w": Variable(shape=(1 << 21,), initializer=initializers.Normal())}  # so large that pushes need permits


class Replicas(ShardServers):
    """Servers with one lock group. Its primary is on the first one, until `primary` says otherwise.

    Attributes:
        primary: index of the server with the primary.
    """

    def __init__(
        self,
        mode: consistency.Consistency,
        optimizer: optim.Optimizer,
        variables: Mapping[str, Variable] = VARIABLES,
        servers: int = 2,
    ) -> None:
        super().__init__(variables, servers=servers, shards=1, mode=mode, optimizer=optimizer)
        self.primary = 0

    def call(self, server: int, method: str, request: object) -> Any:
        with _rpc.as_shoal_errors(f"server-{server}"):
            return getattr(self.stubs[server], method)(request)

    def add_backup(
        self, term: int = 1, *, to: int = 1, sender: int | None = None, keeps: int = 0, as_backup: bool = False
    ) -> bool:
        request = pb.AddBackupRequest(
            job="job",
            generation=1,
            group=0,
            term=term,
            backup=pb.Peer(server=f"server-{to}", address=self.addresses[to]),
            keeps_term=keeps,
            as_backup=as_backup,
        )
        return bool(self.call(self.primary if sender is None else sender, "AddBackup", request).complete)

    def copy(self, term: int = 1, **options: Any) -> None:
        wait_until(lambda: self.add_backup(term, **options), what="the copy")

    def drop_backup(self, term: int = 2, *, sender: int | None = None, keeps: int = 0, as_backup: bool = False) -> None:
        request = pb.DropBackupRequest(
            job="job", generation=1, group=0, term=term, keeps_term=keeps, as_backup=as_backup
        )
        self.call(self.primary if sender is None else sender, "DropBackup", request)

    def drop_copy(self, server: int, term: int = 2) -> None:
        self.call(server, "DropCopy", pb.DropCopyRequest(job="job", generation=1, group=0, term=term))

    def promote(self, term: int = 2, *, server: int = 1, keeps: int = 0) -> None:
        self.call(server, "Promote", pb.PromoteRequest(job="job", generation=1, group=0, term=term, keeps_term=keeps))
        self.primary, name, address = server, f"server-{server}", self.addresses[server]
        shards = tuple(replace(it, server=name, address=address, term=term) for it in self.placement.shards)
        self.placement = replace(self.placement, shards=shards)

    def lose_connection(self) -> None:
        """Breaks the connection between the two, and waits until the primary knows."""
        self.endpoints[1].stop()
        wait_until(lambda: self.group(0).broken_replicas, what="a broken replica")

    def group(self, server: int) -> LockGroup:
        (group,) = self.stores[server].hosted.all()
        return group

    def bytes_of(self, server: int) -> list[bytes]:
        return [
            array.tobytes()
            for shard in self.group(server).shards
            for arena in shard.arenas
            for array in (arena.values, *arena.slots.values())
        ]

    def _same(self, other: int) -> bool:
        return self.bytes_of(self.primary) == self.bytes_of(other)

    def check_same(self, *servers: int) -> None:
        for other in servers or (1,):
            wait_until(partial(self._same, other), what="the same bits")
        assert not self.group(self.primary).broken_replicas


def gradients(seed: int, variables: Mapping[str, Variable] = VARIABLES) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=it.shape).astype(it.dtype) for name, it in variables.items() if name != "count"}


def step(worker: ParameterClient, seed: int, variables: Mapping[str, Variable] = VARIABLES) -> str:
    worker.pull()
    updates = {"count": np.array([1, seed])} if "count" in variables else None
    return worker.push(gradients(seed, variables), updates=updates).outcome


def train(rig: Replicas, name: str, seeds: Iterable[int], variables: Mapping[str, Variable] = VARIABLES) -> None:
    with rig.client(name, locate=lambda _: rig.placement, replicated=True) as worker:
        for seed in seeds:
            step(worker, seed, variables)
    rig.remove(name)  # with backup workers, the others would wait for it
