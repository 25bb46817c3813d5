"""State machine of a daemon: it decides which trainer should run, without processes, clocks, threads or I/O.

`AssignmentMachine.handle(event)` returns effects. `shoal_worker.daemon` carries them out in order.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass

from shoal import errors
from shoal._wire import Cursor
from shoal.status import JobState, JobStatus
from shoal_worker.messages import TrainerOutcome

# After so many trainer crashes of one job in a row, without a push in between, the worker asks to be quarantined.
_MAX_CRASHES_IN_A_ROW = 3
# The same for trainers whose incarnation was fenced, or that lost the servers or the coordinator. That is not the fault
# of the program. So it does not count as a crash, and it may happen more often.
_MAX_FENCES_IN_A_ROW = 10


@dataclass(frozen=True, slots=True)
class AssignedJob:
    """One assignment of a job to one incarnation of this worker.

    Attributes:
        job: name of the job.
        assignment: the coordinator's number of the assignment.
        incarnation: the worker's incarnation.
        program: the job's program, package.module:factory.
        submitter: the name of the job's submitter; empty if it is not known.
        submitter_role: the access role of the submitter; empty if it is not known.
    """

    job: str
    assignment: int
    incarnation: int
    program: str = ""
    submitter: str = ""
    submitter_role: str = ""


# Events.


@dataclass(slots=True)
class _FailedTrainers:
    """The trainers of one job that have failed in a row, without a push in between.

    Attributes:
        job: name of the job.
        crashes: trainers that were killed.
        fences: trainers that were fenced, or lost contact.
    """

    job: str = ""
    crashes: int = 0
    fences: int = 0


@dataclass(frozen=True, slots=True)
class IncarnationChanged:
    """The worker has a new incarnation. The assignment of the old one is void."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Assigned:
    """The coordinator has named the job to work on; None means no job."""

    assigned: AssignedJob | None


@dataclass(frozen=True, slots=True)
class JobOver:
    """The coordinator has answered a report: the job is done for this worker."""

    assigned: AssignedJob


@dataclass(frozen=True, slots=True)
class TrainerEnded:
    """The trainer's process has ended, and all of its output has been read.

    Attributes:
        status: its exit status; negative if a signal killed it.
        outcome: its last message; None if it sent none.
        progressed: whether a server accepted one of its pushes.
        advice: which limit of the worker it may have exceeded; empty if there is none. It is added to the error.
    """

    status: int
    outcome: TrainerOutcome | None
    progressed: bool
    advice: str = ""


@dataclass(frozen=True, slots=True)
class StopAfterBatchRequested:
    """The daemon was asked to stop when its trainer has finished the current batch."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The daemon was asked to stop now."""


AssignmentEvent = IncarnationChanged | Assigned | JobOver | TrainerEnded | StopAfterBatchRequested | StopRequested

# Effects.


@dataclass(frozen=True, slots=True)
class StartTrainer:
    """Start a trainer for this assignment."""

    assigned: AssignedJob


@dataclass(frozen=True, slots=True)
class StopTrainerAfterBatch:
    """Ask the trainer to finish the current batch and to end. `TrainerEnded` follows, after any time."""


@dataclass(frozen=True, slots=True)
class StopTrainer:
    """End the trainer: SIGTERM first, then SIGKILL. `TrainerEnded` follows."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell the coordinator, after the last log lines, that this worker has finished its job."""

    error: str
    shards_lost: bool = False  # whether the error is that the job's shards are not on their servers
    trainer_failed: bool = False  # whether the job may go on without this worker, which is then quarantined
    cursor: Cursor | None = None  # position in the leased range; None if no range is leased, or with an error


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the cluster after the last log lines, and report the trainer's position in its data.

    Attributes:
        cursor: position in the leased range; None if no range is leased.
    """

    cursor: Cursor | None


@dataclass(frozen=True, slots=True)
class Renew:
    """Become a new incarnation, so that the job is assigned again at once. `IncarnationChanged` follows.

    Attributes:
        reason: text for the job's log.
    """

    reason: str


AssignmentEffect = StartTrainer | StopTrainerAfterBatch | StopTrainer | Finish | Leave | Renew


class AssignmentMachine:
    """State machine of one daemon."""

    def __init__(self) -> None:
        self.incarnation = 0  # 0 before the registration
        self.wanted: AssignedJob | None = None  # of this incarnation
        self.running: AssignedJob | None = None  # has a process, which may be ending
        self.stopping_trainer = False  # `running` was told to stop
        self.ended: AssignedJob | None = None  # has ended on this worker and is not started again
        self.draining = False
        self.stopping_after_batch = False  # `running` was asked to stop after its batch
        self.stopping = False
        self._failures = _FailedTrainers()

    @property
    def done(self) -> bool:
        """Returns whether the daemon may end."""
        return (self.draining or self.stopping) and self.running is None

    def handle(self, event: AssignmentEvent) -> list[AssignmentEffect]:
        """Handles one event and returns the effects."""
        effects: list[AssignmentEffect] = []
        match event:
            case IncarnationChanged(incarnation):
                self.incarnation, self.wanted, self.ended = incarnation, None, None
            case Assigned(assigned):
                if (
                    assigned is None or assigned.incarnation == self.incarnation
                ):  # otherwise it is for an earlier incarnation
                    self.wanted = assigned
            case JobOver(assigned):
                self.ended = assigned
            case TrainerEnded():
                effects = self._on_ended(event)
            case StopAfterBatchRequested():
                self.draining = True
            case StopRequested():
                self.stopping = True
        return effects + self._reconcile()

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken. Tests call it after every event."""
        assert self.wanted is None or self.wanted.incarnation == self.incarnation
        assert not ((self.stopping_trainer or self.stopping_after_batch) and self.running is None)
        wrong = self.running is not None and (self.running != self._due() or self.stopping)
        assert not wrong or self.stopping_trainer, "a trainer runs without an assignment"

    def _due(self) -> AssignedJob | None:
        return None if self.stopping or self.wanted == self.ended else self.wanted

    def _reconcile(self) -> list[AssignmentEffect]:
        due = self._due()
        if self.running is None:
            if due is None or self.draining:
                return []
            self.running = due
            return [StartTrainer(due)]
        if self.running != due and not self.stopping_trainer:
            self.stopping_trainer = True
            return [StopTrainer()]
        if self.draining and not self.stopping_trainer and not self.stopping_after_batch:
            self.stopping_after_batch = True
            return [StopTrainerAfterBatch()]
        return []

    def _on_ended(self, event: TrainerEnded) -> list[AssignmentEffect]:
        ended, asked = self.running, self.stopping_trainer
        self.running, self.stopping_trainer, self.stopping_after_batch = None, False, False
        if ended is None or asked:
            return []
        self.ended = ended
        if event.outcome is not None and event.outcome.left:
            return [Leave(event.outcome.cursor)]
        if event.outcome is not None and not event.outcome.fenced:
            self._failures = _FailedTrainers()
            error, cursor = event.outcome.error, event.outcome.cursor
            advised = _with_advice(error, event.advice) if error else ""
            return [Finish(advised, event.outcome.shards_lost, cursor=cursor)]
        if event.outcome is None and event.status >= 0:
            ended_itself = f"the program ended its process with exit status {event.status}; its log may say why"
            return [Finish(_with_advice(ended_itself, event.advice))]
        if self.draining:
            return [Leave(None)]
        return self._on_failure(ended.job, event)

    def _on_failure(self, job: str, event: TrainerEnded) -> list[AssignmentEffect]:
        """Decides what follows after a trainer was killed or fenced."""
        if event.progressed or job != self._failures.job:
            self._failures = _FailedTrainers(job)
        failures, reason = self._failures, _reason(event)
        if event.outcome is None:
            failures.crashes += 1
            count, most = failures.crashes, _MAX_CRASHES_IN_A_ROW
        else:
            failures.fences += 1
            count, most = failures.fences, _MAX_FENCES_IN_A_ROW
        if count < most:
            return [Renew(reason)]  # its progress is unknown: fence this incarnation
        often = f"{reason}; this happened {count} times in a row without a push in between"
        if event.outcome is not None:
            often += "; check the coordinator, the servers, and the network between them and this worker"
        return [Finish(often, trainer_failed=True)]


def _reason(event: TrainerEnded) -> str:
    if event.outcome is not None:
        return f"the trainer cannot continue: {event.outcome.error}"
    try:
        name = signal.Signals(-event.status).name
    except ValueError:
        name = f"signal {-event.status}"
    return _with_advice(f"the trainer was killed by {name}", event.advice)


def _with_advice(error: str, advice: str) -> str:
    if not advice:
        return error
    return f"{error}\n{advice}" if "\n" in error else f"{error}; {advice}"  # a traceback has lines


def why_stopped(job: str, error: str, status: Callable[[], JobStatus]) -> str:
    """Returns why a trainer has stopped after a server refused its calls.

    The servers refuse a trainer, and drop its shards, when its job is cancelled or restarts. They do not know why, so
    the trainer's error names only the refusal. The coordinator knows the reason.

    Args:
        job: name of the job.
        error: the trainer's error, which is the answer if the coordinator knows no reason.
        status: asks the coordinator for the job's status.
    """
    try:
        found = status()
    except errors.UnknownJob:
        return f"job {job} was dropped"
    except errors.ShoalError:  # the coordinator does not answer
        return error
    reason = found.reason.partition("\n")[0]
    match found.state:
        case JobState.CANCELLED:
            return f"job {job} was cancelled{reason and f': {reason}'}"
        case JobState.FAILED:
            return f"job {job} failed{reason and f': {reason}'}"
        case JobState.SUCCEEDED:
            return f"job {job} has ended"
    return reason or error
