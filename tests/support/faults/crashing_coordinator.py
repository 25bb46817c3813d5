"""Coordinator that crashes at a step of a checkpoint or a restore: crashing_coordinator.py DOOM FLAGS.

It runs `shoal coordinator FLAGS`, and wraps the calls that begin a step. If the file DOOM exists, the process kills
itself by SIGKILL instead of taking the step that the file names.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shoal
from shoal._checkpoint.catalogue import Catalogue
from shoal._cli import main as shoal_main
from shoal.events import Event
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.effect_host import MachineHost
from shoal_coordinator.effects.server_calls import ConcurrentCalls, ServerCalls

# Of a checkpoint: calls to servers (`Hold`, `Save`, `CollectFiles`), the manifest, and what is written down of both
# halves. Of the way back: calls (`CreateShards`, `Restore`), and what is written down of that.
SAVING = ("HoldCommits", "Save", "CutTaken", "CollectFiles", "manifest", "CheckpointCommitted")
RESTORING = ("CreateShards", "Restore", "ShardsCreated")
# Of what those who watch are told: that a checkpoint, which is written down by then, has ended.
TELLING = ("CheckpointEnded",)


class CrashingCoordinator:
    """The running process, which takes the place of a cluster's own coordinator.

    Args:
        cluster: the cluster whose coordinator is killed.
        doom: a file that does not exist yet.
    """

    def __init__(self, cluster: shoal.LocalCluster, doom: Path) -> None:
        self._doom = doom
        role = cluster.process("coordinator")
        flags = list(role.arguments)
        flags[flags.index("--listen") + 1] = role.address
        role.kill()
        command = [sys.executable, __file__, str(doom), *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout
        assert self.process.stdout.readline(), "it did not start"

    def doom(self, step: str) -> None:
        """Makes the process kill itself when it is about to begin this step."""
        written = self._doom.with_suffix(".tmp")
        written.write_text(step)
        written.rename(self._doom)

    def wait(self, timeout_s: float) -> None:
        """Waits until the process has killed itself."""
        assert self.process.wait(timeout_s) == -signal.SIGKILL


@contextmanager
def crashing(cluster: shoal.LocalCluster, doom: Path) -> Iterator[CrashingCoordinator]:
    """Runs a crashing coordinator. At the end of the block, the cluster starts its own coordinator again."""
    there = CrashingCoordinator(cluster, doom)
    try:
        yield there
    finally:
        there.process.kill()
        there.process.communicate()
        cluster.restart("coordinator")


def _wrap(owner: type, name: str, step_of: Callable[..., str], doom: Path) -> None:
    real = getattr(owner, name)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        _die_before(step_of(*arguments), doom)
        return real(self, *arguments, **options)

    setattr(owner, name, call)


def _wrap_watch(doom: Path) -> None:
    real = Coordinator.watch

    def watch(self: Coordinator, *arguments: Any, **options: Any) -> Iterator[Event]:
        for event in real(self, *arguments, **options):
            _die_before(type(event).__name__, doom)
            yield event

    Coordinator.watch = watch  # type: ignore[method-assign]


def _die_before(step: str, doom: Path) -> None:
    if doom.exists() and doom.read_text() == step:
        os.kill(os.getpid(), signal.SIGKILL)


def main(doom: Path) -> None:
    _wrap(ConcurrentCalls, "call", lambda method, *_: method, doom)
    _wrap(ServerCalls, "call_all", lambda _servers, method, *_: method, doom)
    _wrap(Catalogue, "publish", lambda *_: "manifest", doom)
    _wrap(MachineHost, "report", lambda outcome: type(outcome).__name__, doom)
    _wrap_watch(doom)
    shoal_main()


if __name__ == "__main__":
    named = Path(sys.argv.pop(1))
    main(named)
