"""Lock groups with copies on several servers, in memory: the test loses servers and promotes backups.

All copies of a group are one object here, so a promoted backup has what the lost primary has acknowledged.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from shoal import _transport, errors
from shoal._training.parameters import ParameterClient
from shoal._transport import Target, Transport, TransportFactory
from shoal._wire import Placement, PullDecoder, PushPayload, with_groups
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards

NAME = "replicated"


@dataclass
class Copies:
    """The state of one lock group, as all its copies have it."""

    values: dict[int, np.ndarray] = field(default_factory=dict)  # by slab
    staged: dict[int, list[np.ndarray]] = field(default_factory=dict)  # by step
    committed: set[int] = field(default_factory=set)
    repeated: int = 0  # pushes that were recognised by their stamps


@dataclass
class Server:
    """A server: what it does with a call, beyond being the primary of the groups that the placement gives it."""

    lost: bool = False
    stopped: bool = False  # takes calls and never answers them
    refuses: errors.ShoalError | None = None
    calls: list[str] = field(default_factory=list)
    loses_answer_of: str = ""  # the call after which it is lost, before its answer
    answers_last: str = ""  # the call after which it is lost, with its answer


class FakeReplicas:
    """Servers of one job, and a coordinator that knows where its lock groups are."""

    def __init__(self, variables: dict[str, Variable], *, servers: int = 2, shards: int = 4) -> None:
        self.addresses = [f"replica-{index}:1" for index in range(servers)]
        candidates = [Candidate(f"server-{index}", address, 0) for index, address in enumerate(self.addresses)]
        placed = with_groups(assign_shards(plan_shards(variables, shards), candidates))
        backups = {address: self.addresses[index - 1] for index, address in enumerate(self.addresses)}
        placed = tuple(
            replace(it, backup=f"at-{backups[it.address]}", backup_address=backups[it.address], term=1) for it in placed
        )
        self.placement = Placement("job", 1, variables, placed)
        self.servers = {address: Server() for address in self.addresses}
        self.groups = {group: Copies() for group in self.placement.by_group()}
        self.changed = threading.Condition()  # guards everything above, and is notified when it changes
        self.questions = 0  # asked of the coordinator
        self.away = False  # whether the coordinator does not answer
        self.open = True  # whether pulls are answered
        self.waiting = 0  # pulls that wait

    def locate(self, known: Placement) -> Placement:
        with self.changed:
            self.questions += 1
            self.changed.notify_all()
            if self.away:
                raise errors.Unreachable("the coordinator is away")
            return known.renewed(self.placement.to_proto())

    def client(self, **options: object) -> ParameterClient:
        given: dict[str, object] = {"worker": "a", "incarnation": 1, "retry_for_s": 20.0, "replicated": True}
        given |= {"refresh": lambda: self.placement, "locate": self.locate, "transport": NAME}
        return ParameterClient(self.placement, **given | options)  # type: ignore[arg-type]

    def lose(self, address: str) -> None:
        """Loses a server: its connections break, and new ones are refused."""
        with self.changed:
            self.servers[address].lost = True
            self.changed.notify_all()

    def promote(self, lost: str) -> None:
        """Promotes all backups of a server's groups."""
        with self.changed:
            shards = tuple(
                replace(it, server=it.backup, address=it.backup_address, backup="", backup_address="", term=it.term + 1)
                if it.address == lost
                else it
                for it in self.placement.shards
            )
            self.placement = replace(self.placement, shards=shards)
            self.changed.notify_all()

    def at(self, group: int) -> str:
        return self.placement.shards[group].address

    def values(self) -> list[float]:
        """Returns the sums of all groups."""
        return [float(sum(slab.sum() for slab in copies.values.values())) for copies in self.groups.values()]


class ReplicatedTransport(Transport):
    def __init__(self, cluster: FakeReplicas, target: Target) -> None:
        self._cluster, self.address, self._layout = cluster, target.address, target.layout
        self.group = target.layout.shards[0].shard
        self.over = False

    @property
    def broken(self) -> bool:
        return self.over

    def memory(self) -> tuple[int, np.ndarray] | None:
        return (1, np.zeros(self._layout.region_bytes, np.uint8)) if not self.over else None

    def pull(self, request: pb.PullRequest, pull_decoder: PullDecoder | None) -> list[header_pb2.ShardHeader]:
        with self._call("pull") as copies:
            self._cluster.waiting += 1
            try:
                self._wait(lambda: self._cluster.open)
            finally:
                self._cluster.waiting -= 1
            for index, slab in enumerate(self._layout.slabs if pull_decoder else ()):
                assert pull_decoder is not None
                values = copies.values.get(index)
                pull_decoder.adopt(slab, np.zeros(slab.elements, slab.dtype) if values is None else values.copy())
            return [self._header(shard, request.stamp.step + request.ahead) for shard in request.shards]

    def push(self, header: pb.PushHeader, payload: PushPayload) -> pb.PushReply:
        received = self._received(payload)
        with self._call("push") as copies:
            step = header.stamp.step
            if step in copies.committed:
                copies.repeated += 1
            else:
                copies.staged[step] = received
                if header.commit:
                    self._apply(copies, step)
            return self._pushed(header.shards, step)

    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        with self._call("commit") as copies:
            step = request.stamp.step
            if step in copies.committed:
                copies.repeated += 1
            elif step not in copies.staged:
                raise errors.NotStaged("nothing is staged")
            else:
                self._apply(copies, step)
            return self._pushed(request.shards, step)

    def assign(self, header: pb.PushHeader, payload: PushPayload) -> None:
        raise NotImplementedError

    def close(self) -> None:
        with self._cluster.changed:
            self.over = True
            self._cluster.changed.notify_all()

    def _received(self, payload: PushPayload) -> list[np.ndarray]:
        region = payload.copy
        if region is None:
            assert payload.arrays is not None
            region = np.zeros(self._layout.region_bytes, np.uint8)
            payload.packer.write(self._layout, payload.arrays, payload.aggregations, region)
        return [array.copy() for array in self._layout.arrays(region, payload.aggregations).values()]

    @staticmethod
    def _apply(copies: Copies, step: int) -> None:
        for index, array in enumerate(copies.staged.pop(step)):
            copies.values[index] = copies.values.get(index, np.zeros_like(array)) + array
        copies.committed.add(step)

    def _pushed(self, shards: Sequence[int], step: int) -> pb.PushReply:
        pushed = [pb.ShardPush(header=self._header(shard, step + 1), outcome=pb.ACCEPTED) for shard in shards]
        return pb.PushReply(shards=pushed)

    def _header(self, shard: int, step: int) -> header_pb2.ShardHeader:
        return header_pb2.ShardHeader(shard=shard, generation=1, version=step, step=step)

    @contextmanager
    def _call(self, call: str) -> Iterator[Copies]:
        """Makes a call at the server, which may lose its answer."""
        cluster = self._cluster
        with cluster.changed:
            server = cluster.servers[self.address]
            server.calls.append(f"{call} {self.group}")
            cluster.changed.notify_all()
            self._wait(lambda: not server.stopped)
            if server.refuses:
                raise server.refuses
            if cluster.at(self.group) != self.address:
                raise errors.Moved(f"group {self.group} has moved")
            yield cluster.groups[self.group]
            if server.loses_answer_of == call or server.answers_last == call:
                server.lost = True
                cluster.changed.notify_all()
            if server.loses_answer_of == call:
                self._wait(lambda: True)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Waits for a condition. The server or this end may go meanwhile."""
        cluster = self._cluster
        server = cluster.servers[self.address]
        assert cluster.changed.wait_for(lambda: until() or self.over or server.lost, 20)
        if self.over or server.lost:
            self.over = True
            raise errors.Unreachable(f"the connection to {self.address} broke", address=self.address)


class _Factory(TransportFactory):
    name = title = carrier = NAME
    settings = frozenset({NAME})
    rank = 50
    attaches = False

    def __init__(self, cluster: FakeReplicas) -> None:
        self._cluster = cluster

    def open(self, target: Target, payloads: int) -> ReplicatedTransport:
        if self._cluster.servers[target.address].lost:
            raise errors.Unreachable(f"no server at {target.address}", address=target.address)
        return ReplicatedTransport(self._cluster, target)


@contextmanager
def replicas(variables: dict[str, Variable], *, servers: int = 2, shards: int = 4) -> Iterator[FakeReplicas]:
    """Yields such a cluster. Its clients use the transport `NAME`."""
    cluster = FakeReplicas(variables, servers=servers, shards=shards)
    _transport.register(_Factory(cluster))
    try:
        yield cluster
    finally:
        _transport.unregister(NAME)
