"""What was done of one job: its data, by the ledger, and the figures that workers report. Pure: no clock, no I/O."""

from collections.abc import Callable, Mapping

from shoal._wire import Cursor
from shoal.job import Job
from shoal.status import DataAccount, Progress, Timings
from shoal.v1 import state_pb2
from shoal_coordinator.job.ledger import Ledger
from shoal_coordinator.job.progress import ProgressTotals
from shoal_coordinator.job.snapshot import JobSnapshot
from shoal_coordinator.job.step_timings import StepTimings
from shoal_coordinator.messages import HoldResult, JobRecordKind, WorkerReported


class Accounting:
    """The books of one job. They begin anew, or go on from a checkpoint, when its shards are lost.

    Args:
        spec: the job, as its user asked for it.
        changed: told the name of the record that is another one now.
    """

    def __init__(self, spec: Job, changed: Callable[[str], None]) -> None:
        self._spec, self._changed = spec, changed
        self.ledger: Ledger | None = None  # None until the job is described
        self.progress_totals = ProgressTotals()
        self.steps = StepTimings()

    @property
    def finished(self) -> bool:
        """Whether all data is done; never so without data."""
        return self.ledger is not None and self.ledger.finished

    def account(self) -> DataAccount:
        """What became of the data; of a job that was not described yet, nothing is known."""
        return self.ledger.account() if self.ledger else DataAccount()

    def timings(self) -> Timings:
        """Where the time of the latest steps went, and how stale accepted pushes were."""
        return Timings(self.steps.kept, self.progress_totals.staleness, self.steps.last_reported_at)

    def progress(self, seconds: float) -> Progress:
        """The figures now, `seconds` after the job began to run; 0: it did not."""
        epoch = self.ledger.epoch if self.ledger else 0
        return self.progress_totals.progress(total_samples=self._total_samples, epoch=epoch, seconds=seconds)

    @property
    def _total_samples(self) -> int:
        """Samples until the job's end; 0: not known. By its steps, it is as many as there are in full batches."""
        spec, of_data = self._spec, self.ledger.samples if self.ledger else 0
        by_steps = spec.max_steps * spec.workers * spec.batch_size
        return min(of_data, by_steps) if by_steps else of_data

    def held(self, ranks: Mapping[str, int]) -> HoldResult:
        """The coordinator's part of a cut; `ranks` are the live workers'."""
        data = self.ledger.to_proto() if self.ledger and self.ledger.samples_per_epoch else None
        return HoldResult(data, ranks, self.progress_totals.to_proto({}))

    def begin(self, samples: int) -> None:
        """The job is described: an epoch has so many samples, none of which is done."""
        self.ledger = Ledger.of(self._spec, samples, self.ledger_changed)
        self.ledger_changed()

    def restart(self) -> None:
        """Nothing is done any more."""
        self.progress_totals, self.steps = ProgressTotals(), StepTimings()
        self._changed(JobRecordKind.PROGRESS)
        if self.ledger:
            self.begin(self.ledger.samples_per_epoch)

    def resume_data(self, ledger: Ledger) -> None:
        """The data goes on where a checkpoint has it."""
        self.ledger = ledger
        self.ledger_changed()

    def resume_progress(self, progress: state_pb2.TallyRecord, *, of_another: bool) -> None:
        """The figures go on from a checkpoint's; those of another job are not this one's speed."""
        self.progress_totals = ProgressTotals.from_proto(progress)
        if of_another:
            self.progress_totals.begin()
        self._changed(JobRecordKind.PROGRESS)

    def count(self, fresh: WorkerReported, now: float) -> None:
        """Counts in what a worker did since its last report."""
        self.progress_totals.add(fresh)
        self.steps.add(fresh.worker, fresh.timings, now)

    def release(self, worker: str, cursor: Cursor | None) -> None:
        """A worker is gone; what it holds goes to others but for what it has done, as far as that is known."""
        self._changed(JobRecordKind.PROGRESS)  # nobody will report again what this one did
        if self.ledger:
            held = self.ledger.held_by(worker)
            known = cursor is not None and held is not None and cursor.lease == held.number
            self.ledger.take_back(worker, cursor.consumed if cursor and known else 0)

    def restore_from(self, saved: JobSnapshot) -> None:
        """Goes on from a job's records."""
        self.ledger = Ledger.from_proto(saved.ledger, self.ledger_changed) if saved.ledger else None
        self.progress_totals = ProgressTotals.from_proto(saved.tally)

    def ledger_changed(self) -> None:
        """The ledger's record is another one now."""
        self._changed(JobRecordKind.LEDGER)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        if self.ledger:
            self.ledger.validate()
        self.steps.validate()
