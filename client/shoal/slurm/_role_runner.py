"""The role of a task as a child process, which is started again if it dies. Each call returns soon."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from shoal import errors
from shoal._engines import RoleChild
from shoal._role.supervision import RestartPolicy
from shoal._system.logs import Log

_log = Log(__name__)

# Seconds that a role has to stop before it is killed.
STOP_S = 10.0


class RoleRunner:
    """Runs a role. As a context manager, it stops the role at the end of the block.

    Args:
        role: coordinator, server or worker.
        name: name of the role, such as "server-0".
        flags: returns the options of its command. It gets the address of the earlier process, "" at first.
        environment: the environment variables of the role.
        start_timeout_s: how long a start may take, in seconds.
        clock: returns seconds.

    Attributes:
        address: host:port that the role serves at. Empty until it is ready, and for a worker.
        page: URL of a coordinator's page.
        left: whether the role has ended because it was asked to.
    """

    def __init__(
        self,
        role: str,
        name: str,
        flags: Callable[[str], Sequence[str]],
        environment: Mapping[str, str],
        *,
        start_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._role, self._name, self._flags, self._environment = role, name, flags, environment
        self._start_timeout_s, self._clock = start_timeout_s, clock
        self.address = self.page = ""
        self.left = self._asked = False
        self._policy = RestartPolicy(clock())
        self._child = self._launch()

    def poll(self) -> None:
        """Notices whether the role has become ready or has died, and starts it again when it is due.

        Raises:
            StartFailed: the role died too often, or was not ready in time.
        """
        now = self._clock()
        if self.left:
            return
        if self._policy.death is not None:
            if self._policy.due(now):
                self._policy.restarted(now)
                self._child = self._launch()
        elif (status := self._child.wait(0)) is not None:
            self._died(status, now)
        elif said := self._child.ready:
            self.address, self.page = said["address"], said.get("page", "")
        elif now - self._started > self._start_timeout_s:
            raise errors.StartFailed(f"{self._name} was not ready after {self._start_timeout_s:g} s; see its log above")

    @property
    def dead(self) -> bool:
        """Whether it has died, and is not started again yet."""
        return self._policy.death is not None

    def drain(self) -> None:
        """Asks the role, once, to leave as SIGTERM does: a server saves or moves its shards first."""
        if not self._asked:
            self._asked = True
            self.left = self.dead  # there is nothing to save
            self._child.ask_to_leave()

    def __enter__(self) -> "RoleRunner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.stop(STOP_S)

    def _launch(self) -> RoleChild:
        self._started = self._clock()
        return RoleChild([self._role, *self._flags(self.address), "--supervised"], self._environment)

    def _died(self, status: int, now: float) -> None:
        if status == 0 or self._asked:
            self.left = True
            return
        death = self._policy.died(status, now)
        if death.restart_at is None:
            raise errors.StartFailed(
                f"{self._name} ended with exit status {status}, {death.deaths} times in a row, and is not started "
                "again; its log above says why"
            )
        _log.warning(f"{self._name} ended and is started again", status=status, in_s=round(death.restart_at - now, 1))


__all__ = ["STOP_S", "RoleRunner"]
