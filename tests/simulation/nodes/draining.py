"""The end of a simulated server that drains: what `shoal_server.draining` and `ParameterServer.stop` do."""

from typing import TYPE_CHECKING

from shoal import errors
from shoal._rpc import Backoff
from shoal_coordinator.messages import events
from simulation.plan import COORDINATOR
from simulation.scheduler import Life

if TYPE_CHECKING:
    from simulation.nodes.server import ServerNode

# Seconds between two questions whether the server may stop, for the first answer, and of the usual grace period.
_POLL_S, _FIRST_ANSWER_S, GRACE_S = 0.2, 10.0, 60.0


class Draining:
    """The end of the processes of one server.

    Args:
        node: the server.

    Attributes:
        begun: whether the process drains and will end.
        gone: whether the last process has ended for good, because a user has ordered the server to drain.
    """

    def __init__(self, node: "ServerNode") -> None:
        self._node = node
        self.begun = self.gone = False

    def new_process(self) -> None:
        """Forgets that the last process was about to end."""
        self.begun = False

    def begin(self, grace_s: float, away_s: float | None) -> None:
        """Lets the server drain and end, as SIGTERM does.

        Args:
            grace_s: seconds of its grace period.
            away_s: seconds from its end to the next process; None if there is none.
        """
        node = self._node
        if node.life and not self.begun:
            self.begun = True
            node.scheduler.spawn(node.life, self._leave(node.process, grace_s, away_s))

    async def _leave(self, life: Life, grace_s: float, away_s: float | None) -> None:
        """Serves until the coordinator lets the server go, or its grace period is over. Then leaves the cluster."""
        node = self._node
        if await _wait_until_drained(node, node.incarnation, grace_s):
            node.world.check_drained(node.name)
        await node.leave_cluster()

        def end() -> None:
            if node.life is life:
                node.crash()
                self.gone = away_s is None
                if away_s is not None:
                    node.scheduler.after(away_s, node.start)

        node.scheduler.after(0.0, end)


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


__all__ = ["GRACE_S", "Draining"]
