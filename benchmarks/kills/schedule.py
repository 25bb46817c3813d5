"""Seeded schedule of kills: which process is killed when. It is the same for all systems."""

import random
from dataclasses import dataclass

SERVERS, WORKERS = 2, 4
EVERY_S = 15.0
SEED = 24


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        at_s: seconds from the begin of the measurement.
        role: "server" or "worker".
        index: number of the process among those of its role, from 0.
    """

    at_s: float
    role: str
    index: int

    @property
    def victim(self) -> str:
        """Name of the process."""
        return f"{self.role}-{self.index}"


def kills(
    seconds: float, every_s: float = EVERY_S, servers: int = SERVERS, workers: int = WORKERS, seed: int = SEED
) -> tuple[Kill, ...]:
    """Returns the kills of a run. Each process is the victim with the same probability.

    The first kill is after one interval. The last one is at least one interval before the end, so that its cost is
    measured, too. A longer run begins with the kills of a shorter one.

    Args:
        seconds: length of the run.
        every_s: interval between two kills.
        servers: number of servers.
        workers: number of workers.
        seed: seed of the victims.
    """
    processes = [("server", index) for index in range(servers)] + [("worker", index) for index in range(workers)]
    draw = random.Random(seed)
    count = max(0, int(seconds / every_s + 1e-9) - 1)
    return tuple(Kill(number * every_s, *draw.choice(processes)) for number in range(1, count + 1))
