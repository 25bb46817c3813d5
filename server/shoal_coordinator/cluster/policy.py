"""What the operator of a cluster decides."""

from dataclasses import dataclass, field

from shoal_coordinator.cluster.placement import EvenPlacement, PlacementPolicy


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    """What an operator decides.

    Attributes:
        heartbeat_timeout_s: seconds of silence after which a member is dead.
        keep_finished: ended jobs whose variables stay readable; older ones are forgotten.
        checkpoints: whether there is a folder of them.
        server_return_s: how long jobs wait for a server that said that it was going, and went.
        placement: which server holds which shard.
    """

    heartbeat_timeout_s: float = 5.0
    keep_finished: int = 8
    checkpoints: bool = False
    server_return_s: float = 60.0
    placement: PlacementPolicy = field(default_factory=EvenPlacement)
