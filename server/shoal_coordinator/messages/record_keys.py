"""The keys of the records that are kept of a cluster, by which the machine says what has changed.

What a record holds is in `state.proto`; `shoal_coordinator.persistence` reads and writes it.
"""

from enum import StrEnum

# The cluster's own record. All other keys have a kind and what they are of: "member/w0", "job/3/state", "effect/17".
CLUSTER = "cluster"


class Kind(StrEnum):
    """What records are of."""

    MEMBER = "member"  # and its id
    JOB = "job"  # the number of its submission, and a part
    EFFECT = "effect"  # and its number


class JobRecordKind(StrEnum):
    """A job's records, apart so that what changes often is small."""

    SPEC = "spec"
    PLAN = "plan"
    STATE = "state"
    LEDGER = "ledger"
    PROGRESS = "tally"
    CHECKPOINTS = "checkpoints"
    EVALUATION = "evaluation"
    EVENT = "event"  # and its number


def of_member(member: str) -> str:
    """Returns the key of a member's record."""
    return f"{Kind.MEMBER}/{member}"


def of_job(submission: int, part: str) -> str:
    """Returns the key of one of a job's records."""
    return f"{Kind.JOB}/{submission}/{part}"


def of_effect(number: int) -> str:
    """Returns the key of an effect's record."""
    return f"{Kind.EFFECT}/{number}"
