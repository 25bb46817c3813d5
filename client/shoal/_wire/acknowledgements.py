"""The coordinator's answers to a worker's evaluation requests, evaluation results and progress reports."""

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvaluationClaim:
    """Answer to a worker that asks whether it should make an evaluation.

    Attributes:
        number: number of the evaluation to make; 0 means none.
        stop: the job ends early, and this worker has nothing more to do.
    """

    number: int = 0
    stop: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationAck:
    """Answer to the result of an evaluation.

    Attributes:
        wait: a checkpoint of the evaluated values is in progress, or servers get a new learning rate: do not go on, and
            report the result again soon.
        stop: the job ends early, and this worker has nothing more to do.
    """

    wait: bool = False
    stop: bool = False


class ReportAck(enum.Enum):
    """Answer to a worker's report."""

    CONTINUE = "there is more to do"
    STOP_AFTER_BATCH = "the job ends early: the worker finishes its current batch and stops"
    DONE = "the job is over for this worker"


__all__ = ["EvaluationAck", "EvaluationClaim", "ReportAck"]
