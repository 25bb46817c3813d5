"""The stored records of one job, as messages: the job's owners are converted to records, and records to owners."""

from collections.abc import Callable, Iterator

from google.protobuf.message import Message

from shoal.events import from_proto as event_from_proto
from shoal.v1 import state_pb2
from shoal_coordinator.job.checkpoints import CheckpointCoordinator
from shoal_coordinator.job.event_log import Kept
from shoal_coordinator.job.owners import Owners
from shoal_coordinator.job.progress import report_from_proto
from shoal_coordinator.job.recovery import Recovery
from shoal_coordinator.job.submission import Submission
from shoal_coordinator.messages import JobRecordKind, JobSnapshot, event_message, record_keys


class JobRecords:
    """The records of one job.

    Args:
        submission: the job.
        owners: owners of the job's state.
        checkpoint_coordinator: checkpoint coordinator of the job.
        recovery: recovery of the job.
    """

    def __init__(
        self, submission: Submission, owners: Owners, checkpoint_coordinator: CheckpointCoordinator, recovery: Recovery
    ) -> None:
        self._submission, self._log = submission, owners.log
        self._lifecycle, self._plan = owners.lifecycle, owners.plan
        self._worker_group, self._accounting = owners.worker_group, owners.accounting
        self._checkpoint_coordinator, self._recovery = checkpoint_coordinator, recovery

    @property
    def record_names(self) -> Iterator[str]:
        """The names of all records that the job may have."""
        yield from (kind for kind in JobRecordKind if kind not in {JobRecordKind.RANK, JobRecordKind.EVENT})
        yield from map(record_keys.of_rank, self._worker_group.recorded_ranks)
        yield from (f"{JobRecordKind.EVENT}/{number}" for number in self._log.kept)

    def record(self, name: str) -> Message | None:
        """Returns the record of that name; None if it does not exist."""
        kind, _, number = name.partition("/")
        evaluation_schedule = self._checkpoint_coordinator.evaluation_schedule
        match kind:
            case JobRecordKind.SPEC:
                return self._submission.to_proto()
            case JobRecordKind.PLAN:
                return self._plan.to_proto()
            case JobRecordKind.STATE:
                return self._state_record()
            case JobRecordKind.LEDGER:
                return self._accounting.ledger.to_proto() if self._accounting.ledger else None
            case JobRecordKind.PROGRESS:
                return self._accounting.progress_totals.to_proto(self._worker_group.last_reports)
            case JobRecordKind.CHECKPOINTS:
                return self._checkpoint_coordinator.checkpoints.to_proto()
            case JobRecordKind.EVALUATION:
                return evaluation_schedule.to_proto() if evaluation_schedule else None
            case JobRecordKind.RANK:
                return self._worker_group.rank_record(int(number))
        event = self._log.find(int(number))
        return event_message(event) if event else None

    def record_later(self, name: str) -> Callable[[], Message | None]:
        """Returns a function that makes the record as `record` does now, at any time and on any thread.

        That of a plan can have 100,000 variables, so it is not made before the function is called.
        """
        if name == JobRecordKind.PLAN:
            return self._plan.record_later()
        message = self.record(name)
        return lambda: message

    def restore(self, saved: JobSnapshot, now: float) -> list[str]:
        """Restores the owners of a new job from its records; returns the names of those that have to be written again.

        Earlier versions of Shoal stored the ranks in the job's record. They had no record of checkpoints in a cluster
        without checkpoint storage. The clock may have gone back since the records were written: times that decide what
        happens next are limited to `now`. The times of events stay, because watchers have seen them, and nothing is
        decided by them.
        """
        state, evaluation_schedule = saved.state, self._checkpoint_coordinator.evaluation_schedule
        self._lifecycle.restore_from(state, now)
        self._plan.restore_from(state, saved.plan)
        self._worker_group.restore_from(state, saved.ranks, now)
        self._recovery.restore_from(state, now)
        if saved.checkpoints:
            self._checkpoint_coordinator.checkpoints.restore_from(saved.checkpoints, now)
        if evaluation_schedule and saved.evaluation:
            evaluation_schedule.restore_from(saved.evaluation)
        self._accounting.restore_from(saved)
        self._worker_group.restore_reports(
            {assignment: report_from_proto(report) for assignment, report in saved.progress_totals.told.items()}
        )
        events = [event_from_proto(event) for event in saved.events]
        self._log.restore([event for event in events if isinstance(event, Kept)], state.reserved_sequence)
        restored: dict[str, Message | None] = {
            JobRecordKind.STATE: state,
            JobRecordKind.CHECKPOINTS: saved.checkpoints,
        }
        for rank in saved.ranks.keys() | self._worker_group.recorded_ranks:
            restored[record_keys.of_rank(rank)] = saved.ranks.get(rank)
        return [name for name, record in restored.items() if self.record(name) != record]

    def _state_record(self) -> state_pb2.JobRecord:
        record = state_pb2.JobRecord(reserved_sequence=self._log.reserved_sequence)
        self._lifecycle.write_to(record)
        self._plan.write_to(record)
        self._worker_group.write_to(record)
        self._recovery.write_to(record)
        return record
