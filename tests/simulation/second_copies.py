"""Second copies of the lock groups of a replicated job: what no move may give up (docs/decisions/0088)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shoal_coordinator.cluster.member import Member
from shoal_coordinator.job import GroupCopies, JobMachine
from shoal_coordinator.messages import BackupFailed, BackupMade, ServerProbed, ServerRef, events
from simulation.invariants import Violation
from simulation.nodes import CoordinatorNode, ServerNode

# The part of the time that a draining server has for moves in which it waits for copies, as in `DrainCoordinator`.
_COPYING_PART = 0.75


class SecondCopies:
    """The second copies in one run.

    Args:
        coordinator: the coordinator.
        servers: all servers.
    """

    def __init__(self, coordinator: CoordinatorNode, servers: Sequence[ServerNode]) -> None:
        self._coordinator, self._servers = coordinator, {it.name: it for it in servers}

    def check_held(self) -> None:
        """Raises Violation if a live server lacks a complete copy that it has by the coordinator's decisions."""
        job = self._job
        if job is None or job.placement is None:
            return
        for group in job.copies.groups:
            for server in _pair(group) if group.backup else ():
                if self._lacks(server, job, group):
                    raise Violation("two_copies", f"{server.member} has no complete copy of {group}")

    def _lacks(self, server: ServerRef, job: JobMachine, group: GroupCopies) -> bool:
        node = self._servers[server.member]
        if not node.incarnation or self._coordinator.machine.members.incarnation_at(server) != node.incarnation:
            return False  # the process is lost
        held = node.hosted.held(job.ref.name).get(group.group)
        return held is None or not held.is_complete or held.generation != job.placed.generation

    def watch(self, event: Any) -> Callable[[], object]:
        """Notes the copies before the coordinator handles an event. Returns a check of what it has decided then."""
        job = self._job
        if job is None or job.placement is None or _reports_loss(event):
            return bool
        made = event.group if isinstance(event, BackupMade) else None
        groups = [it for it in job.copies.groups if it.backup or (it.growing and it.group == made)]
        known = [(it, self._incarnations(it)) for it in groups]
        return partial(self._check_kept, event, job.placement.generation, known)

    def _incarnations(self, group: GroupCopies) -> list[int]:
        return [self._coordinator.machine.members.incarnation_at(it) for it in _pair(group)]

    def _check_kept(self, event: Any, generation: int, known: list[tuple[GroupCopies, list[int]]]) -> None:
        job = self._job
        if job is None or job.placement is None or job.placement.generation != generation:
            return
        now = {it.group: it for it in job.copies.groups}
        for before, incarnations in known:
            after = now.get(before.group)
            lost = self._incarnations(before) != incarnations
            if not after or after.backup or lost or self._may_give_up(job, before, after):
                continue
            raise Violation("two_copies", f"{event} gives up the second copy of {before}: {after}")

    def _may_give_up(self, job: JobMachine, before: GroupCopies, after: GroupCopies) -> bool:
        """Returns whether a group may continue with one copy, although no server was lost."""
        members = self._coordinator.machine.members
        primary, backup = (members.find(it.member) for it in _pair(before))
        assert primary
        assert backup
        failed = job.copies.failed_on(before.group)
        others = {it.id for it in members.not_draining} - {primary.id, backup.id}
        if not others - {*failed} or (primary.draining and self._is_late(primary)):
            return True
        splits = job.copies.may_split and len(before.shards) > 1 and after.primary == before.primary
        return splits and not (primary.draining or backup.draining)

    def _is_late(self, member: Member) -> bool:
        time_s = member.hands_over_until - member.drains_since
        now = self._coordinator.machine_time()
        return bool(member.hands_over_until) and now >= member.drains_since + _COPYING_PART * time_s

    @property
    def _job(self) -> JobMachine | None:
        """The replicated job; None if it is not placed, or has ended."""
        job = self._coordinator.job if self._coordinator.life else None
        return job if job and job.copies.is_replicated and job.created and not job.ended else None


def _pair(group: GroupCopies) -> list[ServerRef]:
    return [it for it in (group.primary, group.second) if it]


def _reports_loss(event: Any) -> bool:
    """Returns whether an event may tell of a lost connection."""
    if isinstance(event, events.HeartbeatReceived):
        return bool(event.load and event.load.broken_replicas)
    return isinstance(event, BackupFailed | ServerProbed)


__all__ = ["SecondCopies"]
