"""The role of a task as a child process, which is started again if it dies. Each call returns soon."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType

from shoal import errors
from shoal._role import ForkServer, RoleProcess
from shoal._role.supervision import RestartPolicy
from shoal._system.logs import Log

_log = Log(__name__)

# Longest wait in one look, and time that a role has to stop before it is killed, in seconds.
_LOOK_S, _STOP_S = 0.1, 10.0


class RoleRunner:
    """Runs a role. As a context manager, it stops the role at the end of the block.

    Args:
        role: coordinator, server or worker.
        index: number of the role among its kind.
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
        index: int,
        flags: Callable[[str], Sequence[str]],
        environment: Mapping[str, str],
        *,
        start_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._role, self._index, self._flags = role, index, flags
        self._start_timeout_s, self._clock = start_timeout_s, clock
        self.address = self.page = ""
        self.left = self._asked = self._ready = False
        self._forks = ForkServer(environment, show_log=True)
        self._policy = RestartPolicy(clock())
        self._process = self._launch()

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
                self._process = self._launch()
        elif (status := self._process.returncode) is not None:
            self._died(status, now)
        elif not self._ready:
            with suppress(errors.StartFailed):  # it is not ready yet, or has ended, which the next call notices
                self._process.wait_ready(_LOOK_S)
                self._ready = True
                self.address, self.page = self._process.address, self._process.page
                return
            if now - self._started > self._start_timeout_s:
                raise errors.StartFailed(
                    f"{self._process.name} was not ready after {self._start_timeout_s:g} s; see its log above"
                )

    def drain(self) -> None:
        """Asks the role, once, to leave as SIGTERM does: a server saves or moves its shards first."""
        if not self._asked:
            self._asked = True
            self._process.send_signal(signal.SIGTERM)

    def __enter__(self) -> "RoleRunner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._process.pid:
            self._forks.kill()  # it would go on loading, to start a role that nobody wants any more
        self._process.ask_to_stop()
        self._process.reap(_STOP_S)
        self._forks.close()

    def _launch(self) -> RoleProcess:
        self._started, self._ready = self._clock(), False
        flags = self._flags(self.address)
        return RoleProcess(self._role, self._index, flags, fork_server=self._forks, show_log=True)

    def _died(self, status: int, now: float) -> None:
        self._process.reap(_STOP_S)
        name = self._process.name
        if status == 0 or self._asked:
            self.left = True
            return
        death = self._policy.died(status, now)
        if death.restart_at is None:
            raise errors.StartFailed(
                f"{name} ended with exit status {status}, {death.deaths} times in a row, and is not started again; its "
                "log above says why"
            )
        _log.warning(f"{name} ended and is started again", status=status, in_s=round(death.restart_at - now, 1))


__all__ = ["RoleRunner"]
