"""What a daemon should be running: a state machine that decides, without processes, clocks, threads or I/O.

`AssignmentMachine.handle(event)` returns effects, which `shoal_worker.daemon` performs in order.
"""

import signal
from dataclasses import dataclass

from shoal._wire import Cursor
from shoal_worker.messages import TrainerOutcome

# A job that ends its trainers so often in a row, without a push in between, will do so again anywhere.
_MAX_DEATHS_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class AssignedJob:
    """One assignment of a job to one life of this worker."""

    job: str
    assignment: int
    incarnation: int


# Events.


@dataclass(frozen=True, slots=True)
class IncarnationChanged:
    """The worker has a new incarnation: what was assigned to the old one is given up."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Assigned:
    """The coordinator says what to be working on; None: nothing."""

    work: AssignedJob | None


@dataclass(frozen=True, slots=True)
class JobOver:
    """The coordinator says, in answer to a report, that the job has ended for this worker."""

    work: AssignedJob


@dataclass(frozen=True, slots=True)
class TrainerEnded:
    """The trainer's process is gone, and all that it wrote has been read.

    Attributes:
        status: its exit status; negative: the signal that killed it.
        outcome: what it said about its end; None: nothing.
        progressed: a server took one of its pushes.
    """

    status: int
    outcome: TrainerOutcome | None
    progressed: bool


@dataclass(frozen=True, slots=True)
class StopAfterBatchRequested:
    """The daemon is to stop once its trainer has finished the batch in hand."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The daemon is to stop."""


Event = IncarnationChanged | Assigned | JobOver | TrainerEnded | StopAfterBatchRequested | StopRequested

# Effects.


@dataclass(frozen=True, slots=True)
class StartTrainer:
    """Start a process for this work."""

    work: AssignedJob


@dataclass(frozen=True, slots=True)
class StopTrainerAfterBatch:
    """Ask the process to finish the batch in hand and to end. `TrainerEnded` follows, in its own time."""


@dataclass(frozen=True, slots=True)
class StopTrainer:
    """End the process: SIGTERM, and SIGKILL if it stays. `TrainerEnded` follows."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell the coordinator that this worker is through with its job, after the last log lines."""

    error: str
    lost: bool = False  # the error is that the job's shards are not on their servers


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the cluster, and with it the job, saying how far the trainer was; after the last log lines.

    Attributes:
        cursor: in the range of data that it holds; None: it holds none.
    """

    cursor: Cursor | None


@dataclass(frozen=True, slots=True)
class Renew:
    """Become a new incarnation, so that others get the work at once. `IncarnationChanged` follows.

    Attributes:
        reason: for the job's log.
    """

    reason: str


Effect = StartTrainer | StopTrainerAfterBatch | StopTrainer | Finish | Leave | Renew


class AssignmentMachine:
    """The machine of one daemon."""

    def __init__(self) -> None:
        self.incarnation = 0  # 0: not registered yet
        self.wanted: AssignedJob | None = None  # of this incarnation
        self.running: AssignedJob | None = None  # has a process, be it on its way out
        self.halting = False  # `running` was told to stop
        self.over: AssignedJob | None = None  # came to its end here; is not started again
        self.leaving = False
        self.retiring = False  # `running` was asked to leave
        self.closing = False
        self._deaths: tuple[str, int] = ("", 0)  # job, and how many of its trainers died in a row without a push

    @property
    def done(self) -> bool:
        """Whether the daemon may end."""
        return (self.leaving or self.closing) and self.running is None

    def handle(self, event: Event) -> list[Effect]:
        """Takes one event and says what to do."""
        effects: list[Effect] = []
        match event:
            case IncarnationChanged(incarnation):
                self.incarnation, self.wanted, self.over = incarnation, None, None
            case Assigned(work):
                if work is None or work.incarnation == self.incarnation:  # else an answer to an earlier life
                    self.wanted = work
            case JobOver(work):
                self.over = work
            case TrainerEnded():
                effects = self._on_ended(event)
            case StopAfterBatchRequested():
                self.leaving = True
            case StopRequested():
                self.closing = True
        return effects + self._reconcile()

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken; called after every event in tests."""
        assert self.wanted is None or self.wanted.incarnation == self.incarnation
        assert not ((self.halting or self.retiring) and self.running is None)
        wrong = self.running is not None and (self.running != self._due() or self.closing)
        assert not wrong or self.halting, "a trainer runs that nobody wants"

    def _due(self) -> AssignedJob | None:
        return None if self.closing or self.wanted == self.over else self.wanted

    def _reconcile(self) -> list[Effect]:
        due = self._due()
        if self.running is None:
            if due is None or self.leaving:
                return []
            self.running = due
            return [StartTrainer(due)]
        if self.running != due and not self.halting:
            self.halting = True
            return [StopTrainer()]
        if self.leaving and not self.halting and not self.retiring:
            self.retiring = True
            return [StopTrainerAfterBatch()]
        return []

    def _on_ended(self, event: TrainerEnded) -> list[Effect]:
        ended, asked = self.running, self.halting
        self.running, self.halting, self.retiring = None, False, False
        if ended is None or asked:
            return []
        self.over = ended
        if event.outcome is not None and event.outcome.left:
            return [Leave(event.outcome.cursor)]
        if event.outcome is not None and not event.outcome.fenced:
            self._deaths = ("", 0)
            return [Finish(event.outcome.error, event.outcome.lost)]
        if event.outcome is None and event.status >= 0:
            return [Finish(f"the program ended its process with exit status {event.status}; its log may say why")]
        return self._on_death(ended.job, _reason(event), event.progressed)

    def _on_death(self, job: str, reason: str, progressed: bool) -> list[Effect]:
        if self.leaving:
            return [Leave(None)]
        last_job, count = self._deaths
        count = 1 if progressed or job != last_job else count + 1
        self._deaths = (job, count)
        if count < _MAX_DEATHS_IN_A_ROW:
            return [Renew(reason)]  # nobody knows how far it came: as with a dead worker, this life of it is fenced
        return [Finish(f"{reason}; it happened {count} times in a row, without one push in between")]


def _reason(event: TrainerEnded) -> str:
    if event.outcome is not None:
        return f"the trainer cannot go on: {event.outcome.error}"
    try:
        return f"the trainer was killed by {signal.Signals(-event.status).name}"
    except ValueError:
        return f"the trainer was killed by signal {-event.status}"
