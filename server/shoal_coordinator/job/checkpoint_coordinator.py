"""A job's checkpoints and evaluations together: which are due, under way and whole, and what one means for the other.

`CheckpointSchedule` and `EvaluationSchedule` know their own. Here is what follows from each event of them: the best evaluation asks
for a checkpoint, which then says that it is of that evaluation; a checkpoint that matters is tried again if it fails.
What follows for the job as a whole, `JobMachine` decides. Pure: no clock, no I/O.
"""

from collections.abc import Callable
from dataclasses import replace

from shoal import errors
from shoal._wire import EvaluationAck, EvaluationClaim
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.events import CheckpointEnded, EvaluationEnded
from shoal.status import Evaluation, SavedCheckpoint
from shoal_coordinator.job.checkpoint_schedule import NO_STORAGE, CheckpointSchedule
from shoal_coordinator.job.evaluation_schedule import EvaluationSchedule
from shoal_coordinator.job.owners import Owners
from shoal_coordinator.job.parts import Submission
from shoal_coordinator.messages import (
    CheckpointCommitted,
    CommitCheckpoint,
    CutTaken,
    Effect,
    JobRecordKind,
    ScanCheckpoints,
    TakeCheckpointResult,
    TakeCut,
)


class CheckpointCoordinator:
    """Decides about the checkpoints and evaluations of one job.

    Args:
        submission: the job.
        owners: of the job, to be read; the log is told of each checkpoint and evaluation, and the lifecycle why the job
            stops early.
        now: seconds of Unix time, as in every method.
        changed: told the name of a record that has changed.
        possible: whether the cluster has a folder of checkpoints.

    Attributes:
        checkpoints: which there are, to be read.
    """

    def __init__(
        self,
        submission: Submission,
        owners: Owners,
        now: float,
        changed: Callable[[str], None],
        *,
        possible: bool,
    ) -> None:
        self._ref, spec = submission.ref, submission.spec
        self._spec = spec
        self._log, self._lifecycle = owners.log, owners.lifecycle
        self._plan, self._worker_group = owners.plan, owners.worker_group
        policy = spec.checkpoints or CheckpointPolicy()
        self.checkpoints = CheckpointSchedule(
            policy, now, lambda: changed(JobRecordKind.CHECKPOINTS), possible=possible
        )
        self.evaluation_schedule = (
            EvaluationSchedule(spec.evaluation, lambda: changed(JobRecordKind.EVALUATION)) if spec.evaluation else None
        )

    # What it is like now.

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is under way, or asked for where it can be had."""
        return self.checkpoints.pending

    @property
    def stopping(self) -> str:
        """Why the job ends before its data is done; empty: it does not."""
        return self.evaluation_schedule.stopping if self.evaluation_schedule else ""

    @property
    def owes_evaluation(self) -> bool:
        """Whether the evaluation at the job's end is to come."""
        return self.evaluation_schedule is not None and self.evaluation_schedule.owes

    @property
    def latest(self) -> Evaluation | None:
        """The last evaluation; None: there was none."""
        return self.evaluation_schedule.latest if self.evaluation_schedule else None

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation so far; None: none gave a number."""
        return self.evaluation_schedule.best if self.evaluation_schedule else None

    # Evaluations.

    def claim_evaluation(self, worker: str, step: int, *, through: bool) -> EvaluationClaim:
        """Gives a worker the evaluation that is due at its step, if one is and nobody else has it."""
        if self.evaluation_schedule is None or not self._lifecycle.running:
            return EvaluationClaim()
        own = self._worker_group.active[worker].assignment
        others = self._worker_group.assignments - {own}
        return EvaluationClaim(
            self.evaluation_schedule.claim(own, step, others, through=through), stop=bool(self.stopping)
        )

    def lacks(self, result: Evaluation) -> str:
        """Returns why a worker's result is of no use; empty: it is of use, or of no interest."""
        return self.evaluation_schedule.lacks(result) if self.evaluation_schedule else ""

    def report_evaluation(self, worker: str, result: Evaluation, now: float) -> tuple[EvaluationAck, list[Effect]]:
        """Takes what a worker has found, and says what follows for it."""
        evaluation_schedule, checkpoints = self.evaluation_schedule, self.checkpoints
        if evaluation_schedule is None:
            return EvaluationAck(), []
        effects: list[Effect] = []
        if reported := evaluation_schedule.report(
            self._worker_group.active[worker].assignment, replace(result, time=now)
        ):
            found, is_best = reported
            self._log.append(EvaluationEnded(self._log.next, now, worker, found, is_best))
            if self.stopping:
                self._lifecycle.wait_for(self.stopping, now)
            if is_best and evaluation_schedule.checkpoints_best and checkpoints.possible:
                evaluation_schedule.expect_checkpoint(checkpoints.request(now))
                effects = self.begin_when_due(now)
        # Where others go on meanwhile, it would hold still for nothing.
        holds_still = self._spec.consistency.needs_every_worker
        wait = evaluation_schedule.awaits_cut and not checkpoints.failure and holds_still
        return EvaluationAck(wait, stop=bool(self.stopping)), effects

    def release(self, assignment: int) -> None:
        """A worker has no part in the job any more; what it was evaluation_schedule is lost."""
        if self.evaluation_schedule:
            self.evaluation_schedule.release(assignment)

    # Checkpoints, in the order in which they go on.

    def request(self, now: float) -> tuple[TakeCheckpointResult, list[Effect]]:
        """Takes one more, now or when the one under way is over.

        Raises:
            StorageFailed: the cluster has no folder of checkpoints.
            NotPlaced: the job does not run.
        """
        if not self.checkpoints.possible:
            raise errors.StorageFailed(NO_STORAGE)
        if not self._lifecycle.running:
            state = self._lifecycle.state.value
            raise errors.NotPlaced(f"job {self._ref.name} is {state}; only a running one is saved")
        attempt = TakeCheckpointResult(self.checkpoints.request(now), self._log.last)
        return attempt, self.begin_when_due(now)

    def request_from(self, start: float, now: float) -> list[Effect]:
        """Takes one more, which begins at `start` at the earliest."""
        self.checkpoints.request(start)
        return self.begin_when_due(now)

    def request_last(self, now: float) -> None:
        """All workers are through: takes one more, if the job's policy says so."""
        if self.checkpoints.at_end:
            self.checkpoints.request(now)

    def begin_when_due(self, now: float) -> list[Effect]:
        """Begins a checkpoint, if it is time."""
        placed = self._lifecycle.running and self._plan.placement is not None
        if not placed or not self.checkpoints.due(now, self._worker_group.step):
            return []
        self.checkpoints.begin(now, self._worker_group.step)
        return [ScanCheckpoints(self._ref)]

    def scanned(self, largest: int, *, last: bool) -> list[Effect]:
        """What the folder has under this name is known, so that the checkpoint under way can have a number.

        Args:
            largest: number in the folder.
            last: a server with shards of the job is going, so the job goes back to this one.
        """
        placement = self._plan.placement
        if placement is None:
            return []
        number = self.checkpoints.take_number(above=largest)
        return [TakeCut(self._ref, placement.generation, self._plan.servers, number, last)]

    def cut_taken(self, cut: CutTaken) -> list[Effect]:
        """All servers write their part."""
        if self._plan.placement is None:
            return []
        evaluation_schedule = self.evaluation_schedule
        best = evaluation_schedule.cut_taken(self.checkpoints.attempt) if evaluation_schedule else None
        keep = (evaluation_schedule.kept,) if evaluation_schedule and evaluation_schedule.kept else ()
        return [CommitCheckpoint(self._ref, self._plan.placement, self._spec, cut, best, keep)]

    def committed(self, event: CheckpointCommitted, now: float) -> list[Effect]:
        """The checkpoint that was under way is whole."""
        saved = event.saved
        self.checkpoints.committed(saved, event.removed)
        if self.evaluation_schedule and event.best:
            self.evaluation_schedule.checkpoint_committed(saved.number, event.best)
        self._tell(self.checkpoints.attempt, saved, "", now)
        return self.begin_when_due(now)  # another one was asked for meanwhile

    def failed(self, reason: str, now: float) -> list[Effect]:
        """The checkpoint that was under way was given up; those that matter the most are tried again."""
        checkpoints, evaluation_schedule = self.checkpoints, self.evaluation_schedule
        checkpoints.failed(reason)
        of_best = evaluation_schedule is not None and evaluation_schedule.checkpoint_failed(checkpoints.attempt)
        matters = of_best or self._lifecycle.closing
        again = matters and not checkpoints.pending and checkpoints.request_again(now)
        if of_best and evaluation_schedule and (again or checkpoints.pending):
            evaluation_schedule.expect_checkpoint(checkpoints.pending_attempt)
        self._tell(checkpoints.attempt, None, reason, now)
        return self.begin_when_due(now)

    # The job loses its shards, and goes on.

    def lose(self, saved: SavedCheckpoint | None, reason: str, now: float) -> bool:
        """The shards are lost, and with them what was under way.

        Args:
            saved: has all that is lost, and so all that checkpoints that were asked for since would have.
            reason: why the shards are lost.
            now: the time.

        Returns:
            Whether somebody was told that a checkpoint is whole.
        """
        told = self.checkpoints.pending  # somebody may wait for it
        if told:
            self._tell(self.checkpoints.pending_attempt, saved, "" if saved else reason, now)
        self.checkpoints.restart(now, 0)
        if self.evaluation_schedule:
            self.evaluation_schedule.restart()
        return told and saved is not None

    def resume_from(self, step: int, now: float) -> None:
        """The job goes on from a checkpoint, at this step."""
        self.checkpoints.restart(now, step)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        self.checkpoints.validate()
        if self.evaluation_schedule:
            self.evaluation_schedule.validate(self._worker_group.assignments)

    def _tell(self, attempt: int, saved: SavedCheckpoint | None, failure: str, now: float) -> None:
        """Tells those who wait for an attempt at a checkpoint what became of it."""
        seconds = max(0.0, now - self.checkpoints.began_at)
        self._log.append(CheckpointEnded(self._log.next, now, attempt, saved, seconds, failure))
