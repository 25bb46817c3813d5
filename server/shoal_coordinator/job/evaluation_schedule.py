"""Schedule of one job's evaluations: which worker evaluates, which result is best, and early stopping. Pure: no I/O.

Each worker asks at the steps that the policy names, by its own step count. The first worker to ask evaluates. If
workers differ in speed, that is the one with the most steps. If it dies, no worker waits for it, because the next
evaluation is due soon. At the end, the last worker to finish evaluates, because no worker changes the variables after
that.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import replace

from shoal.evaluation_policy import EvaluationPolicy
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
        self._mark = 0  # multiples of `every_steps` reached at that evaluation
        self._holder = 0  # assignment of the worker that evaluates; 0: none
        self._through: set[int] = set()  # assignments that have only the final evaluation left
        self._furthest = 0  # the largest step reported by any worker
        self._ended = False  # the final evaluation was reported
        self._latest: Evaluation | None = None
        self._best: Evaluation | None = None
        self._bar: Evaluation | None = None  # the best since the job began or restarted, for patience
        self._since_bar = 0  # number of evaluations after it
        self._stopping = ""  # why the job ends early
        self._attempt, self._cut = 0, False  # attempt at the best one's checkpoint; whether its cut is taken
        self._kept = self._kept_evaluation = 0  # newest complete checkpoint of a best one; its evaluation

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
        return self._policy.at_end and not self._ended

    @property
    def checkpoints_best(self) -> bool:
        """Whether a checkpoint is taken at each evaluation that is the best so far."""
        return self._policy.checkpoint_best

    @property
    def kept(self) -> int:
        """The newest complete checkpoint that was taken at a best evaluation; 0 if there is none."""
        return self._kept

    def claim(self, assignment: int, step: int, others: Collection[int], *, through: bool) -> int:
        """Gives a worker the evaluation that is due at its step.

        Args:
            assignment: the worker's assignment.
            step: the worker's step.
            others: the assignments of all other live workers.
            through: whether only the final evaluation is left for it to do.

        Returns:
            The number of the evaluation to do; 0 if none is due.
        """
        if assignment == self._holder and (assignment in self._through or not through):
            return self._number  # a repeat: the reply was lost
        if step > self._furthest:
            self._furthest = step
            self._changed()
        if through:
            self._through.add(assignment)
            self._changed()
            return self._give(assignment) if self.owes and self._through.issuperset(others) else 0
        every = self._policy.every_steps
        mark = step // every if every else 0
        if mark <= self._mark or self._holder or self._stopping:
            return 0
        self._mark = mark
        return self._give(assignment)

    def report(self, assignment: int, result: Evaluation) -> tuple[Evaluation, bool] | None:
        """Records a worker's result.

        Returns:
            The result, and whether it is the best so far; None if the worker does not hold this evaluation.
        """
        if assignment != self._holder or result.number != self._number:
            return None
        if at_end := assignment in self._through:  # the values include the steps of all other workers
            result = replace(result, step=max(result.step, self._furthest))
        self._holder, self._latest, self._ended = 0, result, at_end
        is_best = self._beats(result, self._best)
        if is_best:
            self._best = result
        if self._beats(result, self._bar):
            self._bar, self._since_bar = result, 0
        else:
            self._since_bar += 1
        if 0 < self._policy.patience <= self._since_bar and not (at_end or self._stopping):
            metric, bar = self._policy.metric, self._bar
            detail = f"no better than {bar.values[metric]:g} (step {bar.step})" if bar else "no number"
            self._stopping = f"stopped early: {metric} was {detail} in {self._since_bar} evaluations"
        self._changed()
        return result, is_best

    def lacks(self, result: Evaluation) -> str:
        """Returns why a result is unusable; empty if it is usable."""
        problem = self._policy.missing_metric(result.values)
        return f"the program's evaluation {problem}" if problem else ""

    def release(self, assignment: int) -> None:
        """Takes back the evaluation of a worker that has no assignment any more."""
        if assignment == self._holder or assignment in self._through:
            self._holder = 0 if assignment == self._holder else self._holder
            self._through.discard(assignment)
            self._changed()

    def restart(self) -> None:
        """Prepares for steps that are repeated, because the job restarts.

        The best evaluation stays if its checkpoint is complete. Patience always starts from zero.
        """
        self._mark = self._holder = self._furthest = self._attempt = self._since_bar = 0
        self._cut = self._ended = False
        self._through.clear()
        self._bar, self._stopping = None, ""
        if self._best and self._best.number != self._kept_evaluation:
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
        self._attempt, self._cut = attempt, False
        self._changed()

    @property
    def awaits_cut(self) -> bool:
        """Whether the cut for the best evaluation's checkpoint is still to come."""
        return self._attempt > 0 and not self._cut

    def cut_taken(self, attempt: int) -> Evaluation | None:
        """Records a cut; returns the evaluation that it belongs to, or None."""
        if not (self.awaits_cut and self._attempt <= attempt):
            return None
        self._attempt, self._cut = attempt, True
        self._changed()
        return self._best

    def checkpoint_committed(self, number: int, best: int) -> None:
        """Records that the checkpoint of a best evaluation is complete; `best` is the number of the evaluation."""
        self._kept, self._kept_evaluation = number, best
        if self._cut:
            self._attempt, self._cut = 0, False
        self._changed()

    def checkpoint_failed(self, attempt: int) -> bool:
        """Records a failed checkpoint attempt; returns whether it was for the best evaluation."""
        if not 0 < self._attempt <= attempt:
            return False
        self._attempt, self._cut = 0, False
        self._changed()
        return True

    def _give(self, assignment: int) -> int:
        self._number += 1
        self._holder = assignment
        self._changed()
        return self._number

    def to_proto(self) -> state_pb2.EvaluationRecord:
        """Returns the record of these evaluations."""
        return state_pb2.EvaluationRecord(
            number=self._number,
            mark=self._mark,
            holder=self._holder,
            latest=self._latest.to_proto() if self._latest else None,
            best=self._best.to_proto() if self._best else None,
            bar=self._bar.to_proto() if self._bar else None,
            since_bar=self._since_bar,
            through=sorted(self._through),
            furthest=self._furthest,
            ended=self._ended,
            stopping=self._stopping,
            attempt=self._attempt,
            cut=self._cut,
            kept=self._kept,
            kept_evaluation=self._kept_evaluation,
        )

    def restore_from(self, record: state_pb2.EvaluationRecord) -> None:
        """Restores the schedule from a record."""
        self._number, self._mark, self._holder = record.number, record.mark, record.holder
        self._latest = Evaluation.from_proto(record.latest) if record.HasField("latest") else None
        self._best = Evaluation.from_proto(record.best) if record.HasField("best") else None
        self._bar = Evaluation.from_proto(record.bar) if record.HasField("bar") else None
        self._since_bar, self._through = record.since_bar, set(record.through)
        self._furthest, self._ended, self._stopping = record.furthest, record.ended, record.stopping
        self._attempt, self._cut = record.attempt, record.cut
        self._kept, self._kept_evaluation = record.kept, record.kept_evaluation

    def validate(self, active: Collection[int]) -> None:
        """Raises AssertionError if an invariant is broken; `active` are the assignments of live workers."""
        assert self._number or not self._holder
        assert not self._holder or self._holder in active, "the evaluating worker is gone"
        assert self._through.issubset(active), "a worker with only the final evaluation left is gone"
        assert self._latest or not (self._best or self._since_bar or self._stopping or self._attempt or self._kept)
        assert self._attempt or not self._cut
