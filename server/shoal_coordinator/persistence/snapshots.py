"""Decoding of a store's records into a snapshot of the cluster (no I/O)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError, Message

from shoal import errors
from shoal.v1 import job_pb2, state_pb2
from shoal_coordinator.cluster import ClusterCounters, ClusterSnapshot, Member
from shoal_coordinator.messages import Effect, JobRecordKind, JobSnapshot, record_keys
from shoal_coordinator.persistence.effect_codec import effect_from_proto

# The kinds of events in the store, as in `event_log.Kept`.
_KEPT = {"state", "checkpoint", "evaluation"}
# The message of each record of a job, except for those that are followed by a number or a name.
_PARTS: Mapping[str, type[Message]] = {
    JobRecordKind.SPEC: state_pb2.SubmissionRecord,
    JobRecordKind.PLAN: state_pb2.PlanRecord,
    JobRecordKind.STATE: state_pb2.JobRecord,
    JobRecordKind.COPIES: state_pb2.CopiesRecord,
    JobRecordKind.LEDGER: state_pb2.LedgerRecord,
    JobRecordKind.PROGRESS: state_pb2.ProgressRecord,
    JobRecordKind.REPORTS: state_pb2.ReportsRecord,
    JobRecordKind.CHECKPOINTS: state_pb2.CheckpointsRecord,
    JobRecordKind.EVALUATION: state_pb2.EvaluationRecord,
}
# The snapshot's field for a record whose key has another name.
_FIELDS: Mapping[str, str] = {JobRecordKind.PROGRESS: "progress_totals"}


def snapshot_of(records: Mapping[str, bytes]) -> ClusterSnapshot | None:
    """Returns the snapshot of a store's records, or None if there are no records.

    Raises:
        StoreUnreadable: A record is invalid, or the cluster's own record is missing.
    """
    if not records:
        return None
    if record_keys.CLUSTER not in records:
        raise errors.StoreUnreadable("it has records, but not the cluster's own record")
    found = _Found()
    for name, record in records.items():
        try:
            found.take(name, record)
        except errors.ShoalError as error:
            raise errors.StoreUnreadable(f"the record {name} is invalid: {error.message}", key=name) from None
        except (DecodeError, ValueError, KeyError) as error:
            raise errors.StoreUnreadable(f"the record {name} is invalid: {error}", key=name) from None
    return found.snapshot()


@dataclass(slots=True)
class _FoundJob:
    """The records of one job that have been read so far."""

    parts: dict[str, Any] = field(default_factory=dict)
    ranks: dict[int, state_pb2.RankRecord] = field(default_factory=dict)
    leases: dict[str, state_pb2.LeaseRecord] = field(default_factory=dict)
    requeued: list[state_pb2.RequeuedRange] = field(default_factory=list)
    events: list[job_pb2.Event] = field(default_factory=list)

    def take(self, name: str, record: bytes) -> None:
        part, _, number = name.partition("/")
        if part in _PARTS:
            self.parts[_FIELDS.get(part, part)] = _PARTS[part].FromString(record)
        elif part == JobRecordKind.RANK:
            self.ranks[int(number)] = state_pb2.RankRecord.FromString(record)
        elif part == JobRecordKind.LEASE:
            self.leases[number] = state_pb2.LeaseRecord.FromString(record)
        elif part == JobRecordKind.REQUEUED:
            self.requeued.append(state_pb2.RequeuedRange.FromString(record))
        elif part == JobRecordKind.EVENT:
            event = job_pb2.Event.FromString(record)
            if event.sequence != int(number) or event.WhichOneof("kind") not in _KEPT:
                raise ValueError(f"its event has the number {event.sequence}, or a kind that is not stored")
            self.events.append(event)
        else:
            raise ValueError(f"a job has no record {part!r}")

    def snapshot(self) -> JobSnapshot:
        parts: dict[str, Any] = {**self.parts, "leases": self.leases, "requeued": self.requeued}
        return JobSnapshot(**parts, ranks=self.ranks, events=self.events)


@dataclass(slots=True)
class _Found:
    """The records of a cluster that have been read so far."""

    counts: ClusterCounters = field(default_factory=lambda: ClusterCounters(""))
    members: list[Member] = field(default_factory=list)
    jobs: dict[int, _FoundJob] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)

    def take(self, name: str, record: bytes) -> None:
        """Reads one record.

        Raises:
            DecodeError, ValueError, KeyError, ShoalError: The record is invalid.
        """
        if name == record_keys.CLUSTER:
            self.counts = _counts(state_pb2.ClusterRecord.FromString(record))
            return
        kind, _, rest = name.partition("/")
        match kind:
            case record_keys.RecordKind.MEMBER:
                self.members.append(Member.from_proto(state_pb2.MemberRecord.FromString(record)))
            case record_keys.RecordKind.JOB:
                number, _, name = rest.partition("/")
                self.jobs.setdefault(int(number), _FoundJob()).take(name, record)
            case record_keys.RecordKind.EFFECT:
                self.effects.append(effect_from_proto(int(rest), state_pb2.EffectRecord.FromString(record)))
            case _:
                raise ValueError("its kind is unknown")

    def snapshot(self) -> ClusterSnapshot:
        jobs = {number: job.snapshot() for number, job in sorted(self.jobs.items())}
        return ClusterSnapshot(self.counts, self.members, jobs, self.effects)


def _counts(record: state_pb2.ClusterRecord) -> ClusterCounters:
    return ClusterCounters(
        cluster=record.cluster,
        generation=record.generation,
        submissions=record.submissions,
        assignments=record.assignments,
        effects=record.effects,
        incarnation=record.incarnation,
    )


__all__ = ["snapshot_of"]
