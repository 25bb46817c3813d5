"""The state machine of the whole cluster: members, jobs and assignments of workers (no clock, no I/O).

`Cluster.handle(event, now)` is the only way to change its state. This module handles the events of members.
`user_requests` handles those of users, `worker_requests` the events by which workers take part in their jobs, and
`outcome_handler` the outcomes of effects. `scheduler` assigns workers to jobs whenever members or jobs have changed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from shoal import errors
from shoal._wire import Cursor
from shoal.status import ClusterStatus, JobStatus, Role
from shoal_coordinator.cluster.dirty_records import DirtyRecords
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.listing import Listing
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.membership import RETURN_S, Membership
from shoal_coordinator.cluster.outcome_handler import OutcomeHandler
from shoal_coordinator.cluster.pending_effects import PendingEffects
from shoal_coordinator.cluster.policy import ClusterPolicy
from shoal_coordinator.cluster.scheduler import Scheduler
from shoal_coordinator.cluster.shards import CopyKeeper, Rebalancer, ShardPlan
from shoal_coordinator.cluster.snapshot import ClusterCounters, ClusterSnapshot
from shoal_coordinator.cluster.user_requests import UserRequests
from shoal_coordinator.cluster.worker_requests import WorkerRequests
from shoal_coordinator.job import JobCounters, JobMachine
from shoal_coordinator.messages import (
    CommitCheckpoint,
    Effect,
    HeartbeatResult,
    JobRef,
    RegisterResult,
    ScanCheckpoints,
    ServerRef,
    TakeCut,
    events,
)


class Cluster:
    """The state machine of one cluster.

    Args:
        cluster: id of the cluster, generated once and kept.
        policy: settings of the operator.
        now: seconds of Unix time that never go back, as in every method.

    Attributes:
        counters: counts of job events since this object was created.
        listing: lists of jobs and members, a page at a time.
        take_changed_jobs: returns the jobs that changed, or have new events; see `DirtyRecords.take_changed_jobs`.
    """

    def __init__(self, cluster: str, policy: ClusterPolicy, now: float) -> None:
        self._id = cluster
        self._policy = policy
        self._dirty = DirtyRecords()
        self._members = Membership(
            policy.heartbeat_timeout_s,
            self._dirty.member,
            return_s=policy.server_return_s,
            holder_members=policy.holder_members,
        )
        self._members.shortest_interval_s = policy.heartbeat_interval_s
        self._jobs = JobTable(self._dirty.job_event, policy.keep_finished, policy.event_bytes)
        self.take_changed_jobs = self._dirty.take_changed_jobs
        self.counters = JobCounters()
        self._expired_at = now  # when heartbeat timeouts were last checked
        self._lost: dict[str, Role] = {}  # members declared lost since the last `TimePassed`
        self._pending_effects = PendingEffects(self._dirty.effect)
        self._effects: list[Effect] = []  # decided by the current event
        emit, schedule, pending = self._emit, self._schedule, self._pending_effects
        self._copies = CopyKeeper(
            self._jobs, self._members, pending, emit, schedule, self._declare_lost, self._fail_checkpoint
        )
        self._rebalancer = Rebalancer(self._jobs, self._members, self._copies, policy.smallest_move_bytes)
        self._scheduler = Scheduler(self._members, self._jobs, emit, self._dirty.counts, policy.placement, self._copies)
        patience_s = 2 * max(policy.heartbeat_timeout_s, RETURN_S)
        self._outcomes = OutcomeHandler(self._jobs, self._members, pending, emit, schedule, patience_s, self._copies)
        draining = self._outcomes.draining
        self.listing = Listing(self._jobs, self._members, draining.needs)
        self._worker_requests = WorkerRequests(
            self._jobs,
            self._members,
            self._scheduler,
            self._outcomes,
            emit,
            schedule,
            policy.jobs,
            self._copies,
            self._declare_lost,
        )
        self._user_requests = UserRequests(
            self._jobs, self._dirty, self.counters, emit, schedule, self._forget, policy, self._members, draining
        )
        self._handlers: dict[type[events.ClusterEvent[Any]], Callable[[Any, float], Any]] = {
            events.TimePassed: self._time_passed,
            events.RegistrationReceived: self._registration_received,
            events.HeartbeatReceived: self._heartbeat_received,
            events.AttendanceChanged: self._attendance_changed,
            events.MemberLeft: self._member_left,
            events.DrainRequested: self._drain_requested,
            **self._user_requests.handlers,
            **self._worker_requests.handlers,
            **self._outcomes.handlers,
        }

    def handle(self, event: events.ClusterEvent[events.R], now: float) -> tuple[events.R, list[Effect]]:
        """Handles an event that happened at `now`.

        Returns:
            The event's reply, and the effects that were decided, in order.

        Raises:
            ShoalError: the event is refused. Changes made before, such as an expired heartbeat timeout, stay; the next
                event returns their effects.
        """
        answer: events.R = self._handlers[type(event)](event, now)
        effects, self._effects = self._effects, []
        return answer, effects

    @classmethod
    def restored(cls, snapshot: ClusterSnapshot, policy: ClusterPolicy, now: float) -> "Cluster":
        """Returns a cluster as an earlier coordinator stored it. All heartbeat timeouts start now.

        Args:
            snapshot: the stored records.
            policy: the operator's settings, which may have changed.
            now: seconds of Unix time.

        Returns:
            The restored cluster.

        Raises:
            ShoalError, AssertionError, KeyError, ValueError: the snapshot is inconsistent.
        """
        counts = snapshot.counts
        cluster = cls(counts.cluster, policy, now)
        cluster._user_requests.submissions = counts.submissions
        cluster._scheduler.restore(counts.generation, counts.assignments)
        cluster._members.restore(snapshot.members, counts.incarnation, now)
        for submission, job in snapshot.jobs.items():
            changed = partial(cluster._dirty.job, submission)
            life = JobMachine.restored(
                submission, job, now, changed, checkpoints=policy.checkpoints, counters=cluster.counters
            )
            cluster._jobs.add(life)
        cluster._pending_effects.restore(snapshot.effects, counts.effects)
        cluster._resume(now)
        return cluster

    def _resume(self, now: float) -> None:
        """Makes the decisions that are due after a restore. The policy may differ from the earlier coordinator's."""
        for job in self._jobs.values():  # before any decision depends on them
            job.validate()
        for job in self._jobs.live:
            self._emit(job.end_when_saved(now))
            self._outcomes.draining.resume(job, now)
        self._schedule(now)
        self._effects.clear()  # they are pending, like all others

    # Stored state.

    @property
    def changed(self) -> bool:
        """Whether `take_dirty` would return any keys."""
        return bool(self._dirty)

    def take_dirty(self) -> list[str]:
        """Returns the keys (`record_keys`) of the records that have changed since the last call, in order."""
        return self._dirty.take()

    @property
    def counts(self) -> ClusterCounters:
        """The cluster's id, and the last number given to each kind of object."""
        return ClusterCounters(
            cluster=self._id,
            generation=self._scheduler.generation,
            submissions=self._user_requests.submissions,
            assignments=self._scheduler.assignments,
            effects=self._pending_effects.last,
            incarnation=self._members.incarnation,
        )

    @property
    def members(self) -> Membership:
        """All remembered members, in order of id. For reading only."""
        return self._members

    def find_member(self, member: str) -> Member | None:
        """Returns a remembered member, alive or not."""
        return self._members.find(member)

    @property
    def submitted(self) -> Mapping[int, JobMachine]:
        """All remembered jobs, by submission."""
        return self._jobs.by_submission

    @property
    def pending_effects(self) -> list[Effect]:
        """The effects that are not known to be done, in order; any of them may be repeated."""
        return list(self._pending_effects)

    def find_effect(self, number: int) -> Effect | None:
        """Returns a pending effect."""
        return self._pending_effects.find(number)

    # Current state.

    @property
    def generation(self) -> int:
        """The generation of the newest placement."""
        return self._scheduler.generation

    @property
    def wanted_workers(self) -> int:
        """The number of workers that live jobs could use now, including those that they have."""
        return sum(job.wanted_workers for job in self._jobs.live)

    @property
    def groups_without_backup(self) -> int:
        """The number of lock groups of live jobs that lack a complete backup."""
        return sum(job.copies.without_backup for job in self._jobs.live)

    def wants(self, effect: int, server: ServerRef) -> bool:
        """Returns whether an effect is still pending and one of its servers is alive."""
        return bool(self._members.incarnation_at(server)) and self._pending_effects.find(effect) is not None

    def is_live(self, job: JobRef) -> bool:
        """Returns whether a submission has not ended."""
        return self._jobs.find_live(job) is not None

    @property
    def event_kinds(self) -> Collection[type[events.ClusterEvent[Any]]]:
        """The kinds of events that `handle` takes."""
        return self._handlers.keys()

    def job(self, name: str) -> JobMachine:
        """Returns a job by name, for reading.

        Raises:
            UnknownJob: no job has this name.
        """
        return self._jobs.named(name)

    def shard_plan(self, name: str) -> ShardPlan | None:
        """Returns the plan that a job would need if it were described now; None if it needs none."""
        job = self._jobs.get(name)
        if job is None or job.ended or job.described:
            return None
        servers = len(self._members.not_draining)
        return ShardPlan.of(job.spec, servers) if servers else None

    def jobs(self, now: float) -> list[JobStatus]:
        """Returns the status of all jobs, newest first."""
        return [listed.status for listed in self.listing.jobs(now, len(self._jobs))]

    def status(self, now: float) -> ClusterStatus:
        """Returns the status of the members, including those that died in the last minutes."""
        found = tuple(self.listing.members(now, len(self._members)))
        return ClusterStatus(self._id, self.generation, found, self._members.heartbeat_interval_s)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        self._members.validate()
        placements = [job.placement.generation for job in self._jobs.values() if job.placement]
        assert len(set(placements)) == len(placements), "two jobs share a placement"
        assert max(placements, default=0) <= self._scheduler.generation
        busy = Counter(worker for job in self._jobs.values() for worker in job.workers)
        assert all(count == 1 for count in busy.values()), "a worker has assignments in two jobs"
        for name, job in self._jobs.items():
            assert name == job.ref.name == job.spec.name
            job.validate()
            for worker, incarnation in job.workers.items():
                self._members.check(worker, incarnation)
            lost = [server.member for server in job.servers if not self._members.is_alive(server.member)]
            assert job.ended or not lost, "a job continues without its shards"
        kinds = Counter(bool(job.servers) for job in self._jobs.values() if job.ended)
        assert max(kinds.values(), default=0) <= self._policy.keep_finished
        submissions = [job.ref.submission for job in self._jobs.values()]
        assert submissions == sorted(submissions)
        assert max(submissions, default=0) <= self._user_requests.submissions
        self._pending_effects.validate()
        self._outcomes.draining.validate(self._jobs.live)
        self._copies.validate()
        # Each attempt has exactly one effect, so the outcome of the effect is the outcome of the attempt.
        attempts = ScanCheckpoints | TakeCut | CommitCheckpoint
        begun = Counter(effect.job for effect in self._pending_effects if isinstance(effect, attempts))
        for job in self._jobs.live:
            assert begun[job.ref] == job.checkpoint_in_progress, "a checkpoint attempt without its effect, or with two"

    # Members.

    def _time_passed(self, event: events.TimePassed, now: float) -> dict[str, Role]:
        self._members.breaker.heartbeats_delayed(event.heartbeat_wait_s, event.refused_heartbeats, now)
        self._declare_lost(self._expired(now), now)
        waiting = self._worker_requests.end_hung(now, self._members.heartbeat_interval_s)
        waiting |= self._outcomes.lose_unreachable(self._scheduler.norm_watch, now)
        waiting |= self._copies.retries or self._outcomes.draining.moves or self._rebalancer.is_due(now)
        for job in self._jobs.live:
            self._emit(job.checkpoint_when_due(now))
            waiting |= job.end_quarantines(now) or job.unplaced is not None  # perhaps until some time
        if waiting:
            self._schedule(now)
        lost, self._lost = self._lost, {}
        return lost

    def _registration_received(self, event: events.RegistrationReceived, now: float) -> RegisterResult:
        claimed = event.registration.member
        lost = self._expired(now, claimed)
        lost += self._members.lose_absent(claimed, now, event.registration)
        self._note_lost(lost, now)
        changed = bool(lost)
        try:
            member = self._members.register(event.registration, now)
            changed |= member.role is not Role.SESSION  # no job waits for one that has not asked for a rank yet
        finally:
            if changed:  # only now, because a job that has lost a server may need the new process
                self._schedule(now)
        return RegisterResult(member.incarnation)

    def _heartbeat_received(self, event: events.HeartbeatReceived, now: float) -> HeartbeatResult:
        member = self._members.heartbeat(event.member, event.incarnation, event.shards, event.bytes, now, event.load)
        if event.load and event.load.broken_replicas:
            self._copies.reported(member, event.load.broken_replicas, now)
        job = self._jobs.find_of(event.member)
        assignment = job.submission.assigned(job.assignment_of(event.member)) if job else None
        return HeartbeatResult(assignment, drains=member.order is not None, leave=member.has_to_leave)

    def _member_left(self, event: events.MemberLeft, now: float) -> None:
        if member := self._members.leave(event.member, event.incarnation, now):
            self._lose(member, now, event.cursor)
            self._schedule(now)

    def _attendance_changed(self, event: events.AttendanceChanged, _: float) -> None:
        self._members.note_attendance(event.member, event.incarnation, absent=event.absent)

    def _drain_requested(self, event: events.DrainRequested, now: float) -> tuple[str, ...]:
        member, draining = self._members.check(event.member, event.incarnation), self._outcomes.draining
        if member.role is not Role.SERVER:
            raise errors.BadRequest(f"{member.id} is a {member.role.value}; only servers can be drained")
        draining.note_wait(member, event.left_s, now)
        if not member.draining:
            draining.start(member, now)
            self._schedule(now)
        return tuple(job.ref.name for job in self._jobs.live if draining.waits_for(member, job))

    def _expired(self, now: float, claimed: str = "") -> list[Member]:
        """Marks members as lost whose heartbeat timeouts have expired, and returns them; see `Membership.expire`."""
        paused_s, self._expired_at = now - self._expired_at, now
        if paused_s > self._policy.heartbeat_timeout_s / 2:
            # This process was stopped or starved, so the missing heartbeats do not mean that members died.
            self._members.extend_timeouts(paused_s)
        return self._members.expire(now, claimed)

    def _declare_lost(self, lost: Sequence[Member], now: float) -> None:
        self._note_lost(lost, now)
        if lost:
            self._schedule(now)

    def _note_lost(self, lost: Iterable[Member], now: float) -> None:
        for member in lost:
            self._lost[member.id] = member.role
            self._lose(member, now)

    def _fail_checkpoint(self, event: events.CheckpointFailed, now: float) -> None:
        # Without the scheduler: it would see lost members whose jobs do not know it yet.
        self._outcomes.end_checkpoint(event, now)

    def _lose(self, member: Member, now: float, cursor: Cursor | None = None) -> None:
        if job := self._jobs.take_of(member.id):
            self._emit(job.lose(member.id, now, cursor))
        if member.role is Role.SERVER:
            self._outcomes.lose_server(member, now)

    # Jobs.

    def _schedule(self, now: float) -> None:
        """Runs the scheduler, and forgets the oldest ended jobs. Repeating it changes nothing."""
        self._outcomes.draining.review(self._jobs.live, now)
        self._rebalancer.review(now)
        self._scheduler.schedule(now)
        self._outcomes.draining.mark_drained()
        for job in self._jobs.oldest_ended():
            self._forget(job)

    def _forget(self, job: JobMachine) -> None:
        self._emit(job.drop())
        for name in job.record_names:
            self._dirty.job(job.ref.submission, name)
        self._jobs.remove(job)

    def _emit(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._pending_effects.end_earlier(effect)
            if needed := self._pending_effects.without_dead(effect, self._members.incarnation_at):
                self._effects.append(self._pending_effects.add(needed))
