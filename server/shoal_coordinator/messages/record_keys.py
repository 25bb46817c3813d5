"""Keys of a cluster's stored records. The machine marks changed records by their keys.

`state.proto` defines the contents of a record; `shoal_coordinator.persistence` reads and writes them.
"""

from enum import StrEnum

# The cluster's own record. Other keys are a kind and an id: "member/w0", "job/3/state", "effect/17".
CLUSTER = "cluster"
# Records of access have this prefix. The cluster machine does not know them.
ACCESS = "access/"
ACCESS_KEY = f"{ACCESS}key"


class RecordKind(StrEnum):
    """The kind of a record."""

    MEMBER = "member"  # followed by the member id
    JOB = "job"  # followed by the submission number and a `JobRecordKind`
    EFFECT = "effect"  # followed by a number


class JobRecordKind(StrEnum):
    """The records of one job. They are separate, so that those that change often are small."""

    SPEC = "spec"
    PLAN = "plan"
    COPIES = "copies"
    STATE = "state"
    LEDGER = "ledger"
    LEASE = "lease"  # followed by the member id of a worker
    REQUEUED = "requeued"  # followed by the epoch and the first sample of a range
    PROGRESS = "tally"
    REPORTS = "reports"
    CHECKPOINTS = "checkpoints"
    EVALUATION = "evaluation"
    RANK = "rank"  # followed by a number
    EVENT = "event"  # followed by a number


def of_member(member: str) -> str:
    """Returns the key of a member's record."""
    return f"{RecordKind.MEMBER}/{member}"


def of_job(submission: int, name: str) -> str:
    """Returns the key of one of a job's records."""
    return f"{RecordKind.JOB}/{submission}/{name}"


def of_rank(rank: int) -> str:
    """Returns the name of the record of a job's rank among the job's records."""
    return f"{JobRecordKind.RANK}/{rank}"


def of_lease(worker: str) -> str:
    """Returns the name of the record of a worker's lease among the job's records."""
    return f"{JobRecordKind.LEASE}/{worker}"


def of_requeued(epoch: int, start: int) -> str:
    """Returns the name of the record of a requeued range among the job's records."""
    return f"{JobRecordKind.REQUEUED}/{epoch}/{start}"


def of_effect(number: int) -> str:
    """Returns the key of an effect's record."""
    return f"{RecordKind.EFFECT}/{number}"


def of_token(token: str) -> str:
    """Returns the key of a token's record."""
    return f"{ACCESS}token/{token}"
