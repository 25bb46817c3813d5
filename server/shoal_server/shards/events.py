"""What a shard's state machine is told, and what it answers: the vocabulary of `shoal_server.shards.state`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal import errors
from shoal._wire import Cursor
from shoal_server.shards.consistency import Apply

# Events.


@dataclass(frozen=True, slots=True)
class WorkerAdmitted:
    """The coordinator lets a worker in."""

    worker: str
    incarnation: int
    rank: int


@dataclass(frozen=True, slots=True)
class WorkerFenced:
    """This and all earlier lives of a worker are over: refuse its calls, but wait with its barriers."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerReleased:
    """A worker leaves the barriers; its staged push counts if it is the last of `committed_steps`."""

    worker: str
    incarnation: int
    committed_steps: int


@dataclass(frozen=True, slots=True)
class PullRequested:
    """A worker, or a reader (worker ""), asks for the values of the step `ahead` of the one that it is at."""

    ticket: Any
    worker: str
    incarnation: int
    step: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class PullAbandoned:
    """The caller of a waiting pull is gone."""

    ticket: Any


@dataclass(frozen=True, slots=True)
class PushStaged:
    """A whole gradient has arrived and is sound."""

    worker: str
    incarnation: int
    step: int
    weight: float
    version: int
    payload: Any
    cursor: Cursor | None = None


@dataclass(frozen=True, slots=True)
class PushCommitted:
    """The staged gradient of this step counts from now on."""

    worker: str
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True)
class ValuesAssigned:
    """Initial values are to be overwritten."""


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """How far an admitted worker has come on a shard.

    Attributes:
        incarnation: which life of it.
        committed: 1 + the number of the last step that it committed; 0: none.
        finished: how many steps it has finished, or passed by.
    """

    incarnation: int
    committed: int
    finished: int

    def joined(self, other: "WorkerProgress") -> "WorkerProgress":
        """The furthest of two; of a later life, that one's."""
        if self.incarnation != other.incarnation:
            return max(self, other, key=lambda progress: progress.incarnation)
        return WorkerProgress(
            self.incarnation, max(self.committed, other.committed), max(self.finished, other.finished)
        )


@dataclass(frozen=True, slots=True)
class CutRequested:
    """A checkpoint is taken here: what is committed on any server counts before it.

    Attributes:
        progress: of each worker, on the servers where it is furthest.
    """

    progress: Mapping[str, WorkerProgress]


@dataclass(frozen=True, slots=True)
class ValuesRestored:
    """The values are those of a checkpoint, before anybody is admitted."""

    version: int
    step: int


Event = (
    WorkerAdmitted
    | WorkerFenced
    | WorkerReleased
    | PullRequested
    | PullAbandoned
    | PushStaged
    | PushCommitted
    | ValuesAssigned
    | CutRequested
    | ValuesRestored
)

# Effects, besides `Apply`.


@dataclass(frozen=True, slots=True)
class AnswerPull:
    """Send the values, as they are after the effects before this one."""

    ticket: Any
    step: int


@dataclass(frozen=True, slots=True)
class RefusePull:
    """End a pull with an error."""

    ticket: Any
    error: errors.ShoalError


@dataclass(frozen=True, slots=True)
class AnswerPush:
    """The answer to a push, now and whenever it is repeated."""

    outcome: Literal["staged", "accepted", "dropped_late", "skipped"]
    staleness: int
    step: int  # the worker's next
    version: int
    repeated: bool = field(default=False, compare=False)  # it was given before


@dataclass(frozen=True, slots=True)
class AnswerAdmission:
    """The step at which an admitted worker may begin here."""

    step: int


@dataclass(frozen=True, slots=True)
class AnswerFence:
    """How many steps a fenced worker had committed: 1 + the last one's number, 0 if none."""

    committed_steps: int


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Take the assigned values."""


@dataclass(frozen=True, slots=True)
class AnswerCut:
    """What is saved, after the effects before this one.

    Attributes:
        version: updates applied.
        step: to go on with.
        cursors: by worker, how far its data had come with what is applied.
    """

    version: int
    step: int
    cursors: Mapping[str, Cursor]


Effect = Apply | AnswerPull | RefusePull | AnswerPush | AnswerAdmission | AnswerFence | Overwrite | AnswerCut
