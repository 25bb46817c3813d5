"""What a job says of evaluation: when its held-out samples are evaluated, and what follows from it."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal import errors
from shoal._job.checks import UINT32, UINT64, Number, OneOf, flag
from shoal._job.codecs import Named
from shoal._job.description import Option, check, decode, described, encode
from shoal._wire import NAMES, is_name
from shoal.v1 import job_pb2

Goal = Literal["auto", "less", "more"]

_GOALS: Mapping[Goal, job_pb2.EvaluationPolicy.Goal.ValueType] = {
    "auto": job_pb2.EvaluationPolicy.GOAL_UNSPECIFIED,
    "less": job_pb2.EvaluationPolicy.LESS,
    "more": job_pb2.EvaluationPolicy.MORE,
}
# A metric without a goal: it is one of these if a word of its name begins or ends with one, as "top5" and "logloss" do.
_LESS = ("loss", "error", "mse", "rmse", "mae", "mape", "nll", "entropy", "perplexity")
_MORE = ("accuracy", "acc", "auc", "auroc", "top", "f1", "precision", "recall", "iou", "r2", "ndcg", "bleu", "reward")
_COUNT = "a whole number, 0 or more"


def _check_metric(field: str, value: object) -> None:
    if not is_name(value):
        raise errors.InvalidJob(f"{field} is {value!r:.80}; name a figure, by {NAMES}")


def _check_gain(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise errors.InvalidJob(f"{field} is {value!r}; it must be a finite number, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPolicy:
    """When the program's held-out samples are evaluated, by one worker, and what the job makes of it.

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
        min_delta: by so much it has to be better to count as better.
        checkpoint_best: take a checkpoint at each evaluation that is the best so far, and keep the newest of those:
            `JOB/best` names it. It has the very values that were evaluated if the job is synchronous without backup
            workers, unless a checkpoint that was under way took 10 s or longer to finish; else, updates that came
            meanwhile are in it, too. In a synchronous job the steps tell: that of the checkpoint is then a later one
            than the evaluation's.

    Raises:
        InvalidJob: a value is out of range, or the metric's name does not say which is better, and no goal does.
    """

    every_steps: int = field(
        default=0,
        metadata=described(
            Number(0, UINT64, _COUNT),
            Option("Steps from one evaluation of the held-out samples to the next.", ["--evaluate-every"], "STEPS"),
        ),
    )
    at_end: bool = field(
        default=True,
        metadata=described(
            flag, Option("Do not evaluate when all workers are through.", ["--no-evaluation-at-end"], turns_off=True)
        ),
    )
    metric: str = field(
        default="loss",
        metadata=described(
            _check_metric, Option("The figure that says which evaluation is the best. By default loss.", ["--metric"])
        ),
    )
    goal: Goal = field(
        default="auto",
        metadata=described(
            OneOf(_GOALS),
            Option(
                "Whether less or more of the metric is better. By default as its name says: less of a loss, more of an "
                "accuracy.",
                ["--goal"],
            ),
            Named(_GOALS, "goal of evaluation is {}, which this Shoal does not know"),
        ),
    )
    patience: int = field(
        default=0,
        metadata=described(
            Number(0, UINT32, _COUNT),
            Option("End the job after this many evaluations in a row that are no better; 0: never.", ["--patience"]),
        ),
    )
    min_delta: float = field(
        default=0.0,
        metadata=described(
            _check_gain, Option("How much better an evaluation has to be to count as better.", ["--least-gain"])
        ),
    )
    checkpoint_best: bool = field(
        default=False,
        metadata=described(
            flag,
            Option("Take a checkpoint at each evaluation that is the best so far: JOB/best.", ["--checkpoint-best"]),
        ),
    )

    def __post_init__(self) -> None:
        check(self, "evaluation")
        if self.goal == "auto" and not _named(self.metric, _LESS + _MORE):
            raise errors.InvalidJob(
                f"metric of evaluation is {self.metric!r}, whose name does not say whether less or more of it is "
                'better; set goal to "less" or "more"',
                metric=self.metric,
            )
        if not self.every_steps and not self.at_end:
            raise errors.InvalidJob("evaluation neither by steps nor at the end: set every_steps, or leave it out")
        if self.patience and not self.every_steps:
            raise errors.InvalidJob("patience of evaluation without every_steps: nothing is evaluated before the end")

    def is_better(self, value: float, best: float) -> bool:
        """Whether a value of the metric counts as better than the best so far. What is no number never does."""
        if math.isnan(value) or math.isnan(best):
            return not math.isnan(value)
        gain = best - value if self._wants_less else value - best
        return gain > 0 and gain >= self.min_delta

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
        return encode(self, job_pb2.EvaluationPolicy)

    @classmethod
    def from_proto(cls, message: job_pb2.EvaluationPolicy) -> "EvaluationPolicy":
        """The policy that a message carries; InvalidJob if it makes no sense."""
        return cls(**decode(cls, message))


def from_options(given: Mapping[str, Any]) -> EvaluationPolicy | None:
    """Returns the policy that options ask for, by field.

    None: no option is given, or only the one that there be no evaluation at the end.
    """
    return EvaluationPolicy(**given) if given and given != {"at_end": False} else None


def _named(metric: str, after: tuple[str, ...]) -> bool:
    words = re.split(r"[^a-z0-9]+", metric.lower())
    return any(word.startswith(after) or word.endswith(after) for word in words)


__all__ = ["EvaluationPolicy", "Goal", "from_options"]
