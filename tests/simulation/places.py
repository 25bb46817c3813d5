"""Places of shards: what must hold of a draining server that may leave, and of all servers in calm time.

A run with moves has a job that does not end before the shards are in their places. If they never are, it does not
complete.
"""

from collections.abc import Sequence

from shoal.status import JobState, Role
from shoal.v1 import state_pb2
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.shards.rebalance import GroupLoad, rebalance
from shoal_coordinator.job import JobMachine
from simulation.invariants import Checker, Violation
from simulation.nodes import CoordinatorNode, ServerNode
from simulation.nodes.coordinator import MOVED_BYTES
from simulation.plan import Plan


class Places:
    """The places of the shards of one run.

    Args:
        plan: the run.
        coordinator: the coordinator.
        servers: all servers.
        checker: knows the primaries.
    """

    def __init__(
        self, plan: Plan, coordinator: CoordinatorNode, servers: Sequence[ServerNode], checker: Checker
    ) -> None:
        self._plan, self._coordinator, self._servers, self._checker = plan, coordinator, servers, checker
        self._settled = False

    def holds_end(self) -> bool:
        """Returns whether the job is at its end, and must not end yet."""
        job = self._coordinator.job if self._coordinator.life else None
        if self._settled or not job or not self._is_at_end(job):
            return False
        self._settled = not self.problem()
        return not self._settled

    def _is_at_end(self, job: JobMachine) -> bool:
        data = job.record_later("ledger")()
        if not isinstance(data, state_pb2.LedgerRecord):
            return False
        left = (self._plan.epochs - data.next.epoch) * self._plan.samples - data.next.start
        return left <= self._plan.workers * self._plan.range_size

    def problem(self) -> str:
        """Returns what is not in its place although it should be; empty if everything is."""
        coordinator = self._coordinator
        if coordinator.scheduler.now < self._plan.calm_at:
            return "faults may come"
        if coordinator.life is None:
            return "the coordinator is away"
        members = coordinator.machine.members
        for server in self._servers:
            found = members.find(server.name)
            if server.draining.begun or (found and found.alive and found.has_to_leave):
                return f"server {server.name} is about to leave"
            if not server.draining.gone and not (found and found.alive and found.incarnation == server.incarnation):
                return f"server {server.name} is not a member"
        job = coordinator.job
        if job is None or job.state is not JobState.RUNNING or not job.created:
            return "the job does not train"
        return self._moves_left(job, [it for it in members.alive(Role.SERVER) if not it.draining])

    def _moves_left(self, job: JobMachine, servers: Sequence[Member]) -> str:
        zones, groups = {it.id: it.zone for it in servers}, job.copies.groups
        names = {*zones}
        for group in groups:
            if not group.told or group.growing:
                return f"the copies of {group} change"
            if group.primary.member not in names:
                return f"{group} is on a server that drains"
            if job.copies.is_replicated and len(names) > 1 and (not group.backup or group.backup.member not in names):
                return f"{group} has no second copy"
            if (
                group.backup
                and len({*zones.values()}) > 1
                and zones[group.primary.member] == zones[group.backup.member]
            ):
                return f"both copies of {group} are in zone {zones[group.primary.member]}"
        loads = {it.group: GroupLoad(it.primary.member, job.copies.shard_bytes(it)) for it in groups}
        move = rebalance(loads, dict.fromkeys(names, 0), splits=job.copies.may_split, smallest_bytes=MOVED_BYTES)
        return f"{move} is left" if move else ""

    def check_drained(self, name: str) -> None:
        """Raises Violation if a server that was allowed to leave serves a part of a live job."""
        job = self._coordinator.job if self._coordinator.life else None
        if job is None or job.ended or job.placement is None:
            return
        others = {it.id for it in self._coordinator.machine.members.not_draining}
        for group in job.copies.groups:
            if group.primary.member == name:
                raise Violation("drained", f"server {name} may leave, but serves {group} of a job that is {job.state}")
            free = others - {group.primary.member} - set(job.copies.failed_on(group.group))
            if free and group.second and group.second.member == name:
                raise Violation("drained", f"server {name} may leave, but has a copy of {group}, and {free} has none")
        [server] = [it for it in self._servers if it.name == name]
        for held in server.hosted.held(job.ref.name).values():
            if held.generation == job.placement.generation and self._checker.serves(held):
                raise Violation("drained", f"server {name} may leave, but has lock group {held.number}")


__all__ = ["Places"]
