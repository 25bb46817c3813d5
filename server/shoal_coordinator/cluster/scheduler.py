"""The scheduler: assigns workers to jobs, and plans where variables are placed (no clock, no I/O).

Jobs are served in the order of their submission. A job that waits for its workers blocks those behind it, unless it
needs more workers than the cluster has. When all jobs have the workers that they need, idle workers join running jobs
as extra workers. No worker is taken away from a job.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from shoal import errors
from shoal._wire import Placement
from shoal.status import JobState, Role
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.cluster.norm_watch import NormWatch
from shoal_coordinator.cluster.placement import (
    Candidate,
    PlacementPolicy,
    ShardPlan,
    candidates_for_one_server,
)
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import Effect

# Maximum number of jobs that a waiting job names as those that have the workers.
_MAX_NAMED = 3


class Scheduler:
    """Assigns workers to jobs, and places the variables of jobs.

    Args:
        members: members of the cluster.
        jobs: jobs of the cluster.
        emit: receives the effects that are decided.
        counted: called when the generation or the number of assignments has changed.
        placement: the policy that assigns shards to servers.

    Attributes:
        generation: last number of a placement. It never decreases.
        assignments: last number of an assignment. It never decreases.
        norm_watch: knows the servers that cannot reach each other.
    """

    def __init__(
        self,
        members: Membership,
        jobs: JobTable,
        emit: Callable[[Iterable[Effect]], None],
        counted: Callable[[], None],
        placement: PlacementPolicy,
    ) -> None:
        self._members, self._jobs, self.norm_watch = members, jobs, NormWatch(members, jobs)
        self._emit, self._counted = emit, counted
        self._placement = placement

        self.generation = self.assignments = 0

    def restore(self, generation: int, assignments: int) -> None:
        """Restores the last numbers that an earlier coordinator used."""
        self.generation, self.assignments = generation, assignments

    def schedule(self, now: float) -> None:
        """Assigns idle workers and places variables, where jobs need them. Repeating it changes nothing."""
        workers = self._members.alive(Role.WORKER)
        employed = self._jobs.employed
        idle = [worker for worker in workers if worker.id not in employed]
        busy_workers, assigned = len(workers) - len(idle), self.assignments
        for job in self._jobs.live:
            if not idle:
                break
            self._fill_ranks(job, idle, workers, now)
        for job in self._jobs.live:  # extra workers, after all jobs have those that they need
            while idle and job.free_extra_ranks and self._send(idle, job, now):
                pass
        busy_workers += self.assignments - assigned
        idling = len(workers) - busy_workers
        busy = _busy(busy_workers, self._jobs.live)
        for job in self._jobs.live:
            missing = [_missing_workers(job, idling, busy), job.storage_waited_for, job.quarantine_note(now)]
            missing.append(self.norm_watch.waiting_for(job))
            if job.unplaced is not None:
                missing.append(self._place(job, now))
            if not job.ended:
                job.wait_for("; ".join(filter(None, missing)), now)

    def assign(self, member: Member, job: JobMachine, now: float) -> None:
        """Gives a worker an assignment in a job that has room for it.

        Args:
            member: the worker or session.
            job: the job.
            now: seconds of Unix time.
        """
        self.assignments += 1
        self._counted()
        self._jobs.assigned(member.id, job)
        job.add_worker(member.id, member.incarnation, self.assignments, now)

    def _fill_ranks(self, job: JobMachine, idle: list[Member], workers: list[Member], now: float) -> None:
        """Assigns idle workers to a job, or reserves them for it."""
        needed = job.spec.fewest_workers
        if job.spec.is_session:
            return
        if job.state is JobState.PENDING and _usable(job, idle, now) < needed:
            if needed <= _usable(job, workers, now):
                idle.clear()  # reserve them for this job until enough of the busy ones are idle
            return
        vacant = len(job.free_ranks)
        while vacant and self._send(idle, job, now):
            vacant -= 1

    def _send(self, idle: list[Member], job: JobMachine, now: float) -> bool:
        """Assigns an idle worker that has not finished the job yet; returns False if there is none."""
        free = (it for it in idle if not (job.is_finished(it.id) or job.is_quarantined(it.id, now)))
        member = next(free, None)
        if member is None:
            return False
        idle.remove(member)
        self.assign(member, job, now)
        return True

    def _place(self, job: JobMachine, now: float) -> str:
        """Plans the placement of a job's variables; returns what it waits for, or an empty string."""
        servers, expected = self._members.not_draining, self._members.expected(now)
        if job.waits_for_servers(len(servers), now, expected=bool(expected)):
            return _restarting(expected) or "waiting for servers"
        if not servers:
            return _restarting(expected) or "waiting for a server"
        if job.waits_for_storage(now):
            return ""  # `storage_waited_for` says so
        program = job.unplaced
        assert program is not None
        variables = dict(program.variables)
        held = self._placed_bytes()
        candidates = [Candidate(server.id, server.registration.address, held[server.id]) for server in servers]
        try:
            layouts = ShardPlan.of(job.spec, len(servers)).layouts(program)
            if job.spec.optimizer.clip_norm and not job.spec.consistency.servers_agree:
                # The norm is that of one mean, but each server would have the mean of other gradients.
                candidates = candidates_for_one_server(candidates, job.previous_servers)
            shards = self._placement.assign(layouts, self.norm_watch.usable(job, candidates), job.previous_servers)
        except errors.ShoalError as error:
            self._emit(job.fail(f"its variables cannot be placed: {error.message}", now))
            return ""
        self.generation += 1
        self._counted()
        placement = Placement(job.spec.name, self.generation, variables, shards, program.encoded)
        self._emit(job.place(placement, now))
        return ""

    def _placed_bytes(self) -> Counter[str]:
        """Returns the bytes of values placed on each server; heartbeats would report them later."""
        held: Counter[str] = Counter()
        for job in self._jobs.values():
            for shard in job.placement.shards if job.placement else ():
                held[shard.server] += shard.layout.nbytes
        return held


def _usable(job: JobMachine, workers: list[Member], now: float) -> int:
    """Returns how many of some workers are not quarantined in a job. With 1,000 workers, to ask for each takes long."""
    if not job.has_quarantines:
        return len(workers)
    return sum(not job.is_quarantined(it.id, now) for it in workers)


def _restarting(expected: Mapping[str, float]) -> str:
    """Returns which draining servers a job waits for, and until when; an empty string if there are none."""
    if not expected:
        return ""
    servers = (
        f"server {next(iter(expected))} to restart"
        if len(expected) == 1
        else f"servers {', '.join(expected)} to restart"
    )
    until = max(expected.values())
    at_most = f" (until {time.strftime('%H:%M:%S', time.gmtime(until))} UTC at the latest)" if until else ""
    return f"waiting for {servers}{at_most}"


def _busy(workers: int, jobs: Iterable[JobMachine]) -> str:
    """Returns how many live workers are busy, and with which jobs; empty if none is."""
    if not workers:
        return ""
    names = [job.spec.name for job in jobs if job.live_workers and not job.spec.is_session]
    shown = ", ".join(names[:_MAX_NAMED])
    left = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f" ({workers} {'is' if workers == 1 else 'are'} alive, busy with {shown}{left})"


def _missing_workers(job: JobMachine, idle: int, busy: str) -> str:
    """Returns which workers a job lacks, and whether it waits for them. Empty if it lacks none.

    Args:
        job: the job.
        idle: the number of idle workers.
        busy: what the busy workers do, as `_busy` says.
    """
    needed, present = job.spec.fewest_workers, job.live_workers
    if job.spec.is_session:
        lacking = present < needed and job.state is not JobState.RUNNING
        return f"waiting for sessions: {present} of {needed}" if lacking else ""
    if job.state is JobState.PENDING:
        return f"waiting for workers: {idle} of {needed}{busy}"
    if not job.free_ranks or present >= needed:
        return ""
    if job.state is JobState.RUNNING and present:
        return f"continues with {present} of {needed} workers; takes another one when it is idle"
    return f"waiting for workers: {present} of {needed}"
