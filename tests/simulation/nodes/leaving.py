"""The end of a simulated server that drains: what `shoal_server.draining` and `ParameterServer.stop` do."""

from typing import TYPE_CHECKING

from shoal import errors
from shoal._rpc import Backoff
from shoal_coordinator.messages import events
from simulation.plan import COORDINATOR

if TYPE_CHECKING:
    from simulation.nodes.server import ServerNode

# Seconds between two questions whether the server may stop, for the first answer, and of the usual grace period.
_POLL_S, _FIRST_ANSWER_S, GRACE_S = 0.2, 10.0, 60.0


async def leave(node: "ServerNode", incarnation: int, grace_s: float) -> None:
    """Serves until the coordinator lets the server go, or until its grace period is over. Then leaves the cluster.

    Args:
        node: the server.
        incarnation: its incarnation.
        grace_s: seconds of the grace period.
    """
    if await _wait_until_drained(node, incarnation, grace_s):
        node.world.check_drained(node.name)
    await node.leave_cluster()


async def _wait_until_drained(node: "ServerNode", incarnation: int, grace_s: float) -> bool:
    """Returns whether the coordinator says that no job needs the server."""
    began, limit_s = node.clock.monotonic(), min(grace_s, _FIRST_ANSWER_S)
    backoff = Backoff(node.scheduler.random.random)
    while True:
        left_s = began + grace_s - node.clock.monotonic()
        try:
            jobs = await node.call(COORDINATOR, events.DrainRequested(node.name, incarnation, max(0.0, left_s)))
        except (errors.Unreachable, errors.DeadlineExceeded):
            next_s = backoff.next()
        except errors.ShoalError:  # this incarnation is fenced
            return False
        else:
            if not jobs:
                return True
            limit_s, next_s = grace_s, _POLL_S
            backoff.reset()
        left_s = began + limit_s - node.clock.monotonic()
        if left_s <= 0:
            return False
        await node.sleep(min(next_s, left_s))


__all__ = ["GRACE_S", "leave"]
