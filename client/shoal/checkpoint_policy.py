"""Checkpoint settings of a job: when checkpoints are taken, which are kept, and which one the job starts from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal import errors
from shoal._job.checks import UINT32, Number, flag
from shoal._job.codecs import Scalar
from shoal._job.description import Option, check, decode, encode, field_metadata
from shoal.v1 import job_pb2

_MOST_S = 10.0**9
# The value of `Job.restore` that means the newest checkpoint of the job's own name.
AUTO = "auto"
# A checkpoint is stored under a job's name, so that a job can start from each checkpoint.
JOB_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_CHOICE = re.compile(rf"(?P<job>{JOB_NAME.pattern})(?:/(?:(?P<number>(?!0+\Z)[0-9]{{1,18}})|(?P<best>best)))?")


def _check_seconds(_field: str, every_s: object) -> None:
    number = isinstance(every_s, int | float) and not isinstance(every_s, bool)
    if not number or not (every_s == 0 or 1 <= every_s <= _MOST_S):  # type: ignore[operator] # NaN is none of these
        raise errors.InvalidJob(
            f"every_s of checkpoints is {every_s!r}; it must be 1 s or more, or 0 for no checkpoints by time"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """The schedule of a job's checkpoints, and the rule that says which are kept.

    Checkpoints that `JobHandle.checkpoint` requests are taken in addition.

    Attributes:
        every_s: seconds between two checkpoints, 1 or more. 0 means no checkpoints by time.
        every_steps: steps of the fastest worker between two checkpoints. The coordinator learns the worker's step from
            its reports: about twice a second in a small cluster, and every 10 s at most in a large one. 0 means no
            checkpoints by steps.
        at_end: whether the job takes a checkpoint when all workers have finished, before it succeeds.
        keep_last: number of newest checkpoints that are kept.
        keep_every: checkpoints whose number is a multiple of this are also kept. 0 means none.

    Raises:
        InvalidJob: a number is out of range.
    """

    every_s: float = field(
        default=600.0,
        metadata=field_metadata(
            _check_seconds,
            Option(
                "Seconds between checkpoints. 0 means no checkpoints by time. Default: 600.",
                ["--checkpoint-every-seconds"],
            ),
        ),
    )
    every_steps: int = field(
        default=0,
        metadata=field_metadata(
            Number(0, UINT32),
            Option(
                "Steps between checkpoints. 0 means no checkpoints by steps. Default: 0.", ["--checkpoint-every-steps"]
            ),
        ),
    )
    at_end: bool = field(
        default=True,
        metadata=field_metadata(
            flag,
            Option("Takes no checkpoint when all workers have finished.", ["--no-checkpoint-at-end"], turns_off=True),
        ),
    )
    keep_last: int = field(
        default=3,
        metadata=field_metadata(
            Number(1, UINT32),
            Option("Number of newest checkpoints to keep. Default: 3.", ["--keep-last"]),
            Scalar(zero_is_default=True),
        ),
    )
    keep_every: int = field(
        default=0,
        metadata=field_metadata(
            Number(0, UINT32),
            Option(
                "Also keeps each checkpoint whose number is a multiple of this value. 0 means none. Default: 0.",
                ["--keep-every"],
            ),
        ),
    )

    def __post_init__(self) -> None:
        check(self, "checkpoints")

    @property
    def takes_any(self) -> bool:
        """Whether the job takes checkpoints without a request."""
        return bool(self.every_s or self.every_steps or self.at_end)

    def to_proto(self) -> job_pb2.CheckpointPolicy:
        """Returns the message that carries this policy."""
        return encode(self, job_pb2.CheckpointPolicy)

    @classmethod
    def from_proto(cls, message: job_pb2.CheckpointPolicy) -> "CheckpointPolicy":
        """Returns the policy that a message carries.

        Raises:
            InvalidJob: a number is out of range.
        """
        return cls(**decode(cls, message))


def from_options(given: Mapping[str, Any]) -> CheckpointPolicy | None:
    """Returns the policy that options describe, or None without options.

    With `every_steps` and without `every_s`, checkpoints are taken by steps only.

    Args:
        given: field names and values of `CheckpointPolicy`.

    Raises:
        InvalidJob: a number is out of range.
    """
    if given.get("every_steps") and "every_s" not in given:
        return CheckpointPolicy(**given, every_s=0.0)
    return CheckpointPolicy(**given) if given else None


# Checkpoints on request only.
NEVER = CheckpointPolicy(every_s=0, at_end=False)


@dataclass(frozen=True, slots=True)
class CheckpointChoice:
    """The checkpoint that a job starts from.

    Attributes:
        job: name of the job that took it.
        number: its number within that job. 0 means the newest complete one.
        partial: whether to restore only the values of variables that the checkpoint and the job both have, without
            optimizer slots and data position.
        best: whether to use the newest checkpoint that was taken at a best evaluation; `number` is then 0.
    """

    job: str
    number: int = 0
    partial: bool = False
    best: bool = False

    @classmethod
    def parse(cls, text: str, *, partial: bool = False) -> "CheckpointChoice":
        """Parses the name of a checkpoint: JOB, JOB/NUMBER, or JOB/best.

        Args:
            text: the name.
            partial: see the attribute.

        Returns:
            The choice.

        Raises:
            InvalidJob: the text has another form.
        """
        found = _CHOICE.fullmatch(text)
        if found is None:
            raise errors.InvalidJob(
                f"{text!r} does not name a checkpoint; give JOB for the newest one, JOB/NUMBER (`shoal checkpoints ls` "
                "lists them), or JOB/best for the newest one of the best evaluation"
            )
        return cls(found["job"], int(found["number"] or 0), partial, found["best"] is not None)

    def __str__(self) -> str:
        which = "best" if self.best else self.number
        return f"{self.job}/{which}" if which else self.job

    def to_proto(self) -> job_pb2.CheckpointChoice:
        """Returns the message that carries this choice."""
        return job_pb2.CheckpointChoice(job=self.job, number=self.number, partial=self.partial, best=self.best)

    @classmethod
    def from_proto(cls, message: job_pb2.CheckpointChoice) -> "CheckpointChoice":
        """Returns the choice that a message carries.

        Raises:
            InvalidJob: the job's name is not valid.
        """
        which = "best" if message.best else message.number
        return cls.parse(f"{message.job}/{which}" if which else message.job, partial=message.partial)


__all__ = ["AUTO", "JOB_NAME", "NEVER", "CheckpointChoice", "CheckpointPolicy", "from_options"]
