"""Evaluation settings of a job: when its held-out samples are evaluated, and what the job does with the result."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal import errors
from shoal._job.checks import MOST_STEPS, STEPS, UINT32, Instance, Number, OneOf, flag
from shoal._job.codecs import Named, Nested
from shoal._job.description import Option, check, decode, encode, field_metadata
from shoal._wire import NAMES, is_name
from shoal.optim import ConstantLR, ReduceOnPlateau, Schedule
from shoal.optim import _text as optimizer_text
from shoal.v1 import job_pb2

MetricMode = Literal["auto", "min", "max"]

_MODES: Mapping[MetricMode, job_pb2.EvaluationPolicy.Mode.ValueType] = {
    "auto": job_pb2.EvaluationPolicy.MODE_UNSPECIFIED,
    "min": job_pb2.EvaluationPolicy.MIN,
    "max": job_pb2.EvaluationPolicy.MAX,
}
# Words by which the mode "auto" recognises a metric. A word of its name must begin or end with one, as "top5" and
# "logloss" do.
_MINIMIZED = ("loss", "error", "mse", "rmse", "mae", "mape", "nll", "entropy", "perplexity")
_MAXIMIZED = (
    "accuracy",
    "acc",
    "auc",
    "auroc",
    "top",
    "f1",
    "precision",
    "recall",
    "iou",
    "r2",
    "ndcg",
    "bleu",
    "reward",
)
_COUNT = "a whole number, 0 or more"


def _check_metric(field: str, value: object) -> None:
    if not is_name(value):
        raise errors.InvalidJob(f"{field} is {value!r:.80}; the name of a metric must be {NAMES}")


def _check_gain(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise errors.InvalidJob(f"{field} is {value!r}; it must be a finite number, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPolicy:
    """The schedule of a job's evaluations, and what the job does with their results.

    One worker runs each evaluation. The program needs `held_out` and `evaluate`; see `shoal.program.EvaluatedProgram`.

    Attributes:
        every_steps: steps between two evaluations, counted by the fastest worker. 0 means no evaluations by steps.
        at_end: whether the job evaluates when all workers have finished, before it succeeds.
        metric: name of the metric that decides which evaluation is the best.
        mode: whether smaller ("min") or larger ("max") values of the metric are better. "auto" infers the mode from the
            metric's name: "min" if a word of the name begins or ends with loss, error, mse, rmse, mae, mape, nll,
            entropy or perplexity; otherwise "max" if a word begins or ends with accuracy, acc, auc, auroc, top, f1,
            precision, recall, iou, r2, ndcg, bleu or reward. For other names, "auto" is an error.
        patience: number of consecutive evaluations without an improvement after which the job ends as succeeded. 0
            means that the job never ends early.
        min_delta: smallest difference from the best value that counts as an improvement, 0 or more.
        checkpoint_best: whether the job takes a checkpoint at each evaluation that is the best so far. The newest of
            these is kept; its name is `JOB/best`. In a synchronous job without backup workers it holds the evaluated
            values, unless another checkpoint was in progress for 10 s or longer. In all other cases it may include
            later updates. If a synchronous job's checkpoint includes later updates, the checkpoint's step is later than
            the evaluation's.
        reduce_on_plateau: how evaluations without an improvement reduce the learning rate; None means not at all. It
            does not use `min_delta`. The optimizer needs a constant rate. In a synchronous job without backup workers,
            the first step after the evaluation has the new rate.

    Raises:
        InvalidJob: a value is out of range, or neither `metric` nor `mode` says which values are better.
    """

    every_steps: int = field(
        default=0,
        metadata=field_metadata(
            Number(0, MOST_STEPS, STEPS),
            Option(
                "Steps between evaluations of the held-out samples. 0 means no evaluations by steps. Default: 0.",
                ["--evaluate-every-steps"],
                "STEPS",
            ),
        ),
    )
    at_end: bool = field(
        default=True,
        metadata=field_metadata(
            flag,
            Option("Does not evaluate when all workers have finished.", ["--no-evaluation-at-end"], turns_off=True),
        ),
    )
    metric: str = field(
        default="loss",
        metadata=field_metadata(
            _check_metric, Option("Metric that decides which evaluation is the best. Default: loss.", ["--metric"])
        ),
    )
    mode: MetricMode = field(
        default="auto",
        metadata=field_metadata(
            OneOf(_MODES),
            Option(
                "Whether to minimize or maximize the metric. Default: inferred from its name.",
                ["--metric-mode"],
            ),
            Named(_MODES, "mode of evaluation is {}, which this version of Shoal does not know"),
        ),
    )
    patience: int = field(
        default=0,
        metadata=field_metadata(
            Number(0, UINT32, _COUNT),
            Option(
                "Number of consecutive evaluations without an improvement after which the job ends. 0 means never. "
                "Default: 0.",
                ["--patience"],
            ),
        ),
    )
    min_delta: float = field(
        default=0.0,
        metadata=field_metadata(
            _check_gain,
            Option("Smallest difference of the metric that counts as an improvement. Default: 0.", ["--min-delta"]),
        ),
    )
    checkpoint_best: bool = field(
        default=False,
        metadata=field_metadata(
            flag,
            Option(
                "Takes a checkpoint at each evaluation that is the best so far. JOB/best means the newest of these.",
                ["--checkpoint-best"],
            ),
        ),
    )

    reduce_on_plateau: ReduceOnPlateau | None = field(
        default=None,
        metadata=field_metadata(
            Instance(ReduceOnPlateau, "give a shoal.optim.ReduceOnPlateau, or None", optional=True),
            Option(
                "Reduces the learning rate when the metric stops improving: KEY=VALUE,KEY=VALUE with factor (default "
                "0.1), patience (10), threshold (1e-4), relative (true), cooldown (0) and minimum (0), as in "
                "shoal.optim.ReduceOnPlateau. Default: no reduction.",
                ["--reduce-on-plateau"],
                takes=str,
                read=optimizer_text.parse_plateau,
            ),
            Nested(ReduceOnPlateau.from_proto),
        ),
    )

    def __post_init__(self) -> None:
        check(self, "evaluation")
        if self.mode == "auto" and not _named(self.metric, _MINIMIZED + _MAXIMIZED):
            raise errors.InvalidJob(
                f"metric of evaluation is {self.metric!r}, whose name does not say whether smaller or larger "
                'values are better; set mode to "min" or "max" (on the command line: --metric-mode)',
                metric=self.metric,
            )
        if not self.every_steps and not self.at_end:
            raise errors.InvalidJob(
                "evaluation has neither every_steps nor at_end; set one of them, or leave the policy out"
            )
        if self.patience and not self.every_steps:
            raise errors.InvalidJob("evaluation has patience without every_steps; set every_steps, too")
        if self.reduce_on_plateau and not self.every_steps:
            raise errors.InvalidJob("evaluation has reduce_on_plateau without every_steps; set every_steps, too")

    def is_better(self, value: float, best: float) -> bool:
        """Returns whether a value of the metric counts as better than the best so far. NaN never does.

        Args:
            value: the new value.
            best: the best value so far; any number is better than NaN.
        """
        if math.isnan(value) or math.isnan(best):
            return not math.isnan(value)
        gain = best - value if self.minimizes else value - best
        return gain > 0 and gain >= self.min_delta

    def missing_metric(self, metrics: Collection[str]) -> str:
        """Returns the error text for an evaluation without the policy's metric, or "" if the metric is there.

        Args:
            metrics: names of the metrics that the program returned.
        """
        if self.metric in metrics:
            return ""
        return (
            f"gives {', '.join(sorted(metrics)) or 'nothing'}, but the job asks for {self.metric!r}; set the metric of "
            "its EvaluationPolicy (on the command line: --metric) to one that the program gives"
        )

    @property
    def minimizes(self) -> bool:
        """Whether smaller values of the metric are better."""
        if self.mode == "auto":
            return _named(self.metric, _MINIMIZED)
        return self.mode == "min"

    def to_proto(self) -> job_pb2.EvaluationPolicy:
        """Returns the message that carries this policy."""
        return encode(self, job_pb2.EvaluationPolicy)

    @classmethod
    def from_proto(cls, message: job_pb2.EvaluationPolicy) -> "EvaluationPolicy":
        """Returns the policy that a message carries.

        Raises:
            InvalidJob: a value is out of range, or unknown to this version of Shoal.
        """
        return cls(**decode(cls, message))


def reduces_on_plateau(policy: EvaluationPolicy | None) -> bool:
    """Returns whether evaluations without an improvement reduce the learning rate of a job with this policy."""
    return policy is not None and policy.reduce_on_plateau is not None


def check_schedule(policy: EvaluationPolicy | None, schedule: Schedule) -> None:
    """Checks the learning-rate schedule of the job's optimizer.

    Raises:
        InvalidJob: the policy reduces the learning rate, and the rate is not constant.
    """
    if reduces_on_plateau(policy) and not isinstance(schedule, ConstantLR):
        raise errors.InvalidJob(
            f"evaluation has reduce_on_plateau, but the optimizer has the schedule {schedule.name}; give the "
            "optimizer a constant learning_rate, or leave reduce_on_plateau out"
        )


def from_options(given: Mapping[str, Any]) -> EvaluationPolicy | None:
    """Returns the policy that options describe, or None without options.

    The function also returns None if the only option is the one that disables the evaluation at the end.

    Args:
        given: field names and values of `EvaluationPolicy`.

    Raises:
        InvalidJob: a value is out of range.
    """
    return EvaluationPolicy(**given) if given and given != {"at_end": False} else None


def _named(metric: str, after: tuple[str, ...]) -> bool:
    words = re.split(r"[^a-z0-9]+", metric.lower())
    return any(word.startswith(after) or word.endswith(after) for word in words)


__all__ = ["EvaluationPolicy", "MetricMode", "check_schedule", "from_options", "reduces_on_plateau"]
