"""Snapshot of a job: its stored form, from which a restarted coordinator restores it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.v1 import job_pb2, state_pb2


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A job's records. There is a field for each `record_keys.JobRecordKind`; None means that there is no record.

    Attributes:
        spec: the submission.
        plan: what the job trains and where; None until a worker has described the program.
        copies: the copies of its shards; None if it has one of each, or if they are not placed.
        state: state of the job.
        ledger: state of the data; None until a worker has described the program. Stores of schema 3 and earlier have
            the leased and the requeued ranges in it.
        leases: the leases, by worker.
        requeued: the requeued ranges, in any order.
        progress_totals: the progress totals of the workers that are gone. Stores of schema 3 and earlier have those of
            all workers in it, and the reports.
        reports: the last reports of the live workers that are not in the progress totals.
        checkpoints: the complete checkpoints, and the one in progress.
        evaluation: the evaluations; None if the job has no evaluation policy.
        ranks: the ranks of its workers, by number.
        events: the stored events, in any order.
    """

    spec: state_pb2.SubmissionRecord = field(default_factory=state_pb2.SubmissionRecord)
    plan: state_pb2.PlanRecord | None = None
    copies: state_pb2.CopiesRecord | None = None
    state: state_pb2.JobRecord = field(default_factory=state_pb2.JobRecord)
    ledger: state_pb2.LedgerRecord | None = None
    leases: Mapping[str, state_pb2.LeaseRecord] = field(default_factory=dict)
    requeued: Sequence[state_pb2.RequeuedRange] = ()
    progress_totals: state_pb2.ProgressRecord = field(default_factory=state_pb2.ProgressRecord)
    reports: state_pb2.ReportsRecord = field(default_factory=state_pb2.ReportsRecord)
    checkpoints: state_pb2.CheckpointsRecord | None = None
    evaluation: state_pb2.EvaluationRecord | None = None
    ranks: Mapping[int, state_pb2.RankRecord] = field(default_factory=dict)
    events: Sequence[job_pb2.Event] = ()
