"""Interface of a system in the benchmark of kills: its processes, its victims, and a check at the end of a run."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from schedule import Kill
from supervisor import Supervisor

HERE = Path(__file__).parent


class System(Protocol):
    """One system, with settings.

    Attributes:
        name: its name in the results and in the chart.
    """

    name: str

    def start(self, supervisor: Supervisor, folder: Path) -> None:
        """Starts all processes, which write their logs of updates into the folder."""

    def victim(self, kill: Kill) -> str:
        """Returns the name of the process that a kill hits."""
        return kill.victim

    def end(self, supervisor: Supervisor, folder: Path, kills: Mapping[str, int]) -> dict[str, Any] | None:
        """Checks the run, and returns what was checked. The supervisor ends the processes after that.

        Args:
            supervisor: the supervisor of the processes.
            folder: folder with the logs of updates.
            kills: number of kills of each process.
        """
        return None


def free_port() -> int:
    """Returns a port on loopback that nothing uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port
