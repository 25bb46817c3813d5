"""Coordination of a job's checkpoints with its evaluations. Pure: no clock, no I/O.

`CheckpointSchedule` and `EvaluationSchedule` each handle their own events. This module handles what an evaluation means
for checkpoints, and what a checkpoint means for evaluations. When an evaluation has the best result so far, this
module requests a checkpoint, which then refers to that evaluation. Two kinds of checkpoints are tried again if they
fail: those of a best evaluation, and the final one. `JobMachine` decides what follows for the job as a whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal import errors
from shoal._security import AccessRole
from shoal._wire import EvaluationAck, EvaluationClaim
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.events import CheckpointEnded, EvaluationEnded
from shoal.status import Evaluation, SavedCheckpoint
from shoal_coordinator.job.checkpoints.evaluation_schedule import EvaluationSchedule
from shoal_coordinator.job.checkpoints.schedule import NO_STORAGE, CheckpointSchedule
from shoal_coordinator.job.owners import Owners
from shoal_coordinator.job.submission import Submission
from shoal_coordinator.messages import (
    CheckpointCommitted,
    CheckpointPublished,
    CommitCheckpoint,
    CutTaken,
    Effect,
    JobRecordKind,
    RestoredCheckpoint,
    ScanCheckpoints,
    SetLearningRate,
    TakeCheckpointResult,
    TakeCut,
)


class CheckpointCoordinator:
    """Decides about the checkpoints and evaluations of one job.

    Args:
        submission: the job.
        owners: owners of the job's state. The log receives each checkpoint and evaluation, and the lifecycle the reason
            for an early stop. The plan receives each reduction of the learning rate. The others are only read.
        now: seconds of Unix time, as in every method.
        changed: called with the name of a record that has changed.
        possible: whether the cluster has checkpoint storage.

    Attributes:
        checkpoints: the job's checkpoints, for reading.
        evaluation_schedule: the job's evaluations, for reading; None without an evaluation policy.
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
        self._submission, self._spec = submission, spec
        self._log, self._lifecycle = owners.log, owners.lifecycle
        self._plan, self._worker_group = owners.plan, owners.worker_group
        policy = spec.checkpoints or CheckpointPolicy()
        self.checkpoints = CheckpointSchedule(
            policy, now, lambda: changed(JobRecordKind.CHECKPOINTS), possible=possible
        )
        self.evaluation_schedule = (
            EvaluationSchedule(spec.evaluation, lambda: changed(JobRecordKind.EVALUATION)) if spec.evaluation else None
        )

    # Current state.

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is in progress, or requested and possible."""
        return self.checkpoints.pending

    @property
    def stopping(self) -> str:
        """Why the job ends before its data is done; empty if it does not."""
        return self.evaluation_schedule.stopping if self.evaluation_schedule else ""

    @property
    def owes_evaluation(self) -> bool:
        """Whether the final evaluation is still to come."""
        return self.evaluation_schedule is not None and self.evaluation_schedule.owes

    @property
    def has_evaluator(self) -> bool:
        """Whether a worker evaluates now."""
        return self.evaluation_schedule is not None and self.evaluation_schedule.has_evaluator

    @property
    def latest(self) -> Evaluation | None:
        """The latest evaluation; None if there was none."""
        return self.evaluation_schedule.latest if self.evaluation_schedule else None

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation so far; None if none returned a number."""
        return self.evaluation_schedule.best if self.evaluation_schedule else None

    # Evaluations.

    def claim_evaluation(self, worker: str, step: int, *, finished_training: bool) -> EvaluationClaim:
        """Gives a worker the evaluation that is due at its step, unless another worker has it.

        Args:
            worker: id of the worker.
            step: its step.
            finished_training: whether only the final evaluation is left for it to do.

        Returns:
            The evaluation to do, if any, and whether the worker has to stop.
        """
        if self.evaluation_schedule is None or not self._lifecycle.running:
            return EvaluationClaim()
        own = self._worker_group.active[worker].assignment
        others = self._worker_group.assignments - {own}
        return EvaluationClaim(
            self.evaluation_schedule.claim(own, step, others, finished_training=finished_training),
            stop=bool(self.stopping),
        )

    def lacks(self, result: Evaluation) -> str:
        """Returns why a worker's result is unusable; empty if it is usable or the job has no evaluation policy."""
        return self.evaluation_schedule.lacks(result) if self.evaluation_schedule else ""

    def report_evaluation(self, worker: str, result: Evaluation, now: float) -> tuple[EvaluationAck, list[Effect]]:
        """Records a worker's result, and decides what follows.

        Args:
            worker: id of the worker.
            result: what it found.
            now: seconds of Unix time.

        Returns:
            The reply to the worker, and the effects.
        """
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
            if evaluation_schedule.reduces(found):
                effects += self._reduce_learning_rate(now)
            if is_best and evaluation_schedule.checkpoints_best and checkpoints.possible:
                evaluation_schedule.expect_checkpoint(checkpoints.request(now))
                effects += self.begin_when_due(now)
        # If other workers continue meanwhile, waiting for the cut would gain nothing.
        waits_for_all = self._spec.consistency.needs_every_worker
        wait = evaluation_schedule.awaits_cut and not checkpoints.failure and waits_for_all
        return EvaluationAck(wait, stop=bool(self.stopping)), effects

    def _reduce_learning_rate(self, now: float) -> list[Effect]:
        """Reduces the learning rate, as the evaluation policy says; see `shoal.optim.ReduceOnPlateau`."""
        policy, schedule = self._spec.evaluation, self._plan.learning_rate or self._spec.optimizer.schedule
        reduction = policy.reduce_on_plateau if policy else None
        if policy is None or reduction is None:
            return []
        new = reduction.reduced(schedule.learning_rate)
        if new == schedule.learning_rate:
            return []
        reduced = replace(schedule, learning_rate=new)
        self._plan.set_learning_rate(reduced)
        why = f"{policy.metric} did not improve in {reduction.patience + 1} evaluations"
        change = f"from {schedule.learning_rate:g} to {new:g}"
        self._lifecycle.note(f"the learning rate is reduced {change}: {why}", now)
        return [SetLearningRate(self._ref, reduced, self._plan.servers)]

    def release(self, assignment: int) -> None:
        """Takes back the evaluation of a worker that has no assignment any more."""
        if self.evaluation_schedule:
            self.evaluation_schedule.release(assignment)

    # Checkpoints, in the order of their steps.

    def request(self, now: float) -> tuple[TakeCheckpointResult, list[Effect]]:
        """Requests a checkpoint, to begin now or after the one in progress.

        Raises:
            StorageFailed: the cluster has no checkpoint storage.
            JobEnded: the job has ended.
            NotPlaced: the job is not running yet, or not again.
        """
        if not self.checkpoints.possible:
            raise errors.StorageFailed(NO_STORAGE)
        if not self._lifecycle.running:
            refusal = errors.JobEnded if self._lifecycle.ended else errors.NotPlaced
            state = self._lifecycle.state.value
            raise refusal(f"job {self._ref.name} is {state}; only a running job can be saved")
        attempt = TakeCheckpointResult(self.checkpoints.request(now), self._log.last)
        return attempt, self.begin_when_due(now)

    def request_from(self, start: float, now: float) -> list[Effect]:
        """Requests a checkpoint that begins no earlier than `start`."""
        self.checkpoints.request(start)
        return self.begin_when_due(now)

    def request_last(self, now: float) -> None:
        """Requests the final checkpoint, if the job's policy has one. All workers have finished."""
        if self.checkpoints.at_end:
            self.checkpoints.request(now)

    def begin_when_due(self, now: float) -> list[Effect]:
        """Begins a checkpoint if one is due."""
        placed = self._lifecycle.running and self._plan.placement is not None
        if not placed or not self.checkpoints.due(now, self._worker_group.step):
            return []
        self.checkpoints.begin(now, self._worker_group.step)
        return [ScanCheckpoints(self._ref)]

    def scanned(self, largest: int, *, last: bool) -> list[Effect]:
        """Gives the checkpoint in progress a number, after the storage was scanned.

        Args:
            largest: the largest number in the storage under this job's name.
            last: whether a server with shards of the job is draining, so that the job restarts from this checkpoint.

        Returns:
            The effects.
        """
        placement = self._plan.placement
        if placement is None:
            return []
        number = self.checkpoints.take_number(above=largest)
        return [TakeCut(self._ref, placement.generation, self._plan.servers, number, last)]

    def cut_taken(self, cut: CutTaken) -> list[Effect]:
        """Returns the effect that commits the checkpoint, after all servers began to write their shards."""
        if self._plan.placement is None:
            return []
        evaluation_schedule = self.evaluation_schedule
        best = evaluation_schedule.cut_taken(self.checkpoints.attempt) if evaluation_schedule else None
        keep = (evaluation_schedule.kept,) if evaluation_schedule and evaluation_schedule.kept else ()
        rate, plateau = self._plan.learning_rate, evaluation_schedule.plateau if evaluation_schedule else None
        owner, keeps_others = self._submission.owner, self._submission.submitter_role == AccessRole.SUBMITTER
        return [
            CommitCheckpoint(
                self._ref, self._plan.placement, self._spec, cut, best, keep, rate, plateau, owner, keeps_others
            )
        ]

    def published(self, event: CheckpointPublished | CheckpointCommitted) -> None:
        """Records that the checkpoint in progress can be restored. Repeating it changes nothing."""
        self.checkpoints.published(event.saved)
        if self.evaluation_schedule and event.best:
            self.evaluation_schedule.checkpoint_committed(event.saved.number, event.best)

    def removed(self, numbers: Sequence[int]) -> None:
        """Records that the storage no longer has these checkpoints."""
        self.checkpoints.removed(numbers)

    def committed(self, event: CheckpointCommitted, now: float) -> list[Effect]:
        """Records that the checkpoint in progress is complete, and that those that it replaces are removed."""
        saved = event.saved
        self.published(event)
        self.checkpoints.committed(saved, event.removed)
        self._log_end(self.checkpoints.attempt, saved, "", now)
        return self.begin_when_due(now)  # another one may have been requested meanwhile

    def failed(self, reason: str, now: float) -> list[Effect]:
        """Records that the checkpoint in progress failed. An important one is tried again."""
        checkpoints, evaluation_schedule = self.checkpoints, self.evaluation_schedule
        checkpoints.failed(reason)
        of_best = evaluation_schedule is not None and evaluation_schedule.checkpoint_failed(checkpoints.attempt)
        matters = of_best or self._lifecycle.all_workers_finished
        again = matters and not checkpoints.pending and checkpoints.request_again(now)
        if of_best and evaluation_schedule and (again or checkpoints.pending):
            evaluation_schedule.expect_checkpoint(checkpoints.pending_attempt)
        self._log_end(checkpoints.attempt, None, reason, now)
        return self.begin_when_due(now)

    # Loss of shards.

    def lose(self, saved: SavedCheckpoint | None, reason: str, now: float) -> bool:
        """Ends the checkpoint in progress, because the shards are lost.

        Args:
            saved: a checkpoint that contains everything that the lost shards held, and so satisfies all requests; or
                None.
            reason: why the shards are lost.
            now: seconds of Unix time.

        Returns:
            Whether a watcher was told that a checkpoint is complete.
        """
        reported = self.checkpoints.pending  # a watcher may wait for it
        if saved is None and not self.checkpoints.requested:
            saved = self.checkpoints.in_progress  # only the removal of older ones was left
        if reported:
            self._log_end(self.checkpoints.pending_attempt, saved, "" if saved else reason, now)
        self.checkpoints.restart(now, 0)
        if self.evaluation_schedule:
            self.evaluation_schedule.restart()
        return reported and saved is not None

    def resume_from(self, restored: RestoredCheckpoint, now: float) -> None:
        """Continues from a checkpoint."""
        self.checkpoints.restart(now, restored.step)
        if self.evaluation_schedule and restored.plateau:
            self.evaluation_schedule.resume_from(restored.plateau)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        self.checkpoints.validate()
        if self.evaluation_schedule:
            self.evaluation_schedule.validate(self._worker_group.assignments)

    def _log_end(self, attempt: int, saved: SavedCheckpoint | None, failure: str, now: float) -> None:
        """Logs the end of a checkpoint attempt, for those who wait for it."""
        seconds = max(0.0, now - self.checkpoints.began_at)
        self._log.append(CheckpointEnded(self._log.next, now, attempt, saved, seconds, failure))
