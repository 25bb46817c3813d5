"""The stored records of one job, as messages: the job's owners are converted to records, and records to owners."""

from collections.abc import Callable, Iterator

from google.protobuf.message import Message

from shoal.events import from_proto as event_from_proto
from shoal.v1 import state_pb2
from shoal_coordinator.job.checkpoints import CheckpointCoordinator
from shoal_coordinator.job.copies import CopyMachine
from shoal_coordinator.job.event_log import Kept
from shoal_coordinator.job.owners import Owners
from shoal_coordinator.job.progress import report_from_proto, reports_later
from shoal_coordinator.job.recovery import Recovery
from shoal_coordinator.job.submission import Submission
from shoal_coordinator.messages import JobRecordKind, JobSnapshot, event_message, record_keys

# The kinds of which a job may have many records.
_NUMBERED = {JobRecordKind.RANK, JobRecordKind.LEASE, JobRecordKind.REQUEUED, JobRecordKind.EVENT}


class JobRecords:
    """The records of one job.

    Args:
        submission: the job.
        owners: owners of the job's state.
        checkpoint_coordinator: checkpoint coordinator of the job.
        recovery: recovery of the job.
        copies: decides about the copies of its shards.
    """

    def __init__(
        self,
        submission: Submission,
        owners: Owners,
        checkpoint_coordinator: CheckpointCoordinator,
        recovery: Recovery,
        copies: CopyMachine,
    ) -> None:
        self._submission, self._log = submission, owners.log
        self._lifecycle, self._plan = owners.lifecycle, owners.plan
        self._worker_group, self._accounting = owners.worker_group, owners.accounting
        self._checkpoint_coordinator, self._recovery, self._copies = checkpoint_coordinator, recovery, copies

    @property
    def record_names(self) -> Iterator[str]:
        """The names of all records that the job may have."""
        yield from (kind for kind in JobRecordKind if kind not in _NUMBERED)
        yield from map(record_keys.of_rank, self._worker_group.recorded_ranks)
        yield from self._accounting.ledger.part_names if self._accounting.ledger else ()
        yield from (f"{JobRecordKind.EVENT}/{number}" for number in self._log.kept)

    def record(self, name: str) -> Message | None:
        """Returns the record of that name; None if it does not exist."""
        kind, _, rest = name.partition("/")
        evaluation_schedule, ledger = self._checkpoint_coordinator.evaluation_schedule, self._accounting.ledger
        match kind:
            case JobRecordKind.SPEC:
                return self._submission.to_proto()
            case JobRecordKind.PLAN:
                return self._plan.to_proto()
            case JobRecordKind.COPIES:
                return self._plan.copies.to_proto()
            case JobRecordKind.STATE:
                return self._state_record()
            case JobRecordKind.LEDGER:
                return ledger.to_record() if ledger else None
            case JobRecordKind.LEASE:
                return ledger.lease_record(rest) if ledger else None
            case JobRecordKind.REQUEUED:
                epoch, _, start = rest.partition("/")
                return ledger.requeued_record(int(epoch), int(start)) if ledger else None
            case JobRecordKind.PROGRESS:
                return self._accounting.progress_totals.to_record()
            case JobRecordKind.REPORTS:
                return reports_later(self._worker_group.last_reports)()
            case JobRecordKind.CHECKPOINTS:
                return self._checkpoint_coordinator.checkpoints.to_proto()
            case JobRecordKind.EVALUATION:
                return evaluation_schedule.to_proto() if evaluation_schedule else None
            case JobRecordKind.RANK:
                return self._worker_group.rank_record(int(rest))
        event = self._log.find(int(rest))
        return event_message(event) if event else None

    def record_later(self, name: str) -> Callable[[], Message | None]:
        """Returns a function that makes the record as `record` does now, at any time and on any thread.

        A plan can have 100,000 variables, and there can be thousands of reports, so their records are not made before
        the function is called.
        """
        if name == JobRecordKind.PLAN:
            return self._plan.record_later()
        if name == JobRecordKind.REPORTS:
            return reports_later(self._worker_group.last_reports)
        message = self.record(name)
        return lambda: message

    def restore(self, saved: JobSnapshot, now: float) -> list[str]:
        """Restores the owners of a new job from its records; returns the names of those that have to be written again.

        Earlier versions of Shoal stored the ranks in the job's record, the ranges in the ledger's record, and the
        reports in that of the progress totals. They had no record of checkpoints in a cluster without checkpoint
        storage. The clock may have gone back since the records were written: times that decide what happens next are
        limited to `now`. The times of events stay, because watchers have seen them, and nothing is decided by them.
        """
        state, evaluation_schedule = saved.state, self._checkpoint_coordinator.evaluation_schedule
        self._lifecycle.restore_from(state, now)
        self._plan.restore_from(state, saved.plan, saved.copies)
        self._copies.restore_from(state)
        self._worker_group.restore_from(state, saved.ranks, now)
        self._recovery.restore_from(state, now)
        if saved.checkpoints:
            self._checkpoint_coordinator.checkpoints.restore_from(saved.checkpoints, now)
        if evaluation_schedule and saved.evaluation:
            evaluation_schedule.restore_from(saved.evaluation)
        self._accounting.restore_from(saved)
        reports = {**saved.progress_totals.told, **saved.reports.reports}
        self._worker_group.restore_reports({it: report_from_proto(report) for it, report in reports.items()})
        self._accounting.restore_reports(self._worker_group.last_reports.values())
        events = [event_from_proto(event) for event in saved.events]
        self._log.restore([event for event in events if isinstance(event, Kept)], state.reserved_sequence)
        restored: dict[str, Message | None] = {
            JobRecordKind.STATE: state,
            JobRecordKind.CHECKPOINTS: saved.checkpoints,
        }
        for rank in saved.ranks.keys() | self._worker_group.recorded_ranks:
            restored[record_keys.of_rank(rank)] = saved.ranks.get(rank)
        changed = [name for name, record in restored.items() if self.record(name) != record]
        return changed + self._of_schema_3(saved)

    def _of_schema_3(self, saved: JobSnapshot) -> list[str]:
        """Returns the names of the records that replace larger ones of schema 3 or earlier."""
        names: list[str] = []
        if self._accounting.ledger and saved.ledger and (saved.ledger.held or saved.ledger.requeued):
            names += JobRecordKind.LEDGER, *self._accounting.ledger.part_names
        if saved.progress_totals.told:
            names += JobRecordKind.PROGRESS, JobRecordKind.REPORTS
        return names

    def _state_record(self) -> state_pb2.JobRecord:
        record = state_pb2.JobRecord(reserved_sequence=self._log.reserved_sequence)
        self._lifecycle.write_to(record)
        self._plan.write_to(record)
        self._worker_group.write_to(record)
        self._recovery.write_to(record)
        self._copies.write_to(record)
        return record
