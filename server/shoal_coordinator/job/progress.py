"""Progress totals of one job: the sums of its workers' reports. Pure: no clock, no I/O."""

from collections import Counter
from collections.abc import Mapping, Sequence

from shoal.status import Progress
from shoal.v1 import state_pb2
from shoal_coordinator.messages import WorkerReported

# The largest count that the record can hold.
_MAX_COUNT = 2**64 - 1


class ProgressTotals:
    """The totals of one job, over all of its workers and their incarnations.

    Args:
        lost_steps: accepted pushes that were lost with shards, and are not in the totals.
    """

    def __init__(self, lost_steps: int = 0) -> None:
        self._lost_steps = lost_steps
        self._steps = self._samples = self._rejected = self._dropped = 0
        self._earlier = self._earlier_steps = 0  # samples and steps of an earlier job
        self._loss = 0.0
        self._staleness: Counter[int] = Counter()  # accepted pushes, by staleness in versions

    def begin(self) -> None:
        """Marks the samples and steps so far as those of another job, from which this one continues."""
        self._earlier, self._earlier_steps = self._samples, self._steps

    @property
    def made_steps(self) -> int:
        """Accepted pushes, with those that were lost."""
        return self._steps + self._lost_steps

    def add(self, report: WorkerReported) -> None:
        """Adds a report."""
        self._steps += report.accepted
        self._samples += report.samples
        self._rejected += report.rejected
        self._dropped += report.dropped
        self._loss = report.values.get("loss", self._loss)
        self._staleness.update(report.staleness)

    @property
    def staleness(self) -> dict[int, int]:
        """Accepted pushes, by staleness in versions."""
        return dict(sorted((+self._staleness).items()))

    def to_proto(self, reports: Mapping[int, WorkerReported]) -> state_pb2.ProgressRecord:
        """Returns the record of these totals.

        Args:
            reports: by assignment, the last report of each live worker; the totals include them.
        """
        sums = WorkerReported(
            job="",
            worker="",
            incarnation=0,
            accepted=self._steps,
            rejected=self._rejected,
            dropped=self._dropped,
            samples=self._samples,
            staleness=self._staleness,
        )
        return state_pb2.ProgressRecord(
            totals=_totals(sums),
            loss=self._loss,
            earlier_samples=self._earlier,
            earlier_steps=self._earlier_steps,
            lost_steps=min(self._lost_steps, _MAX_COUNT),
            told={assignment: _totals(report) for assignment, report in reports.items()},
        )

    @classmethod
    def from_proto(cls, record: state_pb2.ProgressRecord, *, lost_steps: int = 0) -> "ProgressTotals":
        """Returns the totals in a record.

        Args:
            record: the record of a job, or of a checkpoint, which does not have the lost steps.
            lost_steps: see the class.
        """
        progress, totals = cls(lost_steps), record.totals
        progress._steps, progress._samples = totals.accepted, totals.samples
        progress._rejected, progress._dropped = totals.rejected, totals.dropped
        progress._loss, progress._earlier = record.loss, record.earlier_samples
        progress._earlier_steps = record.earlier_steps
        progress._staleness = Counter(dict(totals.staleness))
        return progress

    def progress(self, *, total_samples: int, epoch: int, seconds: float, ended: bool = False) -> Progress:
        """Returns the progress of the job.

        Args:
            total_samples: samples until the job's end; 0 if unknown.
            epoch: the current epoch.
            seconds: seconds in which the job ran and had workers.
            ended: whether the job has ended.

        Returns:
            The progress.
        """
        staleness = sorted((value, count) for value, count in self._staleness.items() if count > 0)
        return Progress(
            steps=self._steps,
            samples=self._samples,
            total_samples=total_samples,
            epoch=epoch,
            samples_per_s=(self._samples - self._earlier) / seconds if seconds > 0 else 0.0,
            loss=self._loss,
            staleness_p50=float(_median(staleness)),
            staleness_max=staleness[-1][0] if staleness else 0,
            rejected=self._rejected,
            dropped=self._dropped,
            earlier_steps=self._earlier_steps,
            lost_steps=self._lost_steps,
            ended=ended,
        )


def _median(counts: Sequence[tuple[int, int]]) -> int:
    """Returns the smallest value that at least half of the counts do not exceed; 0 if there are none.

    Args:
        counts: values in ascending order, each with its count.
    """
    half, seen = sum(count for _, count in counts) / 2, 0
    for value, count in counts:
        seen += count
        if seen >= half:
            return value
    return 0


def report_from_proto(totals: state_pb2.Totals) -> WorkerReported:
    """Returns a worker's last report, with its counts alone."""
    return WorkerReported(
        job="",
        worker="",
        incarnation=0,
        accepted=totals.accepted,
        rejected=totals.rejected,
        dropped=totals.dropped,
        samples=totals.samples,
        staleness=dict(totals.staleness),
    )


def _totals(report: WorkerReported) -> state_pb2.Totals:
    return state_pb2.Totals(
        accepted=min(report.accepted, _MAX_COUNT),
        rejected=min(report.rejected, _MAX_COUNT),
        dropped=min(report.dropped, _MAX_COUNT),
        samples=min(report.samples, _MAX_COUNT),
        staleness={staleness: min(count, _MAX_COUNT) for staleness, count in report.staleness.items()},
    )
