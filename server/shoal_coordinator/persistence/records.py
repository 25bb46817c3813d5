"""Which record of the store is of what: keys, and what the coordinator knows sorted out of a store's bytes. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from google.protobuf.message import DecodeError, Message

from shoal import errors
from shoal.v1 import job_pb2, state_pb2
from shoal_coordinator.cluster.membership import Member
from shoal_coordinator.cluster.outstanding import effect_from_proto
from shoal_coordinator.messages.effects import Effect

# The cluster's own record; all other keys have a kind and what they are of: "member/w0", "job/3/state", "effect/17".
CLUSTER = "cluster"


# The kinds of events that are kept: `event_log.Kept`.
_KEPT = {"state", "checkpoint", "evaluation"}


class Kind(StrEnum):
    """What records are of."""

    MEMBER = "member"  # and its id
    JOB = "job"  # the number of its submission, and a part
    EFFECT = "effect"  # and its number


class Part(StrEnum):
    """A job's records, apart so that what changes often is small."""

    SPEC = "spec"
    PLAN = "plan"
    STATE = "state"
    LEDGER = "ledger"
    TALLY = "tally"
    CHECKPOINTS = "checkpoints"
    EVALUATION = "evaluation"
    EVENT = "event"  # and its number


def key(kind: Kind, *names: str | int) -> str:
    """The key of a record."""
    return "/".join([kind, *map(str, names)])


def encoded(message: Message) -> bytes:
    """The bytes of a record: the same for the same state."""
    return message.SerializeToString(deterministic=True)


@dataclass
class SavedJob:
    """A job's records."""

    submission: state_pb2.SubmissionRecord = field(default_factory=state_pb2.SubmissionRecord)
    plan: state_pb2.PlanRecord | None = None
    state: state_pb2.JobRecord = field(default_factory=state_pb2.JobRecord)
    ledger: state_pb2.LedgerRecord | None = None
    tally: state_pb2.TallyRecord = field(default_factory=state_pb2.TallyRecord)
    checkpoints: state_pb2.CheckpointsRecord | None = None
    evaluation: state_pb2.EvaluationRecord | None = None
    events: list[job_pb2.Event] = field(default_factory=list)

    def take(self, part: str, record: bytes) -> None:
        """Takes in one record.

        Raises:
            DecodeError: it is none.
            ValueError: it is of no kind that there is.
        """
        kind, _, number = part.partition("/")
        match kind:
            case Part.SPEC:
                self.submission.ParseFromString(record)
            case Part.PLAN:
                self.plan = state_pb2.PlanRecord.FromString(record)
            case Part.STATE:
                self.state.ParseFromString(record)
            case Part.LEDGER:
                self.ledger = state_pb2.LedgerRecord.FromString(record)
            case Part.TALLY:
                self.tally.ParseFromString(record)
            case Part.CHECKPOINTS:
                self.checkpoints = state_pb2.CheckpointsRecord.FromString(record)
            case Part.EVALUATION:
                self.evaluation = state_pb2.EvaluationRecord.FromString(record)
            case Part.EVENT:
                event = job_pb2.Event.FromString(record)
                if event.sequence != int(number) or event.WhichOneof("kind") not in _KEPT:
                    raise ValueError("it is of no kind that is kept, or has another number")
                self.events.append(event)
            case _:
                raise ValueError(f"a job has no {part}")


@dataclass
class Saved:
    """What a store has of a cluster."""

    cluster: state_pb2.ClusterRecord
    members: list[Member] = field(default_factory=list)
    jobs: dict[int, SavedJob] = field(default_factory=dict)  # by submission, in their order
    effects: list[Effect] = field(default_factory=list)

    @classmethod
    def of(cls, records: Mapping[str, bytes]) -> "Saved | None":
        """Sorts out a store's records; None: there are none.

        Raises:
            StoreUnreadable: one makes no sense, or there is none of the cluster.
        """
        if not records:
            return None
        if CLUSTER not in records:
            raise errors.StoreUnreadable("there are records, but none that says of which cluster")
        saved = cls(state_pb2.ClusterRecord())
        for name, record in records.items():
            try:
                saved._take(name, record)
            except errors.ShoalError as error:
                raise errors.StoreUnreadable(f"the record {name} makes no sense: {error.message}", key=name) from None
            except (DecodeError, ValueError, KeyError) as error:
                raise errors.StoreUnreadable(f"the record {name} makes no sense: {error}", key=name) from None
        saved.jobs = dict(sorted(saved.jobs.items()))
        return saved

    def _take(self, name: str, record: bytes) -> None:
        if name == CLUSTER:
            self.cluster.ParseFromString(record)
            return
        kind, _, rest = name.partition("/")
        match kind:
            case Kind.MEMBER:
                self.members.append(Member.from_proto(state_pb2.MemberRecord.FromString(record)))
            case Kind.JOB:
                number, _, part = rest.partition("/")
                self.jobs.setdefault(int(number), SavedJob()).take(part, record)
            case Kind.EFFECT:
                self.effects.append(effect_from_proto(int(rest), state_pb2.EffectRecord.FromString(record)))
            case _:
                raise ValueError("there is no such kind")
