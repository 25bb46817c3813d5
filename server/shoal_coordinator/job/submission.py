"""Submission of a job: what its user submitted, with the submission's number (no I/O)."""

from dataclasses import dataclass
from functools import cached_property

from shoal.job import Job
from shoal.v1 import state_pb2
from shoal_coordinator.messages import Assignment, JobRef


@dataclass(frozen=True)
class Submission:
    """A job, as its user submitted it.

    Attributes:
        ref: its name and submission number.
        spec: the job specification.
        token: identifies repeats of the same submission.
        submitter: who submitted it; empty if it is not known.
        spec_bytes: bytes of the specification.
        submitter_role: the access role of the submitter; empty if it is not known.
    """

    ref: JobRef
    spec: Job
    token: str = ""
    submitter: str = ""
    spec_bytes: int = 0
    submitter_role: str = ""

    @property
    def owner(self) -> str:
        """The name of the submitter's token or certificate; empty if the submitter presented none."""
        return self.submitter if self.submitter_role else ""

    @cached_property
    def encoded_spec(self) -> bytes:
        """The serialized specification, made once: each of a thousand workers gets it."""
        return self.spec.to_proto().SerializeToString(deterministic=True)

    def repeats(self, token: str, submitter: str) -> bool:
        """Returns whether a submission with this token, by this user, is the same one again."""
        return bool(token) and (self.token, self.submitter) == (token, submitter)

    def assigned(self, number: int) -> Assignment:
        """Returns the assignment of this number to the job."""
        return Assignment(self.ref.name, number, self.spec.program, self.submitter, self.submitter_role)

    def to_proto(self) -> state_pb2.SubmissionRecord:
        """Returns the record of this submission, without its number."""
        return state_pb2.SubmissionRecord(
            spec=self.spec.to_proto(),
            token=self.token,
            submitter=self.submitter,
            submitter_role=self.submitter_role,
        )

    @classmethod
    def from_proto(cls, number: int, record: state_pb2.SubmissionRecord) -> "Submission":
        """Returns the submission with this number from its record.

        Raises:
            ShoalError, ValueError: the record is invalid.
        """
        spec = Job.from_proto(record.spec)
        ref, spec_bytes = JobRef(spec.name, number), record.spec.ByteSize()
        return cls(ref, spec, record.token, record.submitter, spec_bytes, record.submitter_role)
