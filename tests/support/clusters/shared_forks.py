"""Fork server that the local clusters of a test process share, so that the code of the roles is loaded once for all.

`tests/cluster/test_local_cluster.py` tests the fork servers that local clusters start themselves.
"""

from collections.abc import Mapping

from shoal._role import ForkServer

# pytest sets it to another value in each phase of a test.
_VOLATILE = "PYTEST_CURRENT_TEST"


class KeptForkServer(ForkServer):
    """A fork server that outlives the clusters that use it."""

    def close(self) -> None:
        """Keeps the process for the next cluster. `end` ends it."""

    def end(self) -> None:
        """Ends the process."""
        super().close()


class SharedForks:
    """Lends one fork server to all clusters whose roles have the environment of this process.

    Args:
        environment: the environment of this process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = _steady(environment)
        self._kept: KeptForkServer | None = None

    def lend(self, env: Mapping[str, str], *, show_log: bool) -> ForkServer:
        """Returns the shared fork server, or a new one if it would differ: the arguments are those of `ForkServer`."""
        if show_log or _steady(env) != self._environment:
            return ForkServer(env, show_log=show_log)
        if self._kept and not self._kept.running:  # a test has killed it
            self.end()
        if self._kept is None:
            self._kept = KeptForkServer(env, show_log=show_log)
        return self._kept

    def end(self) -> None:
        """Ends the shared fork server."""
        if self._kept:
            self._kept.end()
            self._kept = None


def _steady(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != _VOLATILE}
