"""What a job says of evaluation: when its held-out examples are evaluated, and what follows from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shoal import errors
from shoal._limits import METRIC_NAME_BYTES
from shoal.v1 import job_pb2

Goal = Literal["auto", "less", "more"]

_GOALS: Mapping[Goal, job_pb2.EvaluationPolicy.Goal.ValueType] = {
    "auto": job_pb2.EvaluationPolicy.GOAL_UNSPECIFIED,
    "less": job_pb2.EvaluationPolicy.LESS,
    "more": job_pb2.EvaluationPolicy.MORE,
}
_GOAL_NAMES = {code: name for name, code in _GOALS.items()}
_RANGES = {"every_steps": 2**64 - 1, "patience": 2**32 - 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPolicy:
    """When the program's held-out examples are evaluated, by one worker, and what the job makes of it.

    The program has `held_out` and `evaluate`: see `shoal.program.EvaluatedProgram`.

    Attributes:
        every_steps: steps from one to the next, of the worker that is ahead. 0: not by steps.
        at_end: one more when all workers are through, before the job has succeeded.
        metric: the figure that says which evaluation is the best.
        goal: whether "less" or "more" of it is better. "auto": less of what is named after a loss or an error, more of
            anything else.
        patience: the job ends, as one that succeeded, after so many evaluations in a row that are no better than the
            best. 0: never.
        least_gain: by so much it has to be better to count as better.
        checkpoint_best: take a checkpoint at each evaluation that is the best so far, and keep the newest of those:
            `JOB/best` names it. In synchronous jobs it has the very values that were evaluated.

    Raises:
        InvalidJob: a value is out of range.
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
        metric: object = self.metric
        if not isinstance(metric, str) or not 0 < len(metric.encode()) <= METRIC_NAME_BYTES:
            raise errors.InvalidJob(
                f"metric of evaluation is {self.metric!r}; name a figure, in {METRIC_NAME_BYTES} bytes at most"
            )
        if self.goal not in _GOALS:
            raise errors.InvalidJob(f"goal of evaluation is {self.goal!r}; it must be one of {', '.join(_GOALS)}")
        gain: object = self.least_gain
        if isinstance(gain, bool) or not isinstance(gain, int | float) or not 0 <= gain < math.inf:
            raise errors.InvalidJob(f"least_gain of evaluation is {gain!r}; it must be a finite number, 0 or more")

    def is_better(self, value: float, best: float) -> bool:
        """Whether a value of the metric counts as better than the best so far. What is no number never does."""
        if math.isnan(value) or math.isnan(best):
            return not math.isnan(value)
        gain = best - value if self._wants_less else value - best
        return gain > 0 and gain >= self.least_gain

    @property
    def _wants_less(self) -> bool:
        if self.goal == "auto":
            return any(word in self.metric.lower() for word in ("loss", "error"))
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


__all__ = ["EvaluationPolicy", "Goal"]
