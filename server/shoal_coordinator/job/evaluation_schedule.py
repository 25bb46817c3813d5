"""One job's evaluations: whose turn it is, which is the best, and whether the job ends early. Pure: no clock, no I/O.

Workers ask at the steps that the policy names, each at its own; the first to ask evaluates, so in uneven crews the one
that is ahead. One that dies meanwhile is not waited for: the next is due soon. At the end the last that is through
evaluates, when nobody changes the variables any more.
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
        policy: when they are due, and what follows.
        changed: told that the record is another one now.
    """

    def __init__(self, policy: EvaluationPolicy, changed: Callable[[], None] = lambda: None) -> None:
        self._policy = policy
        self._changed = changed
        self._number = 0  # the latest that was given out
        self._mark = 0  # how many times `every_steps` had come then
        self._holder = 0  # the assignment of who evaluates; 0: nobody does
        self._through: set[int] = set()  # assignments of those that are through, but for the end's evaluation
        self._furthest = 0  # the largest step that any worker has said
        self._ended = False  # the end's evaluation was reported
        self._latest: Evaluation | None = None
        self._best: Evaluation | None = None
        self._bar: Evaluation | None = None  # the best since the job began or went back, for patience
        self._since_bar = 0  # how many came after it
        self._stopping = ""  # why the job ends early
        self._attempt, self._cut = 0, False  # at the best one's checkpoint, until it is over; whether its cut is made
        self._kept = self._kept_evaluation = 0  # the newest whole checkpoint of a best one, and which one that was

    @property
    def latest(self) -> Evaluation | None:
        """The last one; None: there was none."""
        return self._latest

    @property
    def best(self) -> Evaluation | None:
        """The best one so far; None: none gave a number."""
        return self._best

    @property
    def stopping(self) -> str:
        """Why the job ends before its data is done; empty: it does not."""
        return self._stopping

    @property
    def owes(self) -> bool:
        """Whether the evaluation at the end is to come."""
        return self._policy.at_end and not self._ended

    @property
    def checkpoints_best(self) -> bool:
        """Whether there is to be a checkpoint of each that is the best so far."""
        return self._policy.checkpoint_best

    @property
    def kept(self) -> int:
        """The newest whole checkpoint that was taken at a best one; 0: there is none."""
        return self._kept

    def ask(self, assignment: int, step: int, others: Collection[int], *, through: bool) -> int:
        """A worker has come to a step where one may be due.

        Args:
            assignment: of its part in the job.
            step: its own.
            others: the assignments of all others that are at work.
            through: it has nothing left to do but this.

        Returns:
            The number of the evaluation that it is to do; 0: none.
        """
        if assignment == self._holder and (assignment in self._through or not through):
            return self._number  # it asks again, for the answer was lost
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
        """What a worker has found.

        Returns:
            The result, and whether it is the best so far; None: this was not its to do, or it has said so before.
        """
        if assignment != self._holder or result.number != self._number:
            return None
        if at_end := assignment in self._through:  # others may have gone further, and it has seen all that they did
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
            than = f"no better than {bar.values[metric]:g} (step {bar.step})" if bar else "no number"
            self._stopping = f"stopped early: {metric} was {than} in {self._since_bar} evaluations"
        self._changed()
        return result, is_best

    def lacks(self, result: Evaluation) -> str:
        """Why a result is of no use; empty: it is of use."""
        lack = self._policy.missing_metric(result.values)
        return f"the program's evaluation {lack}" if lack else ""

    def release(self, assignment: int) -> None:
        """A worker has no part in the job any more; what it was evaluating is lost."""
        if assignment == self._holder or assignment in self._through:
            self._holder = 0 if assignment == self._holder else self._holder
            self._through.discard(assignment)
            self._changed()

    def restart(self) -> None:
        """The job goes on from a checkpoint or from its beginning, so steps that were evaluated come again.

        What was the best stays the best where its variables are kept; patience is counted anew in any case.
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

    # The best one's checkpoint.

    def expect_checkpoint(self, attempt: int) -> None:
        """A checkpoint of the best one is to be taken."""
        self._attempt, self._cut = attempt, False
        self._changed()

    @property
    def awaits_cut(self) -> bool:
        """Whether the cut for the best one's checkpoint is to come."""
        return self._attempt > 0 and not self._cut

    def cut_taken(self, attempt: int) -> Evaluation | None:
        """The servers have the values of an attempt at a checkpoint. The evaluation that it is for; None: for none."""
        if not (self.awaits_cut and self._attempt <= attempt):
            return None
        self._attempt, self._cut = attempt, True
        self._changed()
        return self._best

    def checkpoint_committed(self, number: int, best: int) -> None:
        """A checkpoint that was taken at a best evaluation, this one, is whole."""
        self._kept, self._kept_evaluation = number, best
        if self._cut:
            self._attempt, self._cut = 0, False
        self._changed()

    def checkpoint_failed(self, attempt: int) -> bool:
        """An attempt at a checkpoint was given up. Whether it was at the best one's."""
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
        """The record of these evaluations."""
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
        """Goes on from a record."""
        self._number, self._mark, self._holder = record.number, record.mark, record.holder
        self._latest = Evaluation.from_proto(record.latest) if record.HasField("latest") else None
        self._best = Evaluation.from_proto(record.best) if record.HasField("best") else None
        self._bar = Evaluation.from_proto(record.bar) if record.HasField("bar") else None
        self._since_bar, self._through = record.since_bar, set(record.through)
        self._furthest, self._ended, self._stopping = record.furthest, record.ended, record.stopping
        self._attempt, self._cut = record.attempt, record.cut
        self._kept, self._kept_evaluation = record.kept, record.kept_evaluation

    def validate(self, active: Collection[int]) -> None:
        """Raises AssertionError if an invariant is broken; `active` are the assignments of those at work."""
        assert self._number or not self._holder
        assert not self._holder or self._holder in active, "who evaluates is gone"
        assert self._through.issubset(active), "who is through is gone"
        assert self._latest or not (self._best or self._since_bar or self._stopping or self._attempt or self._kept)
        assert self._attempt or not self._cut
