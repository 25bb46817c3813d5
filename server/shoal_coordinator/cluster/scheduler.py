"""The scheduler: assigns workers to jobs, and plans where variables are placed (no clock, no I/O).

Jobs are served in the order of their submission. A job that waits for its workers blocks those behind it, unless it
needs more workers than the cluster has. When all jobs have the workers that they need, idle workers join running jobs
as extra workers. No worker is taken away from a job.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

from shoal import errors
from shoal._wire import Placement, with_groups
from shoal.status import JobState, Role
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.cluster.shards import (
    Candidate,
    CopyKeeper,
    NormWatch,
    PlacementPolicy,
    ShardPlan,
    candidates_for_one_server,
    held_bytes,
)
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import Effect

# Maximum number of jobs that a waiting job names as those that have the workers.
_MAX_NAMED = 3


class WaitReason(NamedTuple):
    """What a job waits for; empty if nothing.

    Each worker that comes or goes changes the numbers of all waiting jobs. So these are no part of `what`.

    Attributes:
        what: the kind of thing. If it changes, that is an event of the job, and it is stored.
        words: the same for users, with numbers and names.
    """

    what: str = ""
    words: str = ""


class Scheduler:
    """Assigns workers to jobs, and places the variables of jobs.

    Args:
        members: members of the cluster.
        jobs: jobs of the cluster.
        emit: receives the effects that are decided.
        counted: called when the generation or the number of assignments has changed.
        placement: the policy that assigns shards to servers.
        copies: makes the copies that jobs lack.

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
        copies: CopyKeeper,
    ) -> None:
        self._members, self._jobs, self.norm_watch = members, jobs, NormWatch(members, jobs)
        self._emit, self._counted = emit, counted
        self._placement, self._copies = placement, copies

        self.generation = self.assignments = 0

    def restore(self, generation: int, assignments: int) -> None:
        """Restores the last numbers that an earlier coordinator used."""
        self.generation, self.assignments = generation, assignments

    def schedule(self, now: float) -> None:
        """Assigns idle workers and places variables, where jobs need them. Repeating it changes nothing."""
        self._copies.grow(now)
        live = self._jobs.live
        idle = _IdleWorkers(self._members, self._jobs)
        if not self._reserve_or_fill(live, idle, now):
            for job in live:  # extra workers, after all jobs have those that they need
                while idle and job.free_extra_ranks and self._send(idle, job, now):
                    pass
        busy = _busy(self._members.count_alive(Role.WORKER) - len(idle), live)
        for job in live:
            waits = [_missing_workers(job, len(idle), busy)]
            own = (job.storage_waited_for, job.quarantine_note(now), self.norm_watch.waiting_for(job))
            waits += [WaitReason(text, text) for text in own]
            if text := self._copies.moving_off(job):
                waits.append(WaitReason("moves off servers that are about to leave", text))
            if text := self._copies.waiting_for(job):
                waits.append(WaitReason("continues with fewer copies than wanted", text))
            if job.unplaced is not None:
                waits.append(self._place(job, now))
            if not job.ended:
                what, words = ("; ".join(filter(None, texts)) for texts in zip(*waits, strict=True))
                job.wait_for(what, now, words)

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

    def _reserve_or_fill(self, jobs: Iterable[JobMachine], idle: "_IdleWorkers", now: float) -> bool:
        """Assigns idle workers to the jobs that need them. Returns whether the others are reserved for a job.

        They are reserved for the first pending job that must wait until enough of the busy workers are idle.
        """
        for job in jobs:
            if not idle:
                return False
            if job.spec.is_session:
                continue
            needed = job.spec.fewest_workers
            if job.state is JobState.PENDING and idle.usable(job, now) < needed:
                if needed <= self._usable(job, now):
                    return True
                continue
            vacant = len(job.free_ranks)
            while vacant and self._send(idle, job, now):
                vacant -= 1
        return False

    def _usable(self, job: JobMachine, now: float) -> int:
        """Returns how many live workers, busy or idle, are not quarantined in a job."""
        if not job.has_quarantines:  # with 1,000 workers, to ask for each takes long
            return self._members.count_alive(Role.WORKER)
        return _count_usable(job, self._members.alive(Role.WORKER), now)

    def _send(self, idle: "_IdleWorkers", job: JobMachine, now: float) -> bool:
        """Assigns an idle worker that has not finished the job yet; returns False if there is none."""
        member = idle.take(job, now)
        if member is None:
            return False
        self.assign(member, job, now)
        return True

    def _place(self, job: JobMachine, now: float) -> WaitReason:
        """Plans the placement of a job's variables; returns what it waits for."""
        servers, expected = self._members.not_draining, self._members.expected(now)
        if job.waits_for_servers(len(servers), now, expected=bool(expected)):
            return _restarting(expected) or WaitReason("waiting for servers", "waiting for servers")
        if not servers:
            return _restarting(expected) or WaitReason("waiting for a server", "waiting for a server")
        if len(servers) < (needed := job.spec.fewest_replicas):
            words = f"waiting for servers: {len(servers)} of {needed}, for {needed} copies of its shards"
            return WaitReason("waiting for servers, for copies of its shards", words)
        if job.waits_for_storage(now):
            return WaitReason()  # `storage_waited_for` says so
        program = job.unplaced
        assert program is not None
        variables = dict(program.variables)
        held = held_bytes(self._jobs.values())
        candidates = [Candidate(server.id, server.registration.address, held[server.id]) for server in servers]
        try:
            layouts = ShardPlan.of(job.spec, len(servers)).layouts(program)
            replicated = job.spec.replicas > 1
            if job.spec.optimizer.clip_norm and (replicated or not job.spec.consistency.servers_agree):
                # The norm is that of one mean, but each server would have the mean of other gradients. And squares of
                # norms name servers, but a failover changes the servers of a job.
                candidates = candidates_for_one_server(candidates, job.previous_servers)
            shards = self._placement.assign(layouts, self.norm_watch.usable(job, candidates), job.previous_servers)
        except errors.ShoalError as error:
            self._emit(job.fail(f"its variables cannot be placed: {error.message}", now))
            return WaitReason()
        self.generation += 1
        self._counted()
        placement = Placement(job.spec.name, self.generation, variables, with_groups(shards), program.encoded)
        self._emit(job.place(placement, now))
        return WaitReason()


class _IdleWorkers:
    """The live workers without an assignment.

    Most events need only their number. They themselves are found when one of them gets an assignment.
    """

    def __init__(self, members: Membership, jobs: JobTable) -> None:
        self._members, self._jobs = members, jobs
        busy = sum(job.live_workers for job in jobs.live if not job.spec.is_session)
        self._count = members.count_alive(Role.WORKER) - busy

    def __len__(self) -> int:
        return self._count

    def usable(self, job: JobMachine, now: float) -> int:
        """Returns how many of them are not quarantined in a job."""
        return _count_usable(job, self._found, now) if job.has_quarantines else self._count

    def take(self, job: JobMachine, now: float) -> Member | None:
        """Removes and returns the first one that may work for a job; None if there is none."""
        free = (it for it in self._found if not (job.is_finished(it.id) or job.is_quarantined(it.id, now)))
        if member := next(free, None):
            self._found.remove(member)
            self._count -= 1
        return member

    @cached_property
    def _found(self) -> list[Member]:
        employed = self._jobs.employed
        return [worker for worker in self._members.alive(Role.WORKER) if worker.id not in employed]


def _count_usable(job: JobMachine, workers: Iterable[Member], now: float) -> int:
    return sum(not job.is_quarantined(it.id, now) for it in workers)


def _restarting(expected: Mapping[str, float]) -> WaitReason | None:
    """Returns which draining servers a job waits for, and until when; None if there are none."""
    if not expected:
        return None
    servers = (
        f"server {next(iter(expected))} to restart"
        if len(expected) == 1
        else f"servers {', '.join(expected)} to restart"
    )
    until = max(expected.values())
    at_most = f" (until {time.strftime('%H:%M:%S', time.gmtime(until))} UTC at the latest)" if until else ""
    return WaitReason("waiting for servers to restart", f"waiting for {servers}{at_most}")


def _busy(workers: int, jobs: Iterable[JobMachine]) -> str:
    """Returns how many live workers are busy, and with which jobs; empty if none is."""
    if not workers:
        return ""
    names = [job.spec.name for job in jobs if job.live_workers and not job.spec.is_session]
    shown = ", ".join(names[:_MAX_NAMED])
    left = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f" ({workers} {'is' if workers == 1 else 'are'} alive, busy with {shown}{left})"


def _missing_workers(job: JobMachine, idle: int, busy: str) -> WaitReason:
    """Returns which workers a job lacks, and whether it waits for them.

    Args:
        job: the job.
        idle: the number of idle workers.
        busy: what the busy workers do, as `_busy` says.
    """
    needed, present = job.spec.fewest_workers, job.live_workers
    words = ""
    if job.spec.is_session:
        if present < needed and job.state is not JobState.RUNNING:
            words = f"waiting for sessions: {present} of {needed}"
    elif job.state is JobState.PENDING:
        return WaitReason("waiting for workers", f"waiting for workers: {idle} of {needed}{busy}")
    elif job.free_ranks and present < needed:
        words = f"waiting for workers: {present} of {needed}"
        if job.state is JobState.RUNNING and present:
            words = f"continues with {present} of {needed} workers; takes another one when it is idle"
    return WaitReason(words, words)
