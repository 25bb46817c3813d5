"""Wall clocks of roles, which a test sets apart from the machine's clock; see `clocks/sitecustomize.py`."""

import os
import struct
from collections.abc import Iterable
from pathlib import Path

_SITE = Path(__file__).parent / "clocks"


class WallClocks:
    """The wall clocks of the roles of a cluster.

    Args:
        folder: an empty folder.
        roles: names of the roles, such as "server-0".

    Attributes:
        environment: the environment variables of the cluster.
        flags: flags of the cluster's roles.
    """

    def __init__(self, folder: Path, roles: Iterable[str]) -> None:
        self._folder, self._roles = folder, list(roles)
        known = [path for path in [os.environ.get("PYTHONPATH", "")] if path]
        self.environment = {
            "PYTHONPATH": os.pathsep.join([str(_SITE), *known]),
            "SHOAL_TEST_CLOCKS": str(folder),
        }
        self.flags = {"worker": ["--trainer-env", "SHOAL_TEST_CLOCKS"]}
        self.reset()

    def set(self, role: str, ahead_s: float) -> None:
        """Steps the clock of a role and of its child processes, so that it is `ahead_s` seconds ahead."""
        assert role in self._roles
        with open(self._folder / role, "r+b" if (self._folder / role).exists() else "wb") as file:
            file.write(struct.pack("d", ahead_s))

    def reset(self) -> None:
        """Sets all clocks to the machine's time."""
        for role in self._roles:
            self.set(role, 0.0)


__all__ = ["WallClocks"]
