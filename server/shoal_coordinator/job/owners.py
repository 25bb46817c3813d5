"""The independent owners of one job's state, grouped for the classes that coordinate them."""

from dataclasses import dataclass

from shoal_coordinator.job.accounting import Accounting
from shoal_coordinator.job.event_log import EventLog
from shoal_coordinator.job.lifecycle import Lifecycle
from shoal_coordinator.job.plan import Plan
from shoal_coordinator.job.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True)
class Owners:
    """The owners of one job's state that do not depend on another owner.

    Attributes:
        log: events for watchers.
        lifecycle: the job's state.
        plan: what the job trains, and where its shards are.
        worker_group: its workers.
        accounting: what was done.
    """

    log: EventLog
    lifecycle: Lifecycle
    plan: Plan
    worker_group: WorkerGroup
    accounting: Accounting
