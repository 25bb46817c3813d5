"""Settings of a cluster, decided by its operator."""

from dataclasses import dataclass, field

from shoal._limits import catalogue
from shoal._system import memory_limit
from shoal_coordinator.cluster.job_limits import JobLimits
from shoal_coordinator.cluster.shards import SMALLEST_MOVE_BYTES, EvenPlacement, PlacementPolicy

_EVENTS_PART = 8  # part of the memory that all event logs may take: see EVENT_BYTES


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    """Settings of a cluster.

    Attributes:
        heartbeat_timeout_s: seconds without a heartbeat after which a member is lost.
        keep_finished: number of newest ended jobs that are kept with their variables. The same number of ended jobs
            without variables is kept. Older jobs are forgotten.
        checkpoints: whether the cluster has checkpoint storage.
        server_return_s: seconds that jobs wait for a drained server to return.
        placement: the policy that assigns shards to servers.
        heartbeat_interval_s: seconds from one heartbeat to the next in a small cluster.
        jobs: the limits of jobs.
        holder_members: limit of the live members whose tokens or certificates have the same name.
        event_bytes: limit EVENT_BYTES of the events of all jobs.
        smallest_move_bytes: bytes of a job's values that are not worth a move to another server.
    """

    heartbeat_timeout_s: float = 5.0
    keep_finished: int = 8
    checkpoints: bool = False
    server_return_s: float = 60.0
    placement: PlacementPolicy = field(default_factory=EvenPlacement)
    heartbeat_interval_s: float = 0.5
    jobs: JobLimits = field(default_factory=JobLimits)
    holder_members: int = catalogue.HOLDER_MEMBERS.default
    event_bytes: int = field(default_factory=lambda: memory_limit() // _EVENTS_PART)
    smallest_move_bytes: int = SMALLEST_MOVE_BYTES
