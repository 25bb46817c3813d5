"""What the coordinator answers to a worker that asks about an evaluation, has made one, or reports its progress."""

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvaluationClaim:
    """Whether an evaluation is the caller's to make.

    Attributes:
        number: of that evaluation; 0: none is.
        stop: the job ends early; this worker is through.
    """

    number: int = 0
    stop: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationAck:
    """What follows from an evaluation.

    Attributes:
        wait: a checkpoint of it is on its way: hold still, and say it again soon.
        stop: the job ends early; this worker is through.
    """

    wait: bool = False
    stop: bool = False


class ReportAck(enum.Enum):
    """What the coordinator says to a report."""

    CONTINUE = "there is more to do"
    STOP_AFTER_BATCH = "the job ends early: the worker is through once the batch in hand is trained on"
    DONE = "the job is over for this worker"


__all__ = ["EvaluationAck", "EvaluationClaim", "ReportAck"]
