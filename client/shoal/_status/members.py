"""The status of the cluster and its members, as plain values."""

import enum
from dataclasses import dataclass

from shoal.v1 import coordinator_pb2


class Role(enum.Enum):
    """The role of a member."""

    SERVER = "server"
    WORKER = "worker"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class UndeliveredNorm:
    """The norm of a synchronous step that a server cannot send to another one, so that the step waits.

    Attributes:
        job: name of the job.
        generation: generation of its placement.
        server: the other server.
        seconds: seconds since the step was measured.
        reason: why the last call failed.
    """

    job: str
    generation: int
    server: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class BrokenReplica:
    """A lock group whose connection between its primary and its backup broke.

    Attributes:
        job: name of the job.
        generation: generation of its placement.
        group: names the lock group: the smallest index of its shards.
        term: the term of the primary.
        primary: whether the server that reports this is the primary; if not, it has the backup.
        reason: why the connection broke.
    """

    job: str
    generation: int
    group: int
    term: int
    primary: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of a server. The counters start at 0 with the process. For a rate, take the difference of two loads.

    Attributes:
        updates: updates applied.
        received_bytes: bytes of gradients and values received.
        sent_bytes: bytes of values sent.
        waiting_pulls: pulls that currently wait for their consistency mode.
        undelivered_norms: norms of steps that could not be sent to other servers for some seconds.
        broken_replicas: lock groups whose other copy the server does not reach any more.
    """

    updates: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    waiting_pulls: int = 0
    undelivered_norms: tuple[UndeliveredNorm, ...] = ()
    broken_replicas: tuple[BrokenReplica, ...] = ()

    def to_proto(self) -> coordinator_pb2.ServerLoad:
        """Returns the message that carries the load."""
        return coordinator_pb2.ServerLoad(
            updates=self.updates,
            received_bytes=self.received_bytes,
            sent_bytes=self.sent_bytes,
            waiting_pulls=self.waiting_pulls,
            undelivered_norms=[
                coordinator_pb2.UndeliveredNorm(
                    job=it.job, generation=it.generation, server=it.server, seconds=it.seconds, reason=it.reason
                )
                for it in self.undelivered_norms
            ],
            broken_replicas=[
                coordinator_pb2.BrokenReplica(
                    job=it.job,
                    generation=it.generation,
                    group=it.group,
                    term=it.term,
                    primary=it.primary,
                    reason=it.reason,
                )
                for it in self.broken_replicas
            ],
        )

    @classmethod
    def from_proto(cls, message: coordinator_pb2.ServerLoad) -> "ServerLoad":
        """Returns the load that a message carries."""
        norms = tuple(
            UndeliveredNorm(it.job, it.generation, it.server, it.seconds, it.reason) for it in message.undelivered_norms
        )
        broken = tuple(
            BrokenReplica(it.job, it.generation, it.group, it.term, it.primary, it.reason)
            for it in message.broken_replicas
        )
        return cls(message.updates, message.received_bytes, message.sent_bytes, message.waiting_pulls, norms, broken)


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """The status of a member of the cluster.

    Attributes:
        member: id of the member.
        role: role of the member.
        incarnation: number of its incarnation.
        address: host:port of a server or a worker, "" for a session.
        device: device of a worker, such as "cpu" or "cuda:0 NVIDIA H200".
        metrics_address: host:port of its /metrics.
        alive: whether it sends heartbeats within the heartbeat timeout.
        silent_s: seconds since its last heartbeat.
        shards: number of shards that it holds.
        bytes: size of the values and slots in its shards.
        job: name of the job that it works on, or "".
        load: latest reported load of a server.
        draining: whether it is a server that drains, or that drained before it left or was lost.
        moving_groups: lock groups that still have a copy on a draining server and move to other servers.
        waiting_jobs: names of the live jobs that a draining server waits for; at most 100.
        drained: whether no live job needs a draining server any more, or needed it when it left.
        ended_jobs: names of the ended jobs whose values leave with a draining server; at most 100.
        zone: zone of a server; "" means the host of its address.
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
    draining: bool = False
    moving_groups: int = 0
    waiting_jobs: tuple[str, ...] = ()
    drained: bool = False
    ended_jobs: tuple[str, ...] = ()
    zone: str = ""

    @classmethod
    def from_proto(cls, message: coordinator_pb2.Member) -> "MemberStatus":
        """Returns the member that a message describes."""
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
            draining=message.draining,
            moving_groups=message.moving_groups,
            waiting_jobs=tuple(message.waiting_jobs),
            drained=message.drained,
            ended_jobs=tuple(message.ended_jobs),
            zone=message.zone,
        )


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The status of the cluster.

    Attributes:
        cluster: id of the cluster, generated when the coordinator starts with an empty store.
        generation: generation of the newest placement.
        members: servers, workers and sessions, including lost ones.
        heartbeat_interval_s: seconds from one heartbeat of a member to the next. 0 means not known.
    """

    cluster: str
    generation: int
    members: tuple[MemberStatus, ...]
    heartbeat_interval_s: float = 0.0

    @property
    def shards(self) -> int:
        """The number of shards on live servers."""
        return sum(member.shards for member in self.members if member.alive)

    @property
    def bytes(self) -> int:
        """The size of the values and slots on live servers, in bytes."""
        return sum(member.bytes for member in self.members if member.alive)

    def alive(self, role: Role) -> tuple[MemberStatus, ...]:
        """Returns the live members of one role."""
        return tuple(member for member in self.members if member.alive and member.role is role)

    @classmethod
    def from_proto(cls, message: coordinator_pb2.GetStatusReply) -> "ClusterStatus":
        """Returns the status that a message carries."""
        members = tuple(MemberStatus.from_proto(member) for member in message.members)
        return cls(message.cluster, message.generation, members, message.heartbeat_interval_s)


__all__ = ["ClusterStatus", "MemberStatus", "Role", "ServerLoad", "UndeliveredNorm"]
