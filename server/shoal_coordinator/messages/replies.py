"""Replies of the cluster machine to events. Replies that workers also know are in `shoal._wire`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal._wire import Placement, PushCounts
from shoal.checkpoint_policy import CheckpointChoice
from shoal.optim import PlateauState, Schedule
from shoal.status import JobState
from shoal.v1 import state_pb2


@dataclass(frozen=True, slots=True)
class RegisterResult:
    """The caller is a member, with this incarnation."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """The job that a worker should train. A new number means that the worker has to start again.

    Attributes:
        job: name of the job.
        number: number of the assignment.
        program: the job's program.
        submitter: the name of the job's submitter; empty if it is not known.
        submitter_role: the access role of the submitter; empty if it is not known.
    """

    job: str
    number: int
    program: str = ""
    submitter: str = ""
    submitter_role: str = ""


@dataclass(frozen=True, slots=True)
class HeartbeatResult:
    """What a member has to do.

    Attributes:
        assignment: what a worker should train; None for nothing.
        drains: whether a user has ordered that this server drains.
        leave: whether this server has to end now, because it is drained.
    """

    assignment: Assignment | None = None
    drains: bool = False
    leave: bool = False


@dataclass(frozen=True, slots=True)
class DescribeResult:
    """The cluster's response to a program description.

    Attributes:
        conflict: why the description of a worker was rejected; the job has failed for this reason. Empty if it was
            accepted. A session with a conflict is refused by an error, and its job goes on.
    """

    conflict: str = ""


@dataclass(frozen=True, slots=True)
class JoinResult:
    """The state of the caller's entry into a job. The fields after `placement` are valid only if `placement` is set."""

    state: JobState
    spec: bytes  # the serialized specification of the job
    ready: bool = False
    placement: Placement | None = None
    rank: int = 0
    step: int = 0
    assign_values: bool = False  # the caller has to send the given values
    restored: frozenset[str] = frozenset()  # variables to leave out: they were restored

    @property
    def ends_wait(self) -> bool:
        """Whether the caller has something to do, and so need not wait any longer."""
        return self.ready or self.state.finished or (self.assign_values and self.placement is not None)


@dataclass(frozen=True, slots=True)
class TakeCheckpointResult:
    """A requested checkpoint.

    Attributes:
        number: number of the attempt.
        after: events of this attempt have larger sequence numbers.
    """

    number: int
    after: int


@dataclass(frozen=True, slots=True)
class HoldResult:
    """The coordinator's part of a checkpoint, while a cut holds back all commits.

    Attributes:
        ledger: the job's data; None if it has none.
        ranks: ranks of the workers.
        progress_totals: the job's progress, by the reports of its workers.
        reported: the part of the totals that each live worker has reported.
        has_samples: whether the weight of a push is its number of samples.
    """

    ledger: state_pb2.LedgerRecord | None
    ranks: Mapping[str, int]
    progress_totals: state_pb2.ProgressRecord
    reported: Mapping[str, PushCounts] = field(default_factory=dict)
    has_samples: bool = True


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """The checkpoint that a job's shards were filled from.

    Attributes:
        source: the checkpoint.
        step: the step to continue at.
        variables: names of the variables in the checkpoint.
        data: the ledger; None if the job had no data.
        progress_totals: the job's progress.
        seed: seed of the data's order; None if unknown.
        skipped: why newer checkpoints could not be used.
        learning_rate: set while the checkpoint's job ran; None if none was, or if the job has another optimizer.
        plateau: state of the reduction of that rate; None as for the rate.
        optimizer_changes: the arguments of the optimizer that differ, with both values.
    """

    source: CheckpointChoice
    step: int
    variables: frozenset[str]
    data: state_pb2.LedgerRecord | None
    progress_totals: state_pb2.ProgressRecord
    seed: int | None = None
    skipped: tuple[str, ...] = ()
    learning_rate: Schedule | None = None
    plateau: PlateauState | None = None
    optimizer_changes: tuple[str, ...] = ()
