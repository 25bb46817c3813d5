"""One job's life: the state machine of a job, and the owners of the parts of its state.

`JobMachine` is the state machine of one job, and `JobView` the part of it that other packages read; none sees the owners
behind it. Pure: no clock, no I/O, no thread. Which worker is sent where, and on which server a shard lies, `cluster`
decides. Each owner maps its own state to a message of `state.proto`; `persistence` keeps these. `cluster` and what is
above it may import this package; of the coordinator it imports `messages` alone.
"""

from shoal_coordinator.job.checkpoint_schedule import NO_STORAGE
from shoal_coordinator.job.counters import JobCounters, RestartReason
from shoal_coordinator.job.ledger import Ledger, default_range_size
from shoal_coordinator.job.machine import JobMachine
from shoal_coordinator.job.parts import Submission
from shoal_coordinator.job.snapshot import JobSnapshot

__all__ = [
    "NO_STORAGE",
    "JobCounters",
    "JobMachine",
    "JobSnapshot",
    "Ledger",
    "RestartReason",
    "Submission",
    "default_range_size",
]
