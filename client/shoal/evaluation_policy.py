"""What a job says of evaluation: when its held-out examples are evaluated, and what follows from it."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal import errors
from shoal._wire.figures import NAMES, is_name
from shoal.v1 import job_pb2

Goal = Literal["auto", "less", "more"]

_GOALS: Mapping[Goal, job_pb2.EvaluationPolicy.Goal.ValueType] = {
    "auto": job_pb2.EvaluationPolicy.GOAL_UNSPECIFIED,
    "less": job_pb2.EvaluationPolicy.LESS,
    "more": job_pb2.EvaluationPolicy.MORE,
}
_GOAL_NAMES = {code: name for name, code in _GOALS.items()}
# A metric without a goal: it is one of these if a word of its name begins or ends with one, as "top5" and "logloss" do.
_LESS = ("loss", "error", "mse", "rmse", "mae", "mape", "nll", "entropy", "perplexity")
_MORE = ("accuracy", "acc", "auc", "auroc", "top", "f1", "precision", "recall", "iou", "r2", "ndcg", "bleu", "reward")
_RANGES = {"every_steps": 2**64 - 1, "patience": 2**32 - 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPolicy:
    """When the program's held-out examples are evaluated, by one worker, and what the job makes of it.

    The program has `held_out` and `evaluate`: see `shoal.program.EvaluatedProgram`.

    Attributes:
        every_steps: steps from one to the next, of the worker that is ahead. 0: not by steps.
        at_end: one more when all workers are through, before the job has succeeded.
        metric: the figure that says which evaluation is the best.
        goal: whether "less" or "more" of it is better. "auto": as its name says: less of a loss, error, mse, rmse, mae,
            mape, nll, entropy or perplexity; more of an accuracy, acc, auc, auroc, top, f1, precision, recall, iou, r2,
            ndcg, bleu or reward; less where a name has both. Other names need "less" or "more".
        patience: the job ends, as one that succeeded, after so many evaluations in a row that are no better than the
            best. 0: never.
        least_gain: by so much it has to be better to count as better.
        checkpoint_best: take a checkpoint at each evaluation that is the best so far, and keep the newest of those:
            `JOB/best` names it. It has the very values that were evaluated if the job is synchronous without backup
            workers, unless a checkpoint that was under way took 10 s or longer to finish; else, updates that came
            meanwhile are in it, too. In a synchronous job the steps tell: that of the checkpoint is then a later one
            than the evaluation's.

    Raises:
        InvalidJob: a value is out of range, or the metric's name does not say which is better, and no goal does.
    """

    every_steps: int = 0
    at_end: bool = True
    metric: str = "loss"
    goal: Goal = "auto"
    patience: int = 0
    least_gain: float = 0.0
    checkpoint_best: bool = False

    def __post_init__(self) -> None:
        for name, most in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise errors.InvalidJob(f"{name} of evaluation is {value!r}; it must be a whole number, 0 or more")
        for name in ("at_end", "checkpoint_best"):
            if not isinstance(getattr(self, name), bool):
                raise errors.InvalidJob(f"{name} of evaluation is {getattr(self, name)!r}; it must be True or False")
        self._check_metric()
        if not self.every_steps and not self.at_end:
            raise errors.InvalidJob("evaluation neither by steps nor at the end: set every_steps, or leave it out")
        if self.patience and not self.every_steps:
            raise errors.InvalidJob("patience of evaluation without every_steps: nothing is evaluated before the end")

    def _check_metric(self) -> None:
        metric = self.metric
        if not is_name(metric):
            raise errors.InvalidJob(f"metric of evaluation is {metric!r:.80}; name a figure, by {NAMES}")
        if self.goal not in _GOALS:
            raise errors.InvalidJob(f"goal of evaluation is {self.goal!r}; it must be one of {', '.join(_GOALS)}")
        if self.goal == "auto" and not _named(metric, _LESS + _MORE):
            raise errors.InvalidJob(
                f"metric of evaluation is {metric!r}, whose name does not say whether less or more of it is better; "
                'set goal to "less" or "more"',
                metric=metric,
            )
        gain: object = self.least_gain
        if isinstance(gain, bool) or not isinstance(gain, int | float) or not 0 <= gain < math.inf:
            raise errors.InvalidJob(f"least_gain of evaluation is {gain!r}; it must be a finite number, 0 or more")

    def is_better(self, value: float, best: float) -> bool:
        """Whether a value of the metric counts as better than the best so far. What is no number never does."""
        if math.isnan(value) or math.isnan(best):
            return not math.isnan(value)
        gain = best - value if self._wants_less else value - best
        return gain > 0 and gain >= self.least_gain

    def lacks(self, figures: Collection[str]) -> str:
        """What is to be said of an evaluation with these figures, if the metric is none of them; empty: it is one."""
        if self.metric in figures:
            return ""
        return (
            f"gives {', '.join(sorted(figures)) or 'nothing'}, and the job asks for {self.metric!r}: set the metric of "
            "its EvaluationPolicy to one of them"
        )

    @property
    def _wants_less(self) -> bool:
        if self.goal == "auto":
            return _named(self.metric, _LESS)
        return self.goal == "less"

    def to_proto(self) -> job_pb2.EvaluationPolicy:
        """The message that carries this policy."""
        return job_pb2.EvaluationPolicy(
            every_steps=self.every_steps,
            at_end=self.at_end,
            metric=self.metric,
            goal=_GOALS[self.goal],
            patience=self.patience,
            least_gain=self.least_gain,
            checkpoint_best=self.checkpoint_best,
        )

    @classmethod
    def from_proto(cls, message: job_pb2.EvaluationPolicy) -> "EvaluationPolicy":
        """The policy that a message carries; InvalidJob if it makes no sense."""
        if message.goal not in _GOAL_NAMES:
            raise errors.InvalidJob(f"goal of evaluation is {message.goal}, which this Shoal does not know")
        return cls(
            every_steps=message.every_steps,
            at_end=message.at_end,
            metric=message.metric,
            goal=_GOAL_NAMES[message.goal],
            patience=message.patience,
            least_gain=message.least_gain,
            checkpoint_best=message.checkpoint_best,
        )


def _named(metric: str, after: tuple[str, ...]) -> bool:
    words = re.split(r"[^a-z0-9]+", metric.lower())
    return any(word.startswith(after) or word.endswith(after) for word in words)


__all__ = ["EvaluationPolicy", "Goal"]
