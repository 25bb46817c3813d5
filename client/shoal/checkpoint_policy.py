"""What a job says of checkpoints: when they are taken, which are kept, and which one it begins with."""

import re
from dataclasses import dataclass

from shoal import errors
from shoal.v1 import job_pb2

_MOST_S, _MOST = 10.0**9, 2**32 - 1
# Of a job; and of what a job's checkpoints lie under, for each must be one that a job can begin with.
JOB_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_CHOICE = re.compile(rf"(?P<job>{JOB_NAME.pattern})(?:/(?:(?P<number>(?!0+\Z)[0-9]{{1,18}})|(?P<best>best)))?")


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

    every_s: float = 600.0
    every_steps: int = 0
    at_end: bool = True
    keep_last: int = 3
    keep_every: int = 0

    def __post_init__(self) -> None:
        _check_seconds(self.every_s)
        for name, least in (("every_steps", 0), ("keep_last", 1), ("keep_every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
                raise errors.InvalidJob(
                    f"{name} of checkpoints is {value!r}; it must be a whole number from {least} to {_MOST}"
                )
        if not isinstance(self.at_end, bool):
            raise errors.InvalidJob(f"at_end of checkpoints is {self.at_end!r}; it must be True or False")

    @property
    def takes_any(self) -> bool:
        """Whether any are taken that nobody asks for."""
        return bool(self.every_s or self.every_steps or self.at_end)

    def to_proto(self) -> job_pb2.CheckpointPolicy:
        """The message that carries this policy."""
        return job_pb2.CheckpointPolicy(
            every_s=self.every_s,
            every_steps=self.every_steps,
            at_end=self.at_end,
            keep_last=self.keep_last,
            keep_every=self.keep_every,
        )

    @classmethod
    def from_proto(cls, message: job_pb2.CheckpointPolicy) -> "CheckpointPolicy":
        """The policy that a message carries; InvalidJob if it makes no sense."""
        return cls(
            every_s=message.every_s,
            every_steps=message.every_steps,
            at_end=message.at_end,
            keep_last=message.keep_last or 3,
            keep_every=message.keep_every,
        )


def _check_seconds(every_s: object) -> None:
    number = isinstance(every_s, int | float) and not isinstance(every_s, bool)
    if not number or not (every_s == 0 or 1 <= every_s <= _MOST_S):  # type: ignore[operator] # NaN is none of these
        raise errors.InvalidJob(f"checkpoints every {every_s!r} s: give 1 s or more, or 0 for none by time")


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


__all__ = ["JOB_NAME", "NEVER", "CheckpointChoice", "CheckpointPolicy"]
