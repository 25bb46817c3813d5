"""One job's evaluations: whose turn it is, which is the best, and whether the job ends early. Pure: no clock, no I/O.

Workers ask at the steps that the policy names, each at its own; the first to ask evaluates, so in uneven crews the one
that is ahead. One that dies meanwhile is not waited for: the next is due soon. At the end the last that is through
evaluates, when nobody changes the variables any more.
"""

from collections.abc import Callable, Collection

from shoal.evaluation_policy import EvaluationPolicy
from shoal.status import Evaluation
from shoal.v1 import state_pb2


class Evaluating:
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
        self._latest: Evaluation | None = None
        self._best: Evaluation | None = None
        self._since_best = 0  # how many came after it
        self._stopping = ""  # why the job ends early
        self._cut_attempt = 0  # at the best one's checkpoint, until its cut is made or given up
        self._kept = 0  # number of the newest whole checkpoint that was taken at a best one

    @property
    def latest(self) -> Evaluation | None:
        """The last one; None: there was none."""
        return self._latest

    @property
    def best(self) -> Evaluation | None:
        """The best one so far."""
        return self._best

    @property
    def stopping(self) -> str:
        """Why the job ends before its data is done; empty: it does not."""
        return self._stopping

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
        if through:
            self._through.add(assignment)
            self._changed()
            return self._give(assignment) if self._policy.at_end and self._through.issuperset(others) else 0
        every = self._policy.every_steps
        mark = step // every if every else 0
        if mark <= self._mark or self._holder or self._stopping:
            return 0
        self._mark = mark
        return self._give(assignment)

    def report(self, assignment: int, result: Evaluation) -> bool | None:
        """What a worker has found.

        Returns:
            Whether it is the best so far; None: this was not its to do, or it has said so before.
        """
        if assignment != self._holder or result.number != self._number:
            return None
        self._holder, self._latest = 0, result
        metric, best = self._policy.metric, self._best
        is_best = best is None or self._policy.is_better(result.values[metric], best.values[metric])
        if is_best:
            self._best, self._since_best = result, 0
        else:
            self._since_best += 1
        at_end = assignment in self._through
        if best and 0 < self._policy.patience <= self._since_best and not (at_end or self._stopping):
            self._stopping = (
                f"stopped early: {metric} was no better than {best.values[metric]:g} (step {best.step}) in "
                f"{self._since_best} evaluations"
            )
        self._changed()
        return is_best

    def lacks(self, result: Evaluation) -> str:
        """Why a result is of no use; empty: it is of use."""
        metric = self._policy.metric
        if metric in result.values:
            return ""
        return (
            f"the program's evaluation gives {', '.join(sorted(result.values)) or 'nothing'}, and the job asks for "
            f"{metric!r}: set the metric of its EvaluationPolicy to one of them"
        )

    def release(self, assignment: int) -> None:
        """A worker has no part in the job any more; what it was evaluating is lost."""
        if assignment == self._holder or assignment in self._through:
            self._holder = 0 if assignment == self._holder else self._holder
            self._through.discard(assignment)
            self._changed()

    def restart(self) -> None:
        """The job goes on from a checkpoint or from its beginning, so steps that were evaluated come again.

        What was the best stays the best: its checkpoint is still there.
        """
        self._mark, self._holder, self._cut_attempt = 0, 0, 0
        self._through.clear()
        self._stopping, self._since_best = "", 0
        self._changed()

    # The best one's checkpoint.

    def await_cut(self, attempt: int) -> None:
        """A checkpoint of the best one is to be taken."""
        self._cut_attempt = attempt
        self._changed()

    @property
    def awaits_cut(self) -> bool:
        """Whether who has just evaluated should hold still for a moment, so that the checkpoint has what it saw."""
        return self._cut_attempt > 0

    def cut_made(self, attempt: int) -> Evaluation | None:
        """The servers have the values of an attempt at a checkpoint. The evaluation that it is for; None: for none."""
        if not 0 < self._cut_attempt <= attempt:
            return None
        self._cut_attempt = 0
        self._changed()
        return self._best

    def cut_failed(self, attempt: int) -> None:
        """An attempt at a checkpoint was given up."""
        if 0 < self._cut_attempt <= attempt:
            self._cut_attempt = 0
            self._changed()

    def keep(self, number: int) -> None:
        """A checkpoint that was taken at the best one is whole."""
        self._kept = number
        self._changed()

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
            since_best=self._since_best,
            through=sorted(self._through),
            stopping=self._stopping,
            cut_attempt=self._cut_attempt,
            kept=self._kept,
        )

    def take_up(self, record: state_pb2.EvaluationRecord) -> None:
        """Goes on from a record."""
        self._number, self._mark, self._holder = record.number, record.mark, record.holder
        self._latest = Evaluation.from_proto(record.latest) if record.HasField("latest") else None
        self._best = Evaluation.from_proto(record.best) if record.HasField("best") else None
        self._since_best, self._through = record.since_best, set(record.through)
        self._stopping, self._cut_attempt, self._kept = record.stopping, record.cut_attempt, record.kept

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self._number or not self._holder
        assert bool(self._best) == bool(self._latest)
        assert self._best or not (self._since_best or self._stopping or self._cut_attempt or self._kept)
