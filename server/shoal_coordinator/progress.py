"""How far a job has come: the sum of what its workers report. Pure: no clock, no I/O."""

from collections import Counter

from shoal.status import Progress
from shoal_coordinator.events import WorkerReported


class Tally:
    """The figures of one job, over all of its workers and their lives."""

    def __init__(self) -> None:
        self._steps = self._samples = self._rejected = self._dropped = 0
        self._loss = 0.0
        self._staleness: Counter[int] = Counter()  # accepted pushes by their staleness

    def add(self, report: WorkerReported) -> None:
        """Counts a report in."""
        self._steps += report.accepted
        self._samples += report.samples
        self._rejected += report.rejected
        self._dropped += report.dropped
        self._loss = report.values.get("loss", self._loss)
        self._staleness.update(report.staleness)

    def progress(self, *, total_samples: int, epoch: int, seconds: float) -> Progress:
        """The figures now, `seconds` after the job began to run."""
        return Progress(
            steps=self._steps,
            samples=self._samples,
            total_samples=total_samples,
            epoch=epoch,
            samples_per_s=self._samples / seconds if seconds > 0 else 0.0,
            loss=self._loss,
            staleness_p50=float(_median(self._staleness)),
            staleness_max=max(+self._staleness, default=0),
            rejected=self._rejected,
            dropped=self._dropped,
        )


def _median(counts: Counter[int]) -> int:
    """The smallest value that at least half of what was counted does not exceed; 0 of nothing."""
    half, seen = counts.total() / 2, 0
    for value in sorted(+counts):
        seen += counts[value]
        if seen >= half:
            return value
    return 0
