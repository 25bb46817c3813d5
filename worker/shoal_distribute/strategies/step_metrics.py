"""Metrics of a step: what the replicas of a worker report, joined for one push."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal_distribute.collectives import Group


class StepMetrics:
    """The metrics that the replicas of one process have reported in this step."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[Mapping[str, float], int]] = {}  # by replica, which alone writes it in a step

    def clear(self) -> None:
        """Forgets what was reported."""
        self._given.clear()

    def add(self, replica: int, metrics: Mapping[str, float], samples: int) -> None:
        """Keeps what a replica reports.

        Args:
            replica: its number in this process.
            metrics: means over its samples, by name.
            samples: number of its samples.
        """
        self._given[replica] = dict(metrics), samples

    @property
    def samples(self) -> int | None:
        """The number of samples of the replicas of this process; None if nothing was reported."""
        return sum(samples for _, samples in self._given.values()) if self._given else None

    def told(self, group: Group | None) -> dict[str, Any]:
        """Returns the arguments of a push that show what was reported.

        Args:
            group: see `joined`.
        """
        return {"metrics": self.joined(group), "samples": self.samples}

    def joined(self, group: Group | None) -> dict[str, float]:
        """Returns the means over the samples of all replicas, by name; {} if there are none.

        Args:
            group: the hybrid group of this process. All its processes call this at the same time, if they have reported
                metrics.
        """
        if not self._given:
            return {}
        names = sorted(next(iter(self._given.values()))[0])
        rows = [[samples, *(samples * metrics[name] for name in names)] for metrics, samples in self._given.values()]
        sums = np.array(rows, np.float64).sum(axis=0)
        if group:
            group.all_reduce(sums, layout=names)
        return dict(zip(names, (sums[1:] / sums[0]).tolist(), strict=True)) if sums[0] else {}


__all__ = ["StepMetrics"]
