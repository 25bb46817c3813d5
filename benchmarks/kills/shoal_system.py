"""Shoal in the benchmark of kills: a coordinator, servers, and workers with sessions, each started by its command."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import update_log
from schedule import SERVERS, WORKERS
from session_worker import JOB
from supervisor import Supervisor
from system import HERE, System, free_port

import shoal

# For the pushes of killed workers: the heartbeat timeout, and some more.
_SETTLED_S = 20.0


@dataclass
class ShoalSystem(System):
    """Shoal with default settings.

    Attributes:
        name: its name in the results.
        replicas: number of copies of each shard.
        mode: "async" or "sync".
    """

    name: str
    replicas: int
    mode: str = "async"
    address: str = ""

    def start(self, supervisor: Supervisor, folder: Path) -> None:
        """Starts the coordinator, the servers and the workers."""
        self.address = f"127.0.0.1:{free_port()}"
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir()
        role = [sys.executable, "-m", "shoal"]
        stored = ["--checkpoints", str(checkpoints)]
        store = ["--listen", self.address, "--page-listen", "", "--store", str(folder / "coordinator.db")]
        supervisor.start("coordinator", [*role, "coordinator", *store, *stored])
        for index in range(SERVERS):
            name = f"server-{index}"
            supervisor.start(name, [*role, "server", "-c", self.address, "--name", name, *stored])
        for index in range(WORKERS):
            name = f"worker-{index}"
            worker = [sys.executable, str(HERE / "session_worker.py"), self.address, name, str(self.replicas)]
            supervisor.start(name, [*worker, self.mode, str(folder / f"{name}.updates")])

    def end(self, supervisor: Supervisor, folder: Path, kills: Mapping[str, int]) -> dict[str, Any]:
        """Kills the workers, and compares the values with the acknowledged updates.

        Raises:
            ValueError: an acknowledged update is missing in a job that never went back, or one counts twice.
        """
        with shoal.Client(self.address, retry_for_s=60) as client:
            status = client.job(JOB).status()
            for index in range(WORKERS):
                supervisor.end(f"worker-{index}")
            updates = _updates(client)
        if self.mode == "async" and self.replicas > 1 and not status.restarts:  # else the job goes back
            acknowledged, unanswered = sum(map(len, update_log.read(folder))), sum(kills.values()) + WORKERS
            if not acknowledged <= updates <= acknowledged + unanswered:
                raise ValueError(f"{acknowledged} updates were acknowledged, and the values have {updates}")
        return {"updates_in_values": updates, "failovers": status.failovers, "restarts": status.restarts}


def _updates(client: shoal.Client) -> int:
    """Returns the number of updates in the values, which all elements have.

    The servers take a moment to complete or discard the pushes of workers that were killed.

    Raises:
        ValueError: the elements have different numbers of updates.
    """
    deadline = time.monotonic() + _SETTLED_S
    while True:
        values = client.pull(JOB)
        counts = {int(count) for value in values.values() for count in (value.min(), value.max())}
        if len(counts) == 1:
            return counts.pop()
        if time.monotonic() > deadline:
            raise ValueError(f"the values have between {min(counts)} and {max(counts)} updates")
        time.sleep(0.5)
