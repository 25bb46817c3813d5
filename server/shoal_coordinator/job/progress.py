"""Progress totals of one job: the sums of its workers' reports. Pure: no clock, no I/O."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.status import Progress
from shoal.v1 import state_pb2
from shoal_coordinator.messages import WorkerReported

# The largest count that the record can hold.
_MAX_COUNT = 2**64 - 1


@dataclass(slots=True)
class _Sums:
    """Sums of reports. Counts saturate in the record."""

    accepted: int = 0
    samples: int = 0
    rejected: int = 0
    dropped: int = 0
    staleness: Counter[int] = field(default_factory=Counter)  # accepted pushes, by staleness in versions

    def add(self, report: WorkerReported) -> None:
        self.accepted += report.accepted
        self.samples += report.samples
        self.rejected += report.rejected
        self.dropped += report.dropped
        self.staleness.update(report.staleness)

    @classmethod
    def from_proto(cls, totals: state_pb2.Totals) -> "_Sums":
        staleness = Counter(dict(totals.staleness))
        return cls(totals.accepted, totals.samples, totals.rejected, totals.dropped, staleness)


class ProgressTotals:
    """The totals of one job, over all of its workers and their incarnations.

    The record of a job has the totals of the workers that are gone, so the loss of one of a thousand workers writes
    little. The totals of all are the sum of these and of the reports of the live workers, which have their own record.

    Args:
        lost_steps: accepted pushes that were lost with shards, and are not in the totals.
    """

    def __init__(self, lost_steps: int = 0) -> None:
        self._lost_steps = lost_steps
        self._all = _Sums()
        self._gone = _Sums()  # without the reports of live workers
        self._earlier = self._earlier_steps = 0  # samples and steps of an earlier job
        self._loss = 0.0

    def begin(self) -> None:
        """Marks the samples and steps so far as those of another job, from which this one continues."""
        self._earlier, self._earlier_steps = self._all.samples, self._all.accepted

    @property
    def made_steps(self) -> int:
        """Accepted pushes, with those that were lost."""
        return self._all.accepted + self._lost_steps

    def add(self, report: WorkerReported) -> None:
        """Adds what a live worker did since its last report."""
        self._all.add(report)
        self._loss = report.values.get("loss", self._loss)

    def keep(self, report: WorkerReported) -> None:
        """Keeps the last report of a worker that is gone; `add` has added all of it."""
        self._gone.add(report)

    def restore_live(self, report: WorkerReported) -> None:
        """Adds the last report of a live worker, from the records of an earlier coordinator."""
        self._all.add(report)

    @property
    def staleness(self) -> dict[int, int]:
        """Accepted pushes, by staleness in versions."""
        return dict(sorted((+self._all.staleness).items()))

    def to_proto(self) -> state_pb2.ProgressRecord:
        """Returns the totals of all workers, as checkpoints store them."""
        return self._to_proto(self._all)

    def to_record(self) -> state_pb2.ProgressRecord:
        """Returns the record of the job: the totals of the workers that are gone."""
        return self._to_proto(self._gone)

    def _to_proto(self, sums: _Sums) -> state_pb2.ProgressRecord:
        return state_pb2.ProgressRecord(
            totals=_totals(sums),
            loss=self._loss,
            earlier_samples=self._earlier,
            earlier_steps=self._earlier_steps,
            lost_steps=min(self._lost_steps, _MAX_COUNT),
        )

    @classmethod
    def from_proto(cls, record: state_pb2.ProgressRecord, *, lost_steps: int = 0) -> "ProgressTotals":
        """Returns the totals in a record.

        Args:
            record: the record of a job, or of a checkpoint, which does not have the lost steps.
            lost_steps: see the class.
        """
        progress = cls(lost_steps)
        gone = _totals_of_gone(record)
        progress._all, progress._gone = _Sums.from_proto(gone), _Sums.from_proto(gone)
        progress._loss, progress._earlier = record.loss, record.earlier_samples
        progress._earlier_steps = record.earlier_steps
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
        sums = self._all
        staleness = sorted((value, count) for value, count in sums.staleness.items() if count > 0)
        return Progress(
            steps=sums.accepted,
            samples=sums.samples,
            total_samples=total_samples,
            epoch=epoch,
            samples_per_s=(sums.samples - self._earlier) / seconds if seconds > 0 else 0.0,
            loss=self._loss,
            staleness_p50=float(_median(staleness)),
            staleness_max=staleness[-1][0] if staleness else 0,
            rejected=sums.rejected,
            dropped=sums.dropped,
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


def _totals_of_gone(record: state_pb2.ProgressRecord) -> state_pb2.Totals:
    """Returns the totals without the live workers, which a record of schema 3 or earlier includes."""
    totals = state_pb2.Totals()
    totals.CopyFrom(record.totals)
    for told in record.told.values():
        for name in ("accepted", "samples", "rejected", "dropped"):
            setattr(totals, name, max(0, getattr(totals, name) - getattr(told, name)))
        for staleness, count in told.staleness.items():
            totals.staleness[staleness] = max(0, totals.staleness[staleness] - count)
    return totals


def reports_later(reports: Mapping[int, WorkerReported]) -> Callable[[], state_pb2.ReportsRecord | None]:
    """Returns a function that makes the record of the last reports of live workers, by assignment, on any thread.

    That of a thousand workers takes 15 ms. Nobody changes a report, so the function needs only a copy of the mapping.
    """
    kept = dict(reports)
    return lambda: state_pb2.ReportsRecord(reports={it: _totals(kept[it]) for it in kept}) if kept else None


def _totals(report: WorkerReported | _Sums) -> state_pb2.Totals:
    return state_pb2.Totals(
        accepted=min(report.accepted, _MAX_COUNT),
        rejected=min(report.rejected, _MAX_COUNT),
        dropped=min(report.dropped, _MAX_COUNT),
        samples=min(report.samples, _MAX_COUNT),
        staleness={staleness: min(count, _MAX_COUNT) for staleness, count in report.staleness.items()},
    )
