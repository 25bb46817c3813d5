"""Host of the effect runner: the part of the coordinator that receives outcomes of effects.

It also tells the runner which effects are still wanted.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

from shoal_coordinator.cluster import Cluster
from shoal_coordinator.effects import EffectReport
from shoal_coordinator.messages import CheckpointPublished, CutHeld, HoldResult, JobRef, ServerRef, events


class Handler(Protocol):
    """What handles events."""

    def handle(self, event: events.ClusterEvent[events.R]) -> events.R:
        """Feeds an event to the machine, and returns when the decision is durable."""


class MachineHost:
    """The `effects.EffectHost` of a coordinator.

    Args:
        handler: The coordinator.
        machine: Its machine.
        lock: Guards the machine.
    """

    def __init__(self, handler: Handler, machine: Cluster, lock: threading.Lock) -> None:
        self._handler, self._machine, self._lock = handler, machine, lock

    def report(self, outcome: EffectReport) -> None:
        """Handles the outcome of an effect."""
        self._handler.handle(outcome)

    def report_all(self, outcomes: Sequence[EffectReport]) -> None:
        """Handles the outcomes of effects that ran together, as one event."""
        self._handler.handle(events.OutcomesReceived(tuple(outcomes)))

    def published(self, event: CheckpointPublished) -> bool:
        """Records a complete checkpoint, and returns whether older ones may be removed."""
        return self._handler.handle(event)

    def held(self, event: CutHeld) -> HoldResult:
        """Returns the coordinator's own part of a cut."""
        return self._handler.handle(event)

    def wanted(self, effect: int, server: ServerRef) -> bool:
        """Returns whether a server is alive and the effect is still pending."""
        with self._lock:
            return self._machine.wants(effect, server)

    def is_live(self, job: JobRef) -> bool:
        """Returns whether a job has not ended."""
        with self._lock:
            return self._machine.is_live(job)

    def incarnation(self, server: ServerRef) -> int:
        """Returns the incarnation of a live server at this address, or 0."""
        with self._lock:
            return self._machine.members.incarnation_at(server)


__all__ = ["Handler", "MachineHost"]
