"""The state machine of one job, and the owners of the parts of its state. Pure: no clock, no I/O, no thread.

`JobMachine` changes a job, and `JobView` is the part of it that other packages read. Neither gives access to the
owners. `cluster` assigns workers and places shards. Each owner converts its own state to a message of `state.proto`,
which `persistence` stores. `cluster` and the packages above it may import this package. It imports only one package of
the coordinator: `messages`.
"""

from shoal_coordinator.job.checkpoints import NO_STORAGE
from shoal_coordinator.job.copies import CopyMachine, GroupCopies
from shoal_coordinator.job.counters import JobCounters, QuarantineReason, RestartReason
from shoal_coordinator.job.event_log import EventLog
from shoal_coordinator.job.ledger import Ledger, default_range_size
from shoal_coordinator.job.log_budget import LogBudget
from shoal_coordinator.job.machine import JobMachine
from shoal_coordinator.job.submission import Submission
from shoal_coordinator.job.view import JobView

__all__ = [
    "NO_STORAGE",
    "CopyMachine",
    "EventLog",
    "GroupCopies",
    "JobCounters",
    "JobMachine",
    "JobView",
    "Ledger",
    "LogBudget",
    "QuarantineReason",
    "RestartReason",
    "Submission",
    "default_range_size",
]
