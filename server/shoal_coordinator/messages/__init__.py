"""Messages of the cluster machine: events, replies, effects, the values in them, and the keys of records.

`events` holds the inputs of the machine, `replies` what it returns, and `effects` what it wants done. `refs` and
`registration` hold values that several of them share. Values that workers also use, such as leases, are in
`shoal._wire`. `record_keys` names the stored records, `job_snapshot` holds those of one job, and `event_codec`
converts a job's events to protobuf messages. This package makes no decisions and holds no state. Every package of the
coordinator may import it; it imports none.
"""

from shoal_coordinator.messages.copies import (
    AddBackup,
    BackupFailed,
    BackupMade,
    DropBackup,
    DropCopy,
    GroupEffect,
    GroupTold,
    ProbeServer,
    Promote,
    ServerProbed,
    SplitGroup,
)
from shoal_coordinator.messages.description import ProgramDescription, digest_of
from shoal_coordinator.messages.drain_order import DrainOrder
from shoal_coordinator.messages.effects import (
    AdmitWorker,
    CommitCheckpoint,
    CreateShards,
    DropShards,
    Effect,
    RemoveWorker,
    ScanCheckpoints,
    SetLearningRate,
    TakeCut,
)
from shoal_coordinator.messages.event_codec import event_message, progress_message, state_code
from shoal_coordinator.messages.events import CutHeld, JobDescribed, WorkerReported
from shoal_coordinator.messages.job_snapshot import JobSnapshot
from shoal_coordinator.messages.outcomes import CheckpointCommitted, CheckpointPublished, CheckpointsScanned, CutTaken
from shoal_coordinator.messages.record_keys import JobRecordKind
from shoal_coordinator.messages.refs import JobRef, ServerRef, servers_of
from shoal_coordinator.messages.registration import Registration
from shoal_coordinator.messages.replies import (
    Assignment,
    DescribeResult,
    HeartbeatResult,
    HoldResult,
    JoinResult,
    RegisterResult,
    RestoredCheckpoint,
    TakeCheckpointResult,
)

__all__ = [
    "AddBackup",
    "AdmitWorker",
    "Assignment",
    "BackupFailed",
    "BackupMade",
    "CheckpointCommitted",
    "CheckpointPublished",
    "CheckpointsScanned",
    "CommitCheckpoint",
    "CreateShards",
    "CutHeld",
    "CutTaken",
    "DescribeResult",
    "DrainOrder",
    "DropBackup",
    "DropCopy",
    "DropShards",
    "Effect",
    "GroupEffect",
    "GroupTold",
    "HeartbeatResult",
    "HoldResult",
    "JobDescribed",
    "JobRecordKind",
    "JobRef",
    "JobSnapshot",
    "JoinResult",
    "ProbeServer",
    "ProgramDescription",
    "Promote",
    "RegisterResult",
    "Registration",
    "RemoveWorker",
    "RestoredCheckpoint",
    "ScanCheckpoints",
    "ServerProbed",
    "ServerRef",
    "SetLearningRate",
    "SplitGroup",
    "TakeCheckpointResult",
    "TakeCut",
    "WorkerReported",
    "digest_of",
    "event_message",
    "progress_message",
    "servers_of",
    "state_code",
]
