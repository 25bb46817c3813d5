"""Events and effects of a shard's state machine, which is in `shoal_server.shards.machine.state`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from shoal import errors
from shoal._wire import Cursor, PushCounts
from shoal.optim import Schedule
from shoal_server.shards.machine.mode import Apply, Fold
from shoal_server.shards.machine.worker_progress import WorkerProgress


@dataclass(frozen=True, slots=True)
class Admission:
    """An answered pull or a committed push, with the slowest clock and the version at that moment."""

    kind: Literal["pull", "push"]
    worker: str
    step: int
    slowest: int
    version: int


# Events.


@dataclass(frozen=True, slots=True)
class WorkerAdmitted:
    """The coordinator admits a worker."""

    worker: str
    incarnation: int
    rank: int


@dataclass(frozen=True, slots=True)
class WorkerFenced:
    """Fences this and all earlier incarnations of a worker: calls are refused, but barriers still count the worker."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerReleased:
    """A worker leaves the barriers. Its staged push counts if the push's step is `committed_steps` - 1."""

    worker: str
    incarnation: int
    committed_steps: int


@dataclass(frozen=True, slots=True)
class PullRequested:
    """A worker asks for values; a reader has the name "".

    Attributes:
        ticket: identifies the pull.
        worker: name of the worker.
        incarnation: the worker's incarnation.
        step: the step that the worker is at.
        ahead: steps after `step` for which it wants the values.
    """

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
class PushOpened:
    """A push has arrived whose gradient needs a permit before it is read.

    Attributes:
        ticket: identifies the call.
        worker: name of the worker.
        incarnation: the worker's incarnation.
        step: step of the push.
    """

    ticket: Any
    worker: str
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True)
class PushWithdrawn:
    """The call of an opened push has ended, and has staged nothing."""

    ticket: Any
    worker: str


@dataclass(frozen=True, slots=True)
class PushStaged:
    """A complete and finite gradient has arrived."""

    worker: str
    incarnation: int
    step: int
    weight: float
    version: int
    payload: Any
    cursor: Cursor | None = None
    squares: float | None = None
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class PushCommitted:
    """The staged gradient of this step counts from now on.

    Attributes:
        worker: name of the worker.
        incarnation: the worker's incarnation.
        step: step of the push.
        defers: whether the step may stay open until `FoldsDone`, if this push closes it and gradients are left to fold.
    """

    worker: str
    incarnation: int
    step: int
    defers: bool = False


@dataclass(frozen=True, slots=True)
class Folded:
    """Contributions were added to the running sum, so that their memory is free.

    Attributes:
        count: number of contributions that were ever folded.
    """

    count: int


@dataclass(frozen=True, slots=True)
class FoldsDone:
    """All contributions to a sealed step are in its running sum, so that the step can close."""


@dataclass(frozen=True, slots=True)
class CallersForgotten:
    """A backup becomes the primary: the calls that wait have called another server, and are forgotten."""


@dataclass(frozen=True, slots=True)
class NormMeasured:
    """The squares of the sealed step's mean on this server are known; the answer to `MeasureNorm`.

    Attributes:
        squares: the sum of the squares of each slice.
    """

    squares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NormReceived:
    """Another server tells the squares of a step's mean on its shards.

    Attributes:
        server: member id of the server.
        step: the step.
        squares: the sum of the squares of each slice.
    """

    server: str
    step: int
    squares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ValuesAssigned:
    """A worker sends given values, or slots, that overwrite the initial ones; they have received some updates."""

    updates: int = 0


@dataclass(frozen=True, slots=True)
class LearningRateSet:
    """A user sets the learning rate of later updates."""

    learning_rate: Schedule


@dataclass(frozen=True, slots=True)
class CutRequested:
    """A checkpoint is taken. A push that any server has committed counts before the cut.

    If a step then waits for the norms of other servers, `AnswerCut` follows when it has closed.

    Attributes:
        progress: the largest progress of each worker on any server.
    """

    progress: Mapping[str, WorkerProgress]


@dataclass(frozen=True, slots=True)
class ValuesRestored:
    """The values come from a checkpoint, before any worker is admitted."""

    version: int
    step: int


@dataclass(frozen=True, slots=True)
class GroupSplit:
    """The lock group is split: the last event of its machine. Those of its parts continue from this state.

    Attributes:
        shards: the shards that leave the group.
        term: number of the coordinator's decision.
    """

    shards: tuple[int, ...]
    term: int


LockGroupEvent = (
    WorkerAdmitted
    | WorkerFenced
    | WorkerReleased
    | PullRequested
    | PullAbandoned
    | PushOpened
    | PushWithdrawn
    | PushStaged
    | PushCommitted
    | Folded
    | FoldsDone
    | CallersForgotten
    | NormMeasured
    | NormReceived
    | ValuesAssigned
    | CutRequested
    | ValuesRestored
    | LearningRateSet
    | GroupSplit
)

# Effects, besides `Fold` and `Apply`.


@dataclass(frozen=True, slots=True)
class MeasureNorm:
    """Ends the running sums of gradients of the sealed step, and measures their results; `NormMeasured` must follow."""


@dataclass(frozen=True, slots=True)
class ShareNorm:
    """Tells the other servers of the job the squares of a step's mean on this server.

    Attributes:
        step: the step.
        squares: the sum of the squares of each slice.
    """

    step: int
    squares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AnswerPulls:
    """Sends the values to pulls, oldest first. The values include the updates of earlier effects.

    Attributes:
        tickets: of the pulls.
        step: the next step of their workers.
    """

    tickets: tuple[Any, ...]
    step: int


@dataclass(frozen=True, slots=True)
class RefusePull:
    """Ends a pull with an error."""

    ticket: Any
    error: errors.ShoalError


@dataclass(frozen=True, slots=True)
class GrantPermit:
    """Lets a push go on.

    Attributes:
        ticket: identifies the call.
        wanted: whether the gradient is read; if not, the step has closed, or will close without this gradient.
    """

    ticket: Any
    wanted: bool


@dataclass(frozen=True, slots=True)
class RefusePermit:
    """Ends a push that waits for a permit with an error."""

    ticket: Any
    error: errors.ShoalError


@dataclass(frozen=True, slots=True)
class AnswerPush:
    """The answer to a push and to its repeats."""

    outcome: Literal["staged", "accepted", "dropped_late", "skipped"]
    staleness: int
    step: int  # the worker's next step
    version: int
    repeated: bool = field(default=False, compare=False)  # whether this answers a repeated push


@dataclass(frozen=True, slots=True)
class AnsweredPush:
    """The step and the answer of a worker's last committed push. The state machine keeps it; it is not an effect."""

    step: int
    answer: AnswerPush


@dataclass(frozen=True, slots=True)
class AnswerAdmission:
    """The step at which an admitted worker starts on this shard."""

    step: int


@dataclass(frozen=True, slots=True)
class AnswerFence:
    """The number of steps that a fenced worker has committed: 1 + the last step, or 0."""

    committed_steps: int


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Overwrites the values with the assigned or restored ones."""


@dataclass(frozen=True, slots=True)
class AnswerCut:
    """The state that a checkpoint saves. It includes the updates of earlier effects.

    Attributes:
        version: updates applied.
        step: step to continue with.
        cursors: each worker's position in its data, as of the applied updates.
        pushes: the applied pushes of each admitted worker.
    """

    version: int
    step: int
    cursors: Mapping[str, Cursor]
    pushes: Mapping[str, PushCounts]


LockGroupEffect = (
    Fold
    | Apply
    | MeasureNorm
    | ShareNorm
    | AnswerPulls
    | RefusePull
    | GrantPermit
    | RefusePermit
    | AnswerPush
    | AnswerAdmission
    | AnswerFence
    | Overwrite
    | AnswerCut
)

E = TypeVar("E")


def only(effects: Iterable[LockGroupEffect], kind: type[E]) -> E:
    """Returns the only effect of a kind."""
    (effect,) = (effect for effect in effects if isinstance(effect, kind))
    return effect
