"""What is kept of one job: the form in which a job is written down, and from which another coordinator restores it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.v1 import job_pb2, state_pb2


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A job's records, one for each `record_keys.JobRecordKind`, by its name; None: there is no such record.

    Attributes:
        spec: what the user submitted.
        plan: what the job trains and where; None until a worker has described the program.
        state: how far the job is, and who works on it.
        ledger: which data is done; None until a worker has described the program.
        tally: the sum of what workers reported.
        checkpoints: which there are, and which is under way.
        evaluation: which there were; None if the job has no evaluation policy.
        events: those that are kept, in any order.
    """

    spec: state_pb2.SubmissionRecord = field(default_factory=state_pb2.SubmissionRecord)
    plan: state_pb2.PlanRecord | None = None
    state: state_pb2.JobRecord = field(default_factory=state_pb2.JobRecord)
    ledger: state_pb2.LedgerRecord | None = None
    tally: state_pb2.TallyRecord = field(default_factory=state_pb2.TallyRecord)
    checkpoints: state_pb2.CheckpointsRecord | None = None
    evaluation: state_pb2.EvaluationRecord | None = None
    events: Sequence[job_pb2.Event] = ()
