"""The cluster and its members, as plain values."""

import enum
from dataclasses import dataclass

from shoal.v1 import coordinator_pb2


class Role(enum.Enum):
    """What a member is."""

    SERVER = "server"
    WORKER = "worker"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server does; who wants rates takes the difference of two.

    Attributes:
        updates: applied since its process began, a shard each.
        received_bytes: of gradients and values, since then.
        sent_bytes: of values, since then.
        waiting_pulls: that wait for their consistency mode now, a shard each.
    """

    updates: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    waiting_pulls: int = 0

    def to_proto(self) -> coordinator_pb2.ServerLoad:
        """The message that carries it."""
        return coordinator_pb2.ServerLoad(
            updates=self.updates,
            received_bytes=self.received_bytes,
            sent_bytes=self.sent_bytes,
            waiting_pulls=self.waiting_pulls,
        )

    @classmethod
    def from_proto(cls, message: coordinator_pb2.ServerLoad) -> "ServerLoad":
        """The load that a message carries."""
        return cls(message.updates, message.received_bytes, message.sent_bytes, message.waiting_pulls)


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member of the cluster.

    Attributes:
        member: its id.
        role: what it is.
        incarnation: which life of it this is.
        address: host:port of a server; empty for the others.
        device: of a worker: "cpu", "cuda:0 NVIDIA H200".
        metrics_address: host:port of its /metrics.
        alive: its lease runs.
        silent_s: seconds since its last sign of life.
        shards: how many it holds.
        bytes: of values and slots in them.
        job: what it works on; empty: nothing.
        load: of a server: what it does, as it said last.
        leaving: it was told to go: a server serves on while its jobs are saved. Not alive, it has gone in good order.
    """

    member: str
    role: Role
    incarnation: int
    address: str
    device: str
    metrics_address: str
    alive: bool
    silent_s: float
    shards: int
    bytes: int
    job: str
    load: ServerLoad = ServerLoad()
    leaving: bool = False

    @classmethod
    def from_proto(cls, message: coordinator_pb2.Member) -> "MemberStatus":
        """The member that a message describes."""
        return cls(
            member=message.member,
            role=Role(coordinator_pb2.Role.Name(message.role).lower()),
            incarnation=message.incarnation,
            address=message.address,
            device=message.device,
            metrics_address=message.metrics_address,
            alive=message.alive,
            silent_s=message.silent_s,
            shards=message.shards,
            bytes=message.bytes,
            job=message.job,
            load=ServerLoad.from_proto(message.load),
            leaving=message.leaving,
        )


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster as the coordinator sees it.

    Attributes:
        cluster: its id, drawn when the coordinator started on an empty store.
        generation: the newest placement's number.
        members: servers, workers and sessions, dead ones too.
    """

    cluster: str
    generation: int
    members: tuple[MemberStatus, ...]

    @property
    def shards(self) -> int:
        """Shards on live servers."""
        return sum(member.shards for member in self.members if member.alive)

    @property
    def bytes(self) -> int:
        """Bytes of values and slots on live servers."""
        return sum(member.bytes for member in self.members if member.alive)

    def alive(self, role: Role) -> tuple[MemberStatus, ...]:
        """The live members of one role."""
        return tuple(member for member in self.members if member.alive and member.role is role)

    @classmethod
    def from_proto(cls, message: coordinator_pb2.GetStatusReply) -> "ClusterStatus":
        """The status that a message carries."""
        members = tuple(MemberStatus.from_proto(member) for member in message.members)
        return cls(message.cluster, message.generation, members)


__all__ = ["ClusterStatus", "MemberStatus", "Role", "ServerLoad"]
