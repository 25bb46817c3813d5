"""What a job says of checkpoints: when they are taken, which are kept, and which one it begins with."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal import errors
from shoal._job.checks import UINT32, Number, flag
from shoal._job.codecs import Scalar
from shoal._job.description import Option, check, decode, described, encode
from shoal.v1 import job_pb2

_MOST_S = 10.0**9
# Of a job; and of what a job's checkpoints lie under, for each must be one that a job can begin with.
JOB_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_CHOICE = re.compile(rf"(?P<job>{JOB_NAME.pattern})(?:/(?:(?P<number>(?!0+\Z)[0-9]{{1,18}})|(?P<best>best)))?")


def _check_seconds(_field: str, every_s: object) -> None:
    number = isinstance(every_s, int | float) and not isinstance(every_s, bool)
    if not number or not (every_s == 0 or 1 <= every_s <= _MOST_S):  # type: ignore[operator] # NaN is none of these
        raise errors.InvalidJob(f"checkpoints every {every_s!r} s: give 1 s or more, or 0 for none by time")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """When a job's checkpoints are taken, beside those that are asked for, and which are kept.

    Attributes:
        every_s: seconds from one to the next. 0: not by time.
        every_steps: steps from one to the next, of the worker that is ahead, as its reports say (about twice a
            second). 0: not by steps.
        at_end: one more when all workers are through, before the job has succeeded.
        keep_last: so many of the newest stay.
        keep_every: those whose number is a multiple of it stay as well; 0: none.

    Raises:
        InvalidJob: a number is out of range.
    """

    every_s: float = field(
        default=600.0,
        metadata=described(
            _check_seconds,
            Option("Seconds from one checkpoint to the next; 0: none by time. By default 600.", ["--checkpoint-s"]),
        ),
    )
    every_steps: int = field(
        default=0,
        metadata=described(
            Number(0, UINT32),
            Option("Steps from one checkpoint to the next; 0: none by steps.", ["--checkpoint-steps"]),
        ),
    )
    at_end: bool = field(
        default=True,
        metadata=described(
            flag,
            Option("Take no checkpoint when all workers are through.", ["--no-checkpoint-at-end"], turns_off=True),
        ),
    )
    keep_last: int = field(
        default=3,
        metadata=described(
            Number(1, UINT32),
            Option("How many of the newest checkpoints stay. By default 3.", ["--keep"]),
            Scalar(zero_is_default=True),
        ),
    )
    keep_every: int = field(
        default=0,
        metadata=described(
            Number(0, UINT32),
            Option("Checkpoints whose number is a multiple of this stay as well; 0: none.", ["--keep-every"]),
        ),
    )

    def __post_init__(self) -> None:
        check(self, "checkpoints")

    @property
    def takes_any(self) -> bool:
        """Whether any are taken that nobody asks for."""
        return bool(self.every_s or self.every_steps or self.at_end)

    def to_proto(self) -> job_pb2.CheckpointPolicy:
        """The message that carries this policy."""
        return encode(self, job_pb2.CheckpointPolicy)

    @classmethod
    def from_proto(cls, message: job_pb2.CheckpointPolicy) -> "CheckpointPolicy":
        """The policy that a message carries; InvalidJob if it makes no sense."""
        return cls(**decode(cls, message))


def from_options(given: Mapping[str, Any]) -> CheckpointPolicy | None:
    """Returns the policy that options ask for, by field: by steps alone where no time is given. None: no option is."""
    if given.get("every_steps") and "every_s" not in given:
        return CheckpointPolicy(**given, every_s=0.0)
    return CheckpointPolicy(**given) if given else None


# On demand only: no job of it is slowed by what it did not ask for.
NEVER = CheckpointPolicy(every_s=0, at_end=False)


@dataclass(frozen=True, slots=True)
class CheckpointChoice:
    """A checkpoint to begin with.

    Attributes:
        job: whose.
        number: which of its; 0: the newest that is whole.
        partial: take the values of variables that both have, and begin anew otherwise.
        best: the newest that was taken at the best evaluation so far; the number is 0.
    """

    job: str
    number: int = 0
    partial: bool = False
    best: bool = False

    @classmethod
    def parse(cls, text: str, *, partial: bool = False) -> "CheckpointChoice":
        """The checkpoint that a user names: JOB, JOB/NUMBER, or JOB/best.

        Raises:
            InvalidJob: the text is none of these.
        """
        found = _CHOICE.fullmatch(text)
        if found is None:
            raise errors.InvalidJob(
                f"{text!r} names no checkpoint; write JOB for its newest one, JOB/NUMBER: `shoal checkpoints ls`, or "
                "JOB/best for the newest that was taken at its best evaluation"
            )
        return cls(found["job"], int(found["number"] or 0), partial, found["best"] is not None)

    def __str__(self) -> str:
        which = "best" if self.best else self.number
        return f"{self.job}/{which}" if which else self.job

    def to_proto(self) -> job_pb2.CheckpointChoice:
        """The message that carries this choice."""
        return job_pb2.CheckpointChoice(job=self.job, number=self.number, partial=self.partial, best=self.best)

    @classmethod
    def from_proto(cls, message: job_pb2.CheckpointChoice) -> "CheckpointChoice":
        """The choice that a message carries; InvalidJob if it makes no sense."""
        which = "best" if message.best else message.number
        return cls.parse(f"{message.job}/{which}" if which else message.job, partial=message.partial)


__all__ = ["JOB_NAME", "NEVER", "CheckpointChoice", "CheckpointPolicy", "from_options"]
