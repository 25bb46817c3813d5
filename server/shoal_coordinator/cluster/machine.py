"""The whole cluster as one state machine: members, jobs, and which worker does what. Pure: no clock, no I/O.

`Cluster.handle(event, now)` is the one door for change. What members and users say is answered here, and what workers
say of their jobs in `work`; `outcomes` takes in what became of effects. Whenever members or jobs have changed,
`scheduler` sends workers to jobs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from shoal import errors
from shoal._wire import Cursor, Placement
from shoal.job import Job
from shoal.status import ClusterStatus, JobStatus, Role
from shoal_coordinator.cluster.dirty_records import DirtyRecords
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.membership import RETURN_S, Member, Membership
from shoal_coordinator.cluster.outcome_handler import OutcomeHandler
from shoal_coordinator.cluster.pending_effects import PendingEffects
from shoal_coordinator.cluster.policy import ClusterPolicy
from shoal_coordinator.cluster.scheduler import Scheduler
from shoal_coordinator.cluster.snapshot import ClusterCounters, ClusterSnapshot
from shoal_coordinator.cluster.worker_requests import WorkerRequests
from shoal_coordinator.job import NO_STORAGE, JobCounters, JobMachine, Submission
from shoal_coordinator.messages import (
    Assignment,
    CommitCheckpoint,
    DropShards,
    Effect,
    JobRef,
    RegisterResult,
    RemoveWorker,
    ScanCheckpoints,
    ServerRef,
    TakeCheckpointResult,
    TakeCut,
    events,
)

MAX_LIVE_JOBS = 1_000


class Cluster:
    """The state machine.

    Args:
        cluster: drawn once in a cluster's life.
        policy: what the operator decides.
        now: seconds of Unix time that never jump, as in every method.

    Attributes:
        counters: what has happened to jobs since this object was made.
    """

    def __init__(self, cluster: str, policy: ClusterPolicy, now: float) -> None:
        self._id = cluster
        self._policy = policy
        self._dirty = DirtyRecords()
        self._members = Membership(policy.heartbeat_timeout_s, self._dirty.member, return_s=policy.server_return_s)
        self._jobs = JobTable()
        self.counters = JobCounters()
        self._submissions = 0  # counts for ever: a number is never given out twice
        self._looked_at = now  # when the leases were last looked through
        self._dead: dict[str, Role] = {}  # declared so since it was last told
        self._pending_effects = PendingEffects(self._dirty.effect)
        self._effects: list[Effect] = []  # decided by the event in hand
        self._scheduler = Scheduler(self._members, self._jobs, self._emit, self._dirty.counts, policy.placement)
        patience_s = 2 * max(policy.heartbeat_timeout_s, RETURN_S)
        self._outcomes = OutcomeHandler(
            self._jobs, self._members, self._pending_effects, self._emit, self._schedule, patience_s
        )
        self._worker_requests = WorkerRequests(
            self._jobs, self._members, self._scheduler, self._outcomes, self._emit, self._schedule
        )
        self._handlers: dict[type[events.ClusterEvent[Any]], Callable[[Any, float], Any]] = {
            events.TimePassed: self._time_passed,
            events.RegistrationReceived: self._registration_received,
            events.HeartbeatReceived: self._heartbeat_received,
            events.MemberLeft: self._member_left,
            events.DrainRequested: self._drain_requested,
            events.JobSubmitted: self._job_submitted,
            events.JobCancelled: self._job_cancelled,
            events.JobDropped: self._job_dropped,
            events.CheckpointRequested: self._checkpoint_requested,
            **self._worker_requests.handlers,
            **self._outcomes.handlers,
        }

    def handle(self, event: events.ClusterEvent[events.R], now: float) -> tuple[events.R, list[Effect]]:
        """Takes in what happened.

        Returns:
            The event's answer, and what is now to be done, in order.

        Raises:
            ShoalError: the event is refused. What came to light on the way (a lease that ran out) stands, and its
                effects come with the next event.
        """
        answer: events.R = self._handlers[type(event)](event, now)
        effects, self._effects = self._effects, []
        return answer, effects

    @classmethod
    def restored(cls, snapshot: ClusterSnapshot, policy: ClusterPolicy, now: float) -> "Cluster":
        """Returns a cluster as an earlier coordinator knew it; all leases begin now.

        Args:
            snapshot: what is kept of it.
            policy: what the operator decides; it may be another one than before.
            now: as ever.

        Raises:
            ShoalError, AssertionError, KeyError, ValueError: the snapshot contradicts itself.
        """
        counts = snapshot.counts
        cluster = cls(counts.cluster, policy, now)
        cluster._submissions = counts.submissions
        cluster._scheduler.restore(counts.generation, counts.assignments)
        cluster._members.restore(snapshot.members, counts.incarnation, now)
        for submission, job in snapshot.jobs.items():
            changed = partial(cluster._dirty.job, submission)
            life = JobMachine.restored(
                submission, job, now, changed, checkpoints=policy.checkpoints, counters=cluster.counters
            )
            cluster._jobs.add(life)
        cluster._pending_effects.restore(snapshot.effects, counts.effects)
        cluster._continue_after_restore(now)
        return cluster

    def _continue_after_restore(self, now: float) -> None:
        """Does what follows from a restore by itself."""
        for job in self._jobs.values():
            job.validate()  # before anything is made of it
        # By this coordinator's policy, which may be another one: without a folder, no last checkpoint is waited for.
        for job in self._jobs.live:
            self._emit(job.end_when_saved(now))
        self._schedule(now)
        self._effects.clear()  # they are pending_effects, as all others are

    # What is kept of it.

    @property
    def changed(self) -> bool:
        """Whether `take_dirty` has anything."""
        return bool(self._dirty)

    def take_dirty(self) -> list[str]:
        """Returns the keys of the records (`record_keys`) that have changed since the last call, in order."""
        return self._dirty.take()

    @property
    def counts(self) -> ClusterCounters:
        """The cluster's id, and the last number given out of each kind."""
        return ClusterCounters(
            cluster=self._id,
            generation=self._scheduler.generation,
            submissions=self._submissions,
            assignments=self._scheduler.assignments,
            effects=self._pending_effects.last,
            incarnation=self._members.incarnation,
        )

    @property
    def members(self) -> Iterable[Member]:
        """All members that are remembered, in order of id."""
        return self._members

    def find_member(self, member: str) -> Member | None:
        """A member that is remembered, dead or alive."""
        return self._members.find(member)

    @property
    def submitted(self) -> Mapping[int, JobMachine]:
        """All jobs that are remembered, by submission."""
        return {job.ref.submission: job for job in self._jobs.values()}

    @property
    def pending_effects(self) -> list[Effect]:
        """What was decided and is not known to be done, in order; all of it may be done again."""
        return list(self._pending_effects)

    def find_effect(self, number: int) -> Effect | None:
        """An effect that is outstanding."""
        return self._pending_effects.find(number)

    # What it is like now.

    @property
    def generation(self) -> int:
        """The newest placement's number."""
        return self._scheduler.generation

    @property
    def wanted_workers(self) -> int:
        """Workers that live jobs could use now, those that they have among them."""
        return sum(job.wanted_workers for job in self._jobs.live)

    def wants(self, effect: int, server: ServerRef) -> bool:
        """Whether an effect is still to be performed, and a server of it lives."""
        member = self._members.find(server.member)
        there = member is not None and member.alive and member.registration.address == server.address
        return there and self._pending_effects.find(effect) is not None

    def job(self, name: str) -> JobMachine:
        """A job by name, to be read.

        Raises:
            UnknownJob: there is none, or none any more.
        """
        return self._jobs.named(name)

    def jobs(self, now: float) -> list[JobStatus]:
        """All jobs, newest first."""
        return [job.status(now) for job in reversed(list(self._jobs.values()))]

    def status(self, now: float) -> ClusterStatus:
        """The members, the dead of the last minutes among them."""
        members = []
        for member in self._members:
            job = self._jobs.find_of(member.id) if member.alive else None
            members.append(member.status(now, job.spec.name if job else ""))
        return ClusterStatus(self._id, self.generation, tuple(members))

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        self._members.validate()
        placements = [job.placement.generation for job in self._jobs.values() if job.placement]
        assert len(set(placements)) == len(placements), "two jobs share a placement"
        assert max(placements, default=0) <= self._scheduler.generation
        busy = Counter(worker for job in self._jobs.values() for worker in job.workers)
        assert all(count == 1 for count in busy.values()), "a worker has a part in two jobs"
        for name, job in self._jobs.items():
            assert name == job.ref.name == job.spec.name
            job.validate()
            for worker, incarnation in job.workers.items():
                self._members.check(worker, incarnation)
            lost = [server.member for server in job.servers if not self._members.is_alive(server.member)]
            assert job.ended or not lost, "a job goes on without its shards"
        assert sum(job.ended for job in self._jobs.values()) <= self._policy.keep_finished
        submissions = [job.ref.submission for job in self._jobs.values()]
        assert submissions == sorted(submissions)
        assert max(submissions, default=0) <= self._submissions
        self._pending_effects.validate()
        self._outcomes.draining.validate(self._jobs.live)
        # So what became of an effect is what became of the attempt that its job knows of, and of no other.
        attempts = ScanCheckpoints | TakeCut | CommitCheckpoint
        saving = Counter(effect.job for effect in self._pending_effects if isinstance(effect, attempts))
        for job in self._jobs.live:
            assert saving[job.ref] == job.checkpoint_in_progress, (
                "an attempt at a checkpoint without its effect, or two"
            )

    # Members.

    def _time_passed(self, _: events.TimePassed, now: float) -> dict[str, Role]:
        self._expire(now)
        live = self._jobs.live
        for job in live:
            self._emit(job.checkpoint_when_due(now))
        if any(job.unplaced is not None for job in live):  # they may wait for time to pass
            self._schedule(now)
        dead, self._dead = self._dead, {}
        return dead

    def _registration_received(self, event: events.RegistrationReceived, now: float) -> RegisterResult:
        self._expire(now)
        member = self._members.register(event.registration, now)
        self._schedule(now)
        return RegisterResult(member.incarnation)

    def _heartbeat_received(self, event: events.HeartbeatReceived, now: float) -> Assignment | None:
        self._members.heartbeat(event.member, event.incarnation, event.shards, event.bytes, now, event.load)
        job = self._jobs.find_of(event.member)
        return Assignment(job.ref.name, job.assignment_of(event.member)) if job else None

    def _member_left(self, event: events.MemberLeft, now: float) -> None:
        if member := self._members.leave(event.member, event.incarnation, now):
            self._lose(member, now, event.cursor)
            self._schedule(now)

    def _drain_requested(self, event: events.DrainRequested, now: float) -> tuple[str, ...]:
        member, draining = self._members.check(event.member, event.incarnation), self._outcomes.draining
        if member.role is not Role.SERVER:
            raise errors.BadRequest(f"{member.id} is a {member.role.value}; servers alone are drained")
        if not member.draining:
            self._members.start_draining(member)
            for job in self._jobs.live:
                draining.begin(job, now)
            self._schedule(now)
        return tuple(job.ref.name for job in self._jobs.live if member.id in draining.of(job))

    def _expire(self, now: float) -> None:
        away_s, self._looked_at = now - self._looked_at, now
        if away_s > self._policy.heartbeat_timeout_s / 2:
            # This process was stopped or starved: that nobody was heard meanwhile says nothing about them.
            self._members.extend_timeouts(away_s)
        dead = self._members.expire(now)
        for member in dead:
            self._dead[member.id] = member.role
            self._lose(member, now)
        if dead:
            self._schedule(now)

    def _lose(self, member: Member, now: float, cursor: Cursor | None = None) -> None:
        if job := self._jobs.find_of(member.id):
            self._emit(job.lose(member.id, now, cursor))
        if member.role is Role.SERVER:
            for job in self._jobs.live:
                if job.placement and any(server.member == member.id for server in job.servers):
                    lost = f"{_lost_shards(member.id, job.placement)}{job.advice}"
                    self._outcomes.lose_shards(job, lost, now, announced=member.draining)

    # Jobs, as users see them.

    def _job_submitted(self, event: events.JobSubmitted, now: float) -> JobStatus:
        name = event.spec.name
        earlier = self._jobs.get(name)
        if earlier and event.token and earlier.token == event.token:
            return earlier.status(now)
        if earlier and not earlier.ended:
            raise errors.JobExists(
                f"job {name} is {earlier.state.value}: choose another name, or cancel it first", job=name
            )
        self._check_folder(event.spec)
        if len(self._jobs.live) >= MAX_LIVE_JOBS:
            raise errors.Overloaded(f"the cluster has {MAX_LIVE_JOBS} jobs that have not ended, the most it takes")
        if earlier:
            self._forget(earlier)
        self._submissions += 1
        self._dirty.counts()
        job = self._new_job(Submission(JobRef(name, self._submissions), event.spec, event.token), now)
        self._schedule(now)
        return job.status(now)

    def _job_cancelled(self, event: events.JobCancelled, now: float) -> JobStatus:
        job = self.job(event.job)
        self._emit(job.cancel(now))
        self._schedule(now)
        return job.status(now)

    def _job_dropped(self, event: events.JobDropped, _: float) -> None:
        job = self.job(event.job)
        if not job.ended:
            raise errors.JobRunning(f"job {event.job} is {job.state.value}; cancel it first", job=event.job)
        self._forget(job)

    def _checkpoint_requested(self, event: events.CheckpointRequested, now: float) -> TakeCheckpointResult:
        attempt, effects = self.job(event.job).request_checkpoint(now)
        self._emit(effects)
        return attempt

    def _check_folder(self, spec: Job) -> None:
        asked = bool(spec.restore) or (spec.checkpoints is not None and spec.checkpoints.takes_any)
        asked = asked or (spec.evaluation is not None and spec.evaluation.checkpoint_best)
        if asked and not self._policy.checkpoints:
            raise errors.InvalidJob(f"job {spec.name} asks for checkpoints, and {NO_STORAGE}", job=spec.name)

    # Small things.

    def _schedule(self, now: float) -> None:
        """Brings what is nearer to what is wanted, and forgets the oldest that ended. Repeating it changes nothing."""
        self._scheduler.schedule(now)
        ended = sorted(
            (job for job in self._jobs.values() if job.ended), key=lambda job: (-job.finished_at, -job.ref.submission)
        )
        for job in ended[self._policy.keep_finished :]:
            self._forget(job)

    def _new_job(self, submission: Submission, now: float) -> JobMachine:
        changed, saves = partial(self._dirty.job, submission.ref.submission), self._policy.checkpoints
        job = JobMachine.begun(submission, now, changed, checkpoints=saves, counters=self.counters)
        self._jobs.add(job)
        return job

    def _forget(self, job: JobMachine) -> None:
        self._emit(job.drop())
        for part in job.parts:
            self._dirty.job(job.ref.submission, part)
        self._jobs.remove(job)

    def _emit(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, RemoveWorker | DropShards):
                # The dead ones have forgotten it anyway, and waiting for them would hold up what comes after.
                alive = {server.registration.address for server in self._members.alive(Role.SERVER)}
                servers = tuple(server for server in effect.servers if server.address in alive)
                if servers:
                    self._effects.append(self._pending_effects.add(replace(effect, servers=servers)))
            else:
                self._effects.append(self._pending_effects.add(effect))


def _lost_shards(server: str, placement: Placement) -> str:
    numbers = [str(shard.layout.shard) for shard in placement.shards if shard.server == server]
    what = f"shard{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
    return f"server {server} is gone, and with it the only replica of {what}"
