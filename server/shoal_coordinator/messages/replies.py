"""What the cluster machine answers to events: see `events`. Answers that workers know too are in `shoal._wire`."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal._wire import Placement
from shoal.checkpoint_policy import CheckpointChoice
from shoal.job import Job
from shoal.status import JobState
from shoal.v1 import state_pb2


@dataclass(frozen=True, slots=True)
class RegisterResult:
    """The caller is a member."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker should be doing; the number is another one whenever it should start anew."""

    job: str
    number: int


@dataclass(frozen=True, slots=True)
class DescribeResult:
    """What the cluster makes of a description.

    Attributes:
        conflict: why the description was not taken; the job has failed for it.
    """

    conflict: str = ""


@dataclass(frozen=True, slots=True)
class JoinResult:
    """How far the caller's entry into a job is. The rest says nothing before `placement` is there."""

    state: JobState
    spec: Job
    ready: bool = False
    placement: Placement | None = None
    rank: int = 0
    step: int = 0
    assign_values: bool = False  # the caller is to send the values of variables whose initializer is "given"
    restored: frozenset[str] = frozenset()  # but not of these, which have the values of a checkpoint


@dataclass(frozen=True, slots=True)
class TakeCheckpointResult:
    """A checkpoint that was asked for.

    Attributes:
        number: of the attempt at it.
        after: events of it have larger numbers.
    """

    number: int
    after: int


@dataclass(frozen=True, slots=True)
class HoldResult:
    """What the coordinator's part of a checkpoint is, while a cut holds back all commits.

    Attributes:
        ledger: who held which data; None: the job has none.
        ranks: of the workers.
        progress_totals: how far the job had come.
    """

    ledger: state_pb2.LedgerRecord | None
    ranks: Mapping[str, int]
    progress_totals: state_pb2.TallyRecord


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """The checkpoint that a job's shards were filled with.

    Attributes:
        source: which.
        step: to go on with.
        variables: names of those that were in it.
        data: where the data had come; None: the job had none.
        progress_totals: how far the job had come.
        skipped: why newer ones could not be used.
    """

    source: CheckpointChoice
    step: int
    variables: frozenset[str]
    data: state_pb2.LedgerRecord | None
    progress_totals: state_pb2.TallyRecord
    seed: int | None = None  # of the order of that data; None: not known
    skipped: tuple[str, ...] = ()
