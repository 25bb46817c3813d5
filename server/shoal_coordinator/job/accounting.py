"""Accounting of one job: its data, in the ledger, and the metrics that workers report. Pure: no clock, no I/O."""

from collections.abc import Callable, Iterable, Mapping

from shoal import errors
from shoal._wire import Cursor, PushCounts
from shoal.job import Job
from shoal.status import DataAccount, Progress, Timings
from shoal.v1 import state_pb2
from shoal_coordinator.job.ledger import Ledger
from shoal_coordinator.job.progress import ProgressTotals
from shoal_coordinator.job.step_timings import StepTimings
from shoal_coordinator.messages import HoldResult, JobRecordKind, JobSnapshot, WorkerReported


class Accounting:
    """The accounts of one job. After a loss of shards they start from zero, or from a checkpoint.

    Args:
        spec: the job, as its user submitted it.
        changed: called with the name of a record that has changed.

    Attributes:
        ledger: the job's data; None until the job is described.
        progress_totals: sums of what the workers have reported.
        steps: timings of the latest steps.
    """

    def __init__(self, spec: Job, changed: Callable[[str], None]) -> None:
        self._spec, self._changed = spec, changed
        self.ledger: Ledger | None = None
        self.progress_totals = ProgressTotals()
        self.steps = StepTimings()

    @property
    def finished(self) -> bool:
        """Whether all data is done; always False without data."""
        return self.ledger is not None and self.ledger.finished

    @property
    def untrained(self) -> str:
        """How much of the data was not trained on, in words; empty if nothing is left."""
        if self.ledger is None or self.ledger.finished or not self.ledger.samples:
            return ""
        left = self.ledger.samples - self.ledger.account().total.done
        return f"{left:,} of {self.ledger.samples:,} samples were not trained on"

    def account(self) -> DataAccount:
        """Returns the state of the data; empty until the job is described."""
        return self.ledger.account() if self.ledger else DataAccount()

    def timings(self) -> Timings:
        """Returns the timings of the latest steps, and the staleness of accepted pushes."""
        steps = self.steps
        return Timings(steps.kept, self.progress_totals.staleness, steps.last_reported_at, steps.groups)

    def progress(self, seconds: float, *, ended: bool) -> Progress:
        """Returns the progress.

        Args:
            seconds: seconds in which the job ran and had workers; 0 if it has not run.
            ended: whether the job has ended.
        """
        epoch = self.ledger.epoch if self.ledger else 0
        totals, total_samples = self.progress_totals, self._total_samples
        return totals.progress(total_samples=total_samples, epoch=epoch, seconds=seconds, ended=ended)

    @property
    def _total_samples(self) -> int:
        """Samples until the job's end; 0 if unknown. With `max_steps`, the samples of as many full batches."""
        spec, of_data = self._spec, self.ledger.samples if self.ledger else 0
        by_steps = spec.max_steps * spec.workers * spec.batch_size
        return min(of_data, by_steps) if by_steps else of_data

    def held(self, ranks: Mapping[str, int], reported: Mapping[str, PushCounts]) -> HoldResult:
        """Returns the coordinator's part of a cut.

        Args:
            ranks: ranks of the live workers.
            reported: the pushes that these workers have reported; the totals include them.
        """
        data = self.ledger.to_proto() if self.ledger and self.ledger.samples_per_epoch else None
        has_samples = data is not None or self._spec.is_session
        totals = self.progress_totals.to_proto()
        totals.ClearField("lost_steps")  # of this job alone, and earlier versions of Shoal do not read it
        return HoldResult(data, ranks, totals, reported, has_samples=has_samples)

    def begin(self, samples: int) -> None:
        """Creates the ledger of a job that was described; `samples` counts one epoch."""
        self._use(Ledger.of(self._spec, samples, self._changed))

    def use_samples(self, samples: int) -> None:
        """Creates the ledger of a session job, at the first lease of a session.

        Args:
            samples: samples in one epoch, by the session that asks.

        Raises:
            InvalidJob: the ledger has another number of samples.
        """
        known = self.ledger.samples_per_epoch if self.ledger else 0
        if known and samples != known:
            raise errors.InvalidJob(
                f"job {self._spec.name} has {known} samples in an epoch, not {samples}: all its sessions, and the "
                "checkpoint that it began with, need the same number; pass that number, or use another job name",
                job=self._spec.name,
            )
        if not known and samples:
            self.begin(samples)

    def restart(self) -> None:
        """Resets all accounts to zero. All steps so far count as lost, until those of a checkpoint are back."""
        self.progress_totals, self.steps = ProgressTotals(self.progress_totals.made_steps), StepTimings()
        self._changed(JobRecordKind.PROGRESS)
        if self.ledger:
            self.begin(self.ledger.samples_per_epoch)

    def resume_data(self, ledger: Ledger) -> None:
        """Continues with the data of a checkpoint."""
        self._use(ledger)

    def resume_progress(self, progress: state_pb2.ProgressRecord, *, of_another: bool) -> None:
        """Continues with the progress totals of a checkpoint.

        Args:
            progress: the totals in the checkpoint.
            of_another: whether another job made them. They then do not count for this job's speed.
        """
        made = self.progress_totals.made_steps
        self.progress_totals = ProgressTotals.from_proto(progress, lost_steps=max(0, made - progress.totals.accepted))
        if of_another:
            self.progress_totals.begin()
        self._changed(JobRecordKind.PROGRESS)

    def count(self, fresh: WorkerReported, now: float) -> None:
        """Adds what a worker did since its last report."""
        self.progress_totals.add(fresh)
        self.steps.add(fresh.worker, fresh.timings, now, fresh.ranks)

    def release(
        self,
        worker: str,
        last_report: WorkerReported | None,
        cursor: Cursor | None,
        preferred_rank: int | None = None,
    ) -> None:
        """Takes back the range of a worker that is gone, except the samples that its cursor reports as done.

        Args:
            worker: id of the worker.
            last_report: its last report, or None.
            cursor: its position in its data, if known.
            preferred_rank: the rank for which the rest is reserved; None means any rank.
        """
        if last_report:
            self.progress_totals.keep(last_report)
        self._changed(JobRecordKind.PROGRESS)
        if self.ledger:
            held = self.ledger.held_by(worker)
            known = cursor is not None and held is not None and cursor.lease == held.number
            self.ledger.take_back(worker, cursor.consumed if cursor and known else 0, preferred_rank)

    def restore_from(self, saved: JobSnapshot) -> None:
        """Restores the accounts from a job's records, without the reports of live workers."""
        if saved.ledger:
            whole = state_pb2.LedgerRecord()
            whole.CopyFrom(saved.ledger)
            whole.requeued.extend(saved.requeued)
            for worker, lease in saved.leases.items():
                whole.held[worker].CopyFrom(lease.range)
                whole.ranks[worker] = lease.rank
            self.ledger = Ledger.from_proto(whole, self._changed)
        lost_steps = saved.progress_totals.lost_steps
        self.progress_totals = ProgressTotals.from_proto(saved.progress_totals, lost_steps=lost_steps)

    def restore_reports(self, reports: Iterable[WorkerReported]) -> None:
        """Adds the last reports of the live workers to the restored totals."""
        for report in reports:
            self.progress_totals.restore_live(report)

    def _use(self, ledger: Ledger) -> None:
        """Replaces the ledger, and marks the records of both ledgers as changed."""
        for each in (self.ledger, ledger):
            for name in each.part_names if each else ():
                self._changed(name)
        self._changed(JobRecordKind.LEDGER)
        self.ledger = ledger

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        if self.ledger:
            self.ledger.validate()
        self.steps.validate()
