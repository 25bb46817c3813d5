"""The words of the cluster machine: events, their answers, effects, what these name, and the keys of records.

What happens is in `events`, what the machine answers in `answers`, what it wants done in `effects`. Values that
several of them name are here too: `refs`, `registration`. Values that workers use too, such as leases, are in
`shoal._wire`. `record_keys` names what is kept, and `event_codec` puts a job's events into messages. No decision is
made here, and nothing here changes. Every package of the coordinator may import it; it imports none of them.
"""

from shoal_coordinator.messages.effects import (
    AdmitWorker,
    CommitCheckpoint,
    CreateShards,
    DropShards,
    Effect,
    RemoveWorker,
    ScanCheckpoints,
    TakeCut,
)
from shoal_coordinator.messages.event_codec import event_message, progress_message, state_code
from shoal_coordinator.messages.events import (
    CheckpointCommitted,
    CheckpointsScanned,
    CutHeld,
    CutTaken,
    JobDescribed,
    WorkerReported,
)
from shoal_coordinator.messages.record_keys import JobRecordKind
from shoal_coordinator.messages.refs import JobRef, ServerRef, servers_of
from shoal_coordinator.messages.registration import Registration
from shoal_coordinator.messages.replies import (
    Assignment,
    DescribeResult,
    HoldResult,
    JoinResult,
    RegisterResult,
    RestoredCheckpoint,
    TakeCheckpointResult,
)

__all__ = [
    "AdmitWorker",
    "Assignment",
    "CheckpointCommitted",
    "CheckpointsScanned",
    "CommitCheckpoint",
    "CreateShards",
    "CutHeld",
    "CutTaken",
    "DescribeResult",
    "DropShards",
    "Effect",
    "HoldResult",
    "JobDescribed",
    "JobRecordKind",
    "JobRef",
    "JoinResult",
    "RegisterResult",
    "Registration",
    "RemoveWorker",
    "RestoredCheckpoint",
    "ScanCheckpoints",
    "ServerRef",
    "TakeCheckpointResult",
    "TakeCut",
    "WorkerReported",
    "event_message",
    "progress_message",
    "servers_of",
    "state_code",
]
