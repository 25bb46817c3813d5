"""The owners of one job's state that stand for themselves, together, as those that coordinate them are given them."""

from dataclasses import dataclass

from shoal_coordinator.job.accounting import Accounting
from shoal_coordinator.job.event_log import EventLog
from shoal_coordinator.job.lifecycle import Lifecycle
from shoal_coordinator.job.plan import Plan
from shoal_coordinator.job.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True)
class Owners:
    """The owners of one job's state that no other owner has to be asked for.

    Attributes:
        log: what happened, for those who watch.
        lifecycle: the job's state.
        plan: what it trains, and where that is.
        worker_group: who works on it.
        accounting: what was done.
    """

    log: EventLog
    lifecycle: Lifecycle
    plan: Plan
    worker_group: WorkerGroup
    accounting: Accounting
