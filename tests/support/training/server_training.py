"""Shoal's side of the training problem: two workers and two servers in synchronous mode, in this process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np

from shoal import consistency, optim, partitioners
from shoal._memory.buffers import BufferPool
from shoal._training.parameters import ParameterClient
from shoal._wire.layout import ArenaLayout, ShardLayout, Slice
from shoal.status import UndeliveredNorm
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_server.shards.group.lock_group import LockGroup
from shoal_server.shards.values.shard import JobShardConfig, Peer, Stamp
from support.clusters.shard_servers import ShardServers
from support.training import training_problem as problem
from support.training.training_problem import ROWS, Combination

Values = Mapping[str, np.ndarray]


class TwoServers(ABC):
    """A job on two servers, each of which has half of the rows of every variable."""

    @abstractmethod
    def pull(self, rank: int) -> Values:
        """Returns the values for a worker's next step."""

    @abstractmethod
    def push(self, rank: int, step: int, gradients: Values, weight: int) -> None:
        """Pushes a worker's gradients."""

    @abstractmethod
    def set_rate(self, rate: optim.Schedule) -> None:
        """Sets the learning rate of later updates, as the coordinator does."""


def train(combination: Combination, start: Callable[[optim.Optimizer], AbstractContextManager[TwoServers]]) -> Values:
    """Returns the values after all steps.

    Args:
        combination: the optimizer and its settings.
        start: starts the servers: `lock_groups` or `grpc_servers`.
    """
    rate, plateau = problem.RATE, optim.PlateauState()
    with start(combination.build()) as servers:
        for step in range(problem.STEPS):
            pulled = [servers.pull(rank) for rank in (0, 1)]
            if combination.has_plateaus and step in problem.EVALUATION_STEPS:
                plateau, reduces = problem.PLATEAU.after(plateau, problem.evaluated(pulled[0]), minimizes=True)
                if reduces:
                    rate = problem.PLATEAU.reduced(rate)
                    servers.set_rate(optim.ConstantLR(rate))
            for rank, values in enumerate(pulled):
                servers.push(rank, step, problem.gradients(values, step, rank), ROWS[rank + 1] - ROWS[rank])
        return servers.pull(0)


@contextmanager
def lock_groups(optimizer: optim.Optimizer) -> Iterator[TwoServers]:
    """Yields the shards of two servers, without a transport: a job takes some hundredths of a second."""
    yield LockGroups(optimizer)


class LockGroups(TwoServers):
    """The shards of two servers, which hand their norms to each other."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        values = problem.start()
        self._shapes = {name: value.shape for name, value in values.items()}
        variables = {name: Variable(shape, "float64") for name, shape in self._shapes.items()}
        self._groups: list[LockGroup] = []
        for server in (0, 1):
            peers = (Peer(f"s{1 - server}", "127.0.0.1:1"),) if optimizer.clip_norm else ()
            config = JobShardConfig("job", 1, variables, optimizer, consistency.Synchronous(), 0, peers)
            layout = self._layout(server, variables)
            self._groups.append(LockGroup(config, [layout], norms=Outbox(self._groups, server)))
        for server, group in enumerate(self._groups):
            shards = group.select([server])
            group.assign(shards, {shards.layout.slabs[0]: self._part(server, values)})
            for rank in (0, 1):
                group.admit(f"w{rank}", 1, rank)

    def _rows(self, server: int, name: str) -> slice:
        rows = self._shapes[name][0]
        return slice(server * rows // 2, (server + 1) * rows // 2)

    def _layout(self, server: int, variables: Mapping[str, Variable]) -> ShardLayout:
        slices, elements = [], 0
        for name, shape in self._shapes.items():
            rows = self._rows(server, name)
            slices.append(Slice(name, rows.start, rows.stop, elements))
            elements += (rows.stop - rows.start) * int(np.prod(shape[1:]))
        any_variable = variables["hidden"]
        arena = ArenaLayout(any_variable.dtype, any_variable.aggregation, tuple(slices), elements)
        return ShardLayout(server, (arena,))

    def _part(self, server: int, values: Values) -> np.ndarray:
        return np.concatenate([values[name][self._rows(server, name)].ravel() for name in self._shapes])

    def pull(self, rank: int) -> Values:
        del rank
        pulled = {name: np.empty(shape) for name, shape in self._shapes.items()}
        for server, group in enumerate(self._groups):
            [arena] = group.shards[0].arenas
            for part in arena.layout.slices:
                target = pulled[part.variable][self._rows(server, part.variable)]
                target[...] = arena.values[part.offset : part.offset + target.size].reshape(target.shape)
        return pulled

    def push(self, rank: int, step: int, gradients: Values, weight: int) -> None:
        stamp = Stamp(f"w{rank}", 1, step)
        for server, group in enumerate(self._groups):
            shards = group.select([server])
            payload = shards.payload({shards.layout.slabs[0]: self._part(server, gradients)}, BufferPool(0, 0.0))
            group.stage(stamp, weight, step, payload)
        for group in self._groups:
            group.commit(stamp)

    def set_rate(self, rate: optim.Schedule) -> None:
        for group in self._groups:
            group.set_learning_rate(rate)


@dataclass
class Outbox:
    """Hands the norms of a server to the other one."""

    groups: Sequence[LockGroup]
    server: int

    def send(self, step: int, squares: Sequence[float]) -> None:
        self.groups[1 - self.server].receive_norm(f"s{self.server}", step, squares)

    def undelivered(self) -> Sequence[UndeliveredNorm]:
        return ()

    def close(self) -> None:
        pass


@contextmanager
def grpc_servers(optimizer: optim.Optimizer) -> Iterator[TwoServers]:
    """Yields two servers on real gRPC and lanes, and a client for each worker."""
    halves = partitioners.FixedShards(2)
    variables = {name: Variable(it.shape, "float64", partitioner=halves) for name, it in problem.start().items()}
    mode = consistency.Synchronous()
    with ShardServers(variables, servers=2, shards=2, mode=mode, optimizer=optimizer) as servers:
        with servers.client() as client:
            client.assign(problem.start())
        with servers.worker("w0") as first, servers.worker("w1") as second:
            yield GrpcServers(servers, (first, second))


class GrpcServers(TwoServers):
    """Two servers, and the workers' clients."""

    def __init__(self, servers: ShardServers, workers: Sequence[ParameterClient]) -> None:
        assert len(servers.used_stubs) == 2
        self._servers, self._workers = servers, workers

    def pull(self, rank: int) -> Values:
        return self._workers[rank].pull()

    def push(self, rank: int, step: int, gradients: Values, weight: int) -> None:
        assert self._workers[rank].step == step
        self._workers[rank].push(gradients, weight=weight)

    def set_rate(self, rate: optim.Schedule) -> None:
        self._servers.each("SetRate", pb.SetRateRequest(job="job", learning_rate=rate.to_proto()))
