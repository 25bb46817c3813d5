"""Schedule of one job's evaluations: which worker evaluates, which result is best, and early stopping. Pure: no I/O.

Each worker counts its own steps. When it reaches a step that the policy names, it asks whether to evaluate. The first
worker to ask evaluates. If workers differ in speed, this is the worker with the most steps. If it dies, no other worker
repeats its evaluation, because the next one is due soon. At the end of the job, the last worker to finish evaluates,
because no worker changes the variables after that.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import replace

from shoal.evaluation_policy import EvaluationPolicy
from shoal.optim import PlateauState
from shoal.status import Evaluation
from shoal.v1 import state_pb2


class EvaluationSchedule:
    """The state machine of one job's evaluations.

    Args:
        policy: when evaluations are due, and what follows from them.
        changed: called when the record has changed.
    """

    def __init__(self, policy: EvaluationPolicy, changed: Callable[[], None] = lambda: None) -> None:
        self._policy = policy
        self._changed = changed
        self._number = 0  # the latest number
        self._intervals = 0  # multiples of `every_steps` reached at that evaluation
        self._evaluator = 0  # assignment of the worker that evaluates; 0: none
        self._finished_training: set[int] = set()  # assignments that have only the final evaluation left
        self._largest_step = 0  # the largest step reported by any worker
        self._final_reported = False  # the final evaluation was reported
        self._latest: Evaluation | None = None
        self._best: Evaluation | None = None
        self._patience_best: Evaluation | None = None  # the best since the job began or restarted, for patience
        self._since_patience_best = 0  # number of evaluations after it
        self._stopping = ""  # why the job ends early
        self._plateau = PlateauState()
        self._best_attempt = 0  # the attempt at a checkpoint of the best evaluation, while it is in progress
        self._best_cut_taken = False  # whether its cut is taken
        self._best_checkpoint = 0  # the newest complete checkpoint of a best evaluation
        self._best_checkpoint_evaluation = 0  # the number of that evaluation

    @property
    def latest(self) -> Evaluation | None:
        """The latest evaluation; None if there was none."""
        return self._latest

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation so far; None if none returned a number."""
        return self._best

    @property
    def stopping(self) -> str:
        """Why the job ends before its data is done; empty if it does not."""
        return self._stopping

    @property
    def owes(self) -> bool:
        """Whether the final evaluation is still to come."""
        return self._policy.at_end and not self._final_reported

    @property
    def has_evaluator(self) -> bool:
        """Whether a worker evaluates now."""
        return self._evaluator != 0

    @property
    def checkpoints_best(self) -> bool:
        """Whether a checkpoint is taken at each evaluation that is the best so far."""
        return self._policy.checkpoint_best

    @property
    def kept(self) -> int:
        """The newest complete checkpoint that was taken at a best evaluation; 0 if there is none."""
        return self._best_checkpoint

    def claim(self, assignment: int, step: int, others: Collection[int], *, finished_training: bool) -> int:
        """Gives a worker the evaluation that is due at its step.

        Args:
            assignment: the worker's assignment.
            step: the worker's step.
            others: the assignments of all other live workers.
            finished_training: whether only the final evaluation is left for it to do.

        Returns:
            The number of the evaluation to do; 0 if none is due.
        """
        if assignment == self._evaluator and (assignment in self._finished_training or not finished_training):
            return self._number  # a repeat: the reply was lost
        if step > self._largest_step:
            self._largest_step = step
            self._changed()
        if finished_training:
            self._finished_training.add(assignment)
            self._changed()
            return self._give(assignment) if self.owes and self._finished_training.issuperset(others) else 0
        every = self._policy.every_steps
        intervals = step // every if every else 0
        if intervals <= self._intervals or self._evaluator or self._stopping:
            return 0
        self._intervals = intervals
        return self._give(assignment)

    def report(self, assignment: int, result: Evaluation) -> tuple[Evaluation, bool] | None:
        """Records a worker's result.

        Returns:
            The result, and whether it is the best so far; None if the worker does not hold this evaluation.
        """
        if assignment != self._evaluator or result.number != self._number:
            return None
        if at_end := assignment in self._finished_training:  # the values include the steps of all other workers
            result = replace(result, step=max(result.step, self._largest_step))
        self._evaluator, self._latest, self._final_reported = 0, result, at_end
        is_best = self._beats(result, self._best)
        if is_best:
            self._best = result
        if self._beats(result, self._patience_best):
            self._patience_best, self._since_patience_best = result, 0
        else:
            self._since_patience_best += 1
        if 0 < self._policy.patience <= self._since_patience_best and not (at_end or self._stopping):
            metric, bar = self._policy.metric, self._patience_best
            detail = f"no better than {bar.values[metric]:g} (step {bar.step})" if bar else "no number"
            self._stopping = f"stopped early: {metric} was {detail} in {self._since_patience_best} evaluations"
        self._changed()
        return result, is_best

    @property
    def plateau(self) -> PlateauState | None:
        """The state of the reduction of the learning rate; None if the policy has none."""
        return self._plateau if self._policy.reduce_on_plateau else None

    def reduces(self, result: Evaluation) -> bool:
        """Counts a reported evaluation for the learning rate; returns whether it reduces the rate.

        Args:
            result: the evaluation, which `report` has recorded.
        """
        reduction = self._policy.reduce_on_plateau
        if reduction is None or self._final_reported:
            return False
        value, minimizes = result.values[self._policy.metric], self._policy.minimizes
        self._plateau, reduces = reduction.after(self._plateau, value, minimizes=minimizes)
        self._changed()
        return reduces

    def resume_from(self, plateau: PlateauState) -> None:
        """Continues with the state of a checkpoint."""
        self._plateau = plateau
        self._changed()

    def lacks(self, result: Evaluation) -> str:
        """Returns why a result is unusable; empty if it is usable."""
        problem = self._policy.missing_metric(result.values)
        return f"the program's evaluation {problem}" if problem else ""

    def release(self, assignment: int) -> None:
        """Takes back the evaluation of a worker that has no assignment any more."""
        if assignment == self._evaluator or assignment in self._finished_training:
            self._evaluator = 0 if assignment == self._evaluator else self._evaluator
            self._finished_training.discard(assignment)
            self._changed()

    def restart(self) -> None:
        """Prepares for steps that are repeated, because the job restarts.

        The best evaluation stays if its checkpoint is complete. Patience always starts from zero. `resume_from` then
        restores the state of the reduction of the learning rate.
        """
        self._intervals = self._evaluator = self._largest_step = self._best_attempt = self._since_patience_best = 0
        self._best_cut_taken = self._final_reported = False
        self._finished_training.clear()
        self._patience_best, self._stopping, self._plateau = None, "", PlateauState()
        if self._best and self._best.number != self._best_checkpoint_evaluation:
            self._best = None
        self._changed()

    def _beats(self, result: Evaluation, other: Evaluation | None) -> bool:
        value = result.values[self._policy.metric]
        if other is None:
            return not math.isnan(value)
        return self._policy.is_better(value, other.values[self._policy.metric])

    # The checkpoint of the best evaluation.

    def expect_checkpoint(self, attempt: int) -> None:
        """Expects an attempt at a checkpoint of the best evaluation."""
        self._best_attempt, self._best_cut_taken = attempt, False
        self._changed()

    @property
    def awaits_cut(self) -> bool:
        """Whether the cut for the best evaluation's checkpoint is still to come."""
        return self._best_attempt > 0 and not self._best_cut_taken

    def cut_taken(self, attempt: int) -> Evaluation | None:
        """Records a cut; returns the evaluation that it belongs to, or None."""
        if not (self.awaits_cut and self._best_attempt <= attempt):
            return None
        self._best_attempt, self._best_cut_taken = attempt, True
        self._changed()
        return self._best

    def checkpoint_committed(self, number: int, best: int) -> None:
        """Records that the checkpoint of a best evaluation is complete; `best` is the number of the evaluation."""
        self._best_checkpoint, self._best_checkpoint_evaluation = number, best
        if self._best_cut_taken:
            self._best_attempt, self._best_cut_taken = 0, False
        self._changed()

    def checkpoint_failed(self, attempt: int) -> bool:
        """Records a failed checkpoint attempt; returns whether it was for the best evaluation."""
        if not 0 < self._best_attempt <= attempt:
            return False
        self._best_attempt, self._best_cut_taken = 0, False
        self._changed()
        return True

    def _give(self, assignment: int) -> int:
        self._number += 1
        self._evaluator = assignment
        self._changed()
        return self._number

    def to_proto(self) -> state_pb2.EvaluationRecord:
        """Returns the record of these evaluations."""
        return state_pb2.EvaluationRecord(
            number=self._number,
            intervals=self._intervals,
            evaluator=self._evaluator,
            latest=self._latest.to_proto() if self._latest else None,
            best=self._best.to_proto() if self._best else None,
            patience_best=self._patience_best.to_proto() if self._patience_best else None,
            since_patience_best=self._since_patience_best,
            finished_training=sorted(self._finished_training),
            largest_step=self._largest_step,
            final_reported=self._final_reported,
            stopping=self._stopping,
            best_attempt=self._best_attempt,
            best_cut_taken=self._best_cut_taken,
            best_checkpoint=self._best_checkpoint,
            best_checkpoint_evaluation=self._best_checkpoint_evaluation,
            plateau=self.plateau.to_proto() if self.plateau else None,
        )

    def restore_from(self, record: state_pb2.EvaluationRecord) -> None:
        """Restores the schedule from a record."""
        self._number, self._intervals, self._evaluator = record.number, record.intervals, record.evaluator
        self._latest = Evaluation.from_proto(record.latest) if record.HasField("latest") else None
        self._best = Evaluation.from_proto(record.best) if record.HasField("best") else None
        self._patience_best = Evaluation.from_proto(record.patience_best) if record.HasField("patience_best") else None
        self._since_patience_best, self._finished_training = record.since_patience_best, set(record.finished_training)
        self._largest_step, self._final_reported = record.largest_step, record.final_reported
        self._stopping = record.stopping
        self._best_attempt, self._best_cut_taken = record.best_attempt, record.best_cut_taken
        self._best_checkpoint = record.best_checkpoint
        self._best_checkpoint_evaluation = record.best_checkpoint_evaluation
        self._plateau = PlateauState.from_proto(record.plateau)

    def validate(self, active: Collection[int]) -> None:
        """Raises AssertionError if an invariant is broken; `active` are the assignments of live workers."""
        assert self._number or not self._evaluator
        assert not self._evaluator or self._evaluator in active, "the evaluating worker is gone"
        assert self._finished_training.issubset(active), "a worker with only the final evaluation left is gone"
        assert self._latest or not (
            self._best or self._since_patience_best or self._stopping or self._best_attempt or self._best_checkpoint
        )
        assert self._best_attempt or not self._best_cut_taken
