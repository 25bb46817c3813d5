"""Who works on what, and where the variables are: by reconciliation of what jobs want with who is there. Pure.

Jobs are served in the order in which they came; one that waits for its workers holds up those behind it, unless it asks
for more than the cluster has. Extra workers of running jobs come last, and stay: nobody is taken away from a job.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from shoal import errors
from shoal._wire import Placement
from shoal.status import JobState, Role
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.membership import Member, Membership
from shoal_coordinator.cluster.placement import Candidate, PlacementPolicy, default_shards, plan_shards
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import Effect


class Scheduler:
    """Sends workers to jobs, and gives their variables a place.

    Args:
        members: of the cluster.
        jobs: of the cluster.
        emit: told what is now to be done.
        counted: told that the generation or the number of assignments is another one.
        placement: which server holds which shard.
    """

    def __init__(
        self,
        members: Membership,
        jobs: JobTable,
        emit: Callable[[Iterable[Effect]], None],
        counted: Callable[[], None],
        placement: PlacementPolicy,
    ) -> None:
        self._members, self._jobs = members, jobs
        self._emit, self._counted = emit, counted
        self._placement = placement
        # The latest numbers of a placement and of a part in a job. They count for ever: none is given out twice.
        self.generation = self.assignments = 0

    def restore(self, generation: int, assignments: int) -> None:
        """Takes up the latest numbers that an earlier coordinator has given out."""
        self.generation, self.assignments = generation, assignments

    def schedule(self, now: float) -> None:
        """Brings what is nearer to what is wanted. Repeating it changes nothing."""
        workers = self._members.alive(Role.WORKER)
        idle = [worker for worker in workers if self._jobs.find_of(worker.id) is None]
        for job in self._jobs.live:
            self._staff(job, idle, len(workers), now)
        for job in self._jobs.live:  # those that are left over after all jobs have their own
            while job.openings and self._send(idle, job, now):
                pass
        idling = sum(self._jobs.find_of(worker.id) is None for worker in workers)
        for job in self._jobs.live:
            lacks = [_waiting_for(job, idling), job.storage_waited_for]
            if job.unplaced is not None:
                lacks.append(self._place(job, now))
            if not job.ended:
                job.wait_for("; ".join(filter(None, lacks)), now)

    def enrol(self, member: Member, job: JobMachine, now: float) -> None:
        """Gives a worker a part in a job that has room for it."""
        self.assignments += 1
        self._counted()
        job.enrol(member.id, member.incarnation, self.assignments, now)

    def _staff(self, job: JobMachine, idle: list[Member], workers: int, now: float) -> None:
        """Sends idle workers to a job, or keeps them for it."""
        needed = job.spec.fewest_workers
        if job.spec.is_session:
            return
        if job.state is JobState.PENDING and len(idle) < needed:
            if needed <= workers:
                idle.clear()  # it is this job's turn; the busy ones will join them
            return
        while job.vacancies and self._send(idle, job, now):
            pass

    def _send(self, idle: list[Member], job: JobMachine, now: float) -> bool:
        """Sends an idle worker to a job, if there is one that is not through with it."""
        member = next((member for member in idle if not job.is_finished(member.id)), None)
        if member is None:
            return False
        idle.remove(member)
        self.enrol(member, job, now)
        return True

    def _place(self, job: JobMachine, now: float) -> str:
        """Plans where a job's variables go; says what is lacking for it."""
        servers, expected = self._members.not_draining, self._members.expected(now)
        if job.waits_for_servers(len(servers), now, expected=bool(expected)):
            return _restarting(expected) or "waiting for servers"
        if not servers:
            return _restarting(expected) or "waiting for a server"
        if job.waits_for_storage(now):
            return ""  # it says so itself, while it tries too
        variables = dict(job.unplaced or {})
        held = self._placed_bytes()
        candidates = [Candidate(server.id, server.registration.address, held[server.id]) for server in servers]
        try:
            count = job.spec.shards or default_shards(len(servers), variables.values())
            layouts = plan_shards(variables, count, np.dtype(job.spec.wire))
            shards = self._placement.assign(layouts, candidates, job.home)
        except errors.ShoalError as error:
            self._emit(job.fail(f"its variables cannot be placed: {error.message}", now))
            return ""
        self.generation += 1
        self._counted()
        self._emit(job.place(Placement(job.spec.name, self.generation, variables, shards), now))
        return ""

    def _placed_bytes(self) -> Counter[str]:
        """Bytes of values that are placed on each server; heartbeats would tell it later."""
        held: Counter[str] = Counter()
        for job in self._jobs.values():
            for shard in job.placement.shards if job.placement else ():
                held[shard.server] += shard.layout.nbytes
        return held


def _restarting(expected: Mapping[str, float]) -> str:
    """Which servers a job waits for, and until when if they have gone; empty: for none that said so."""
    if not expected:
        return ""
    who = (
        f"server {next(iter(expected))}, which restarts"
        if len(expected) == 1
        else f"servers {', '.join(expected)}, which restart"
    )
    until = max(expected.values())
    at_most = f" (until {time.strftime('%H:%M:%S', time.gmtime(until))} UTC at most)" if until else ""
    return f"waiting for {who}{at_most}"


def _waiting_for(job: JobMachine, idle: int) -> str:
    """Whom a job waits for, where so many workers are idle."""
    needed, there = job.spec.fewest_workers, job.staff
    if job.spec.is_session:
        lacking = there < needed and job.state is not JobState.RUNNING
        return f"waiting for sessions: {there} of {needed}" if lacking else ""
    if job.state is JobState.PENDING:
        return f"waiting for workers: {idle} of {needed}"
    return f"waiting for workers: {there} of {needed}" if job.vacancies and there < needed else ""
