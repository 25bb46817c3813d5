"""The tests' end of a process that a nursery has started: what it says, and how a test kills it."""

import os
import re
import select
import signal
import socket
from collections.abc import Callable, Collection
from pathlib import Path

# Seconds in which a process says its next line, and bytes of a line.
TIMEOUT_S = 20.0
LONGEST_LINE = 1 << 16


class KillableRole:
    """A process of a nursery.

    A process that nobody hears stops after some 280 lines, until they are read. So a test that waits for one of several
    processes that wait for each other reads from `heard_from` all of them.

    Args:
        pid: its process id.
        reports: the socket from which its lines come.
        reap: waits for its end, and returns its exit status.
        folder: the folder of its segments.

    Attributes:
        pid: its process id.
    """

    def __init__(self, pid: int, reports: socket.socket, reap: Callable[[], int], folder: Path) -> None:
        self.pid = pid
        self._reports, self._reap, self._folder = reports, reap, folder
        reports.settimeout(TIMEOUT_S)

    def fileno(self) -> int:
        """Returns the descriptor from which lines come, for `select`."""
        return self._reports.fileno()

    def hear(self) -> str:
        """Returns the next line of the process; empty if it has ended."""
        return self._reports.recv(LONGEST_LINE).decode()

    def hear_until(self, wanted: str) -> None:
        """Waits until the process writes this line."""
        while (said := self.hear()) != wanted:
            assert said, f"it ended before it said {wanted!r}"

    def kill(self) -> int:
        """Kills the process, as `kill -9` does, and waits for its end. Returns its exit status."""
        os.kill(self.pid, signal.SIGKILL)
        return self.end()

    def end(self) -> int:
        """Waits until the process has ended. Returns its exit status, which is negative for a signal."""
        while self.hear():
            pass
        return self._reap()

    def shares(self) -> int:
        """Returns the number of segments that the process has mapped, with or without a name."""
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        return len(re.findall(rf" {re.escape(str(self._folder))}/\S+", maps))


def heard_from(processes: Collection[KillableRole]) -> list[KillableRole]:
    """Waits until one of several processes has said something, or has ended.

    Returns:
        Those whose `hear` returns at once.
    """
    ready, _, _ = select.select(processes, [], [], TIMEOUT_S)
    assert ready, f"none of {len(processes)} processes has said anything for {TIMEOUT_S:.0f} s"
    return ready


__all__ = ["LONGEST_LINE", "TIMEOUT_S", "KillableRole", "heard_from"]
