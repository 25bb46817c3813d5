"""The whole cluster as one state machine: members, jobs, and which worker does what. Pure: no clock, no I/O.

`Cluster.handle(event, now)` is the one door for change. Workers are sent to jobs by reconciliation: after whatever
changed members or jobs, `_schedule` compares what each job wants with who is idle. Jobs are served in the order in
which they came; one that waits for its workers holds up those behind it, unless it asks for more than the cluster has.
Extra workers of running jobs come last, and stay: nobody is taken away from a job.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from shoal import errors
from shoal._cursor import Cursor
from shoal._layout import Placement
from shoal.job import Job
from shoal.status import ClusterStatus, JobState, JobStatus, MemberStatus, Role
from shoal_coordinator import events, milestones
from shoal_coordinator.checkpointing import NO_FOLDER
from shoal_coordinator.durable_job import DurableJob
from shoal_coordinator.events import (
    Assignment,
    Attempt,
    CountCheckpoints,
    Described,
    DropShards,
    Effect,
    JobRef,
    Joined,
    Membered,
    R,
    RemoveWorker,
    ServerRef,
    TakeCut,
    WriteCheckpoint,
)
from shoal_coordinator.ledger import Lease, NoRange
from shoal_coordinator.membership import RETURN_S, Member, Membership
from shoal_coordinator.outstanding import Outstanding
from shoal_coordinator.placement import ServerLoad, assign_shards, default_shards, plan_shards
from shoal_coordinator.records import SavedJob
from shoal_coordinator.touched import Touched

MAX_LIVE_JOBS = 1_000
# Outcomes that say of which job they are.
AnyOutcome = (
    events.ShardsCreated
    | events.WorkerAdmitted
    | events.EffectFailed
    | events.CheckpointsCounted
    | events.RestorePutOff
    | events.CutMade
    | events.CheckpointWritten
    | events.CheckpointFailed
)


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    """What an operator decides.

    Attributes:
        lease_s: seconds of silence after which a member is dead.
        keep_finished: ended jobs whose variables stay readable; older ones are forgotten.
        checkpoints: whether there is a folder of them.
    """

    lease_s: float = 5.0
    keep_finished: int = 8
    checkpoints: bool = False


class Cluster:
    """The state machine.

    Args:
        cluster: drawn once in a cluster's life.
        policy: what the operator decides.
        now: seconds of Unix time that never jump, as in every method.
    """

    def __init__(self, cluster: str, policy: ClusterPolicy, now: float) -> None:
        self._id = cluster
        self._policy = policy
        self._touched = Touched()
        self._members = Membership(policy.lease_s, self._touched.member)
        self._jobs: dict[str, DurableJob] = {}  # in the order in which they were submitted
        # These count for ever: a number is never given out twice.
        self._epoch = self._submissions = self._assignments = 0
        self._looked_at = now  # when the leases were last looked through
        self._dead: list[str] = []  # declared so since it was last told
        self._outstanding = Outstanding(self._touched.effect)
        self._effects: list[Effect] = []  # decided by the event in hand
        self._handlers: dict[type[events.Event[Any]], Callable[[Any, float], Any]] = {
            events.TimePassed: self._time_passed,
            events.RegistrationReceived: self._registration_received,
            events.HeartbeatReceived: self._heartbeat_received,
            events.MemberLeft: self._member_left,
            events.JobSubmitted: self._job_submitted,
            events.JobCancelled: self._job_cancelled,
            events.JobDropped: self._job_dropped,
            events.CheckpointRequested: self._checkpoint_requested,
            events.CutHeld: self._cut_held,
            events.JobDescribed: self._job_described,
            events.JoinRequested: self._join_requested,
            events.LeaseRequested: self._lease_requested,
            events.EvaluationAsked: self._evaluation_asked,
            events.EvaluationReported: self._evaluation_reported,
            events.WorkerReported: self._worker_reported,
            events.WorkerFinished: self._worker_finished,
            events.ShardsCreated: self._shards_created,
            events.WorkerAdmitted: self._worker_admitted,
            events.WorkerFenced: self._worker_fenced,
            events.EffectFailed: self._effect_failed,
            events.EffectDone: self._effect_done,
            events.CheckpointsCounted: self._checkpoints_counted,
            events.RestorePutOff: self._restore_put_off,
            events.CutMade: self._cut_made,
            events.CheckpointWritten: self._checkpoint_written,
            events.CheckpointFailed: self._checkpoint_failed,
        }

    def handle(self, event: events.Event[R], now: float) -> tuple[R, list[Effect]]:
        """Takes in what happened.

        Returns:
            The event's answer, and what is now to be done, in order.

        Raises:
            ShoalError: the event is refused. What came to light on the way (a lease that ran out) stands, and its
                effects come with the next event.
        """
        answer: R = self._handlers[type(event)](event, now)
        effects, self._effects = self._effects, []
        return answer, effects

    # What it is like now.

    @property
    def epoch(self) -> int:
        """The newest placement's number."""
        return self._epoch

    def wants(self, effect: int, server: ServerRef) -> bool:
        """Whether an effect is still to be performed, and a server of it lives."""
        member = self._members.find(server.member)
        there = member is not None and member.alive and member.registration.address == server.address
        return there and self._outstanding.find(effect) is not None

    def job(self, name: str) -> DurableJob:
        """A job by name, to be read.

        Raises:
            UnknownJob: there is none, or none any more.
        """
        if name not in self._jobs:
            raise errors.UnknownJob(f"there is no job {name!r}; `shoal jobs` lists those there are", job=name)
        return self._jobs[name]

    def jobs(self, now: float) -> list[JobStatus]:
        """All jobs, newest first."""
        return [job.status(now) for job in reversed(self._jobs.values())]

    def status(self, now: float) -> ClusterStatus:
        """The members, the dead of the last minutes among them."""
        return ClusterStatus(self._id, self._epoch, tuple(self._member_status(member, now) for member in self._members))

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        self._members.validate()
        placements = [job.placement.epoch for job in self._jobs.values() if job.placement]
        assert len(set(placements)) == len(placements), "two jobs share a placement"
        assert max(placements, default=0) <= self._epoch
        busy = Counter(worker for job in self._jobs.values() for worker in job.crew.active)
        assert all(count == 1 for count in busy.values()), "a worker has a part in two jobs"
        for name, job in self._jobs.items():
            assert name == job.ref.name == job.spec.name
            job.validate()
            for worker, participant in job.crew.active.items():
                self._members.check(worker, participant.incarnation)
            lost = [server.member for server in job.servers if not self._members.is_alive(server.member)]
            assert job.ended or not lost, "a job goes on without its shards"
        assert sum(job.ended for job in self._jobs.values()) <= self._policy.keep_finished
        submissions = [job.ref.submission for job in self._jobs.values()]
        assert submissions == sorted(submissions)
        assert max(submissions, default=0) <= self._submissions
        self._outstanding.validate()
        # So what became of an effect is what became of the attempt that its job knows of, and of no other.
        attempts = CountCheckpoints | TakeCut | WriteCheckpoint
        saving = Counter(effect.job for effect in self._outstanding if isinstance(effect, attempts))
        for job in self._live():
            assert saving[job.ref] == job.checkpoints.busy, "an attempt at a checkpoint without its effect, or two"

    # Members.

    def _time_passed(self, _: events.TimePassed, now: float) -> tuple[str, ...]:
        self._expire(now)
        live = self._live()
        for job in live:
            self._emit(job.checkpoint_when_due(now))
        if any(job.unplaced is not None for job in live):  # they may wait for time to pass
            self._schedule(now)
        dead, self._dead = tuple(self._dead), []
        return dead

    def _registration_received(self, event: events.RegistrationReceived, now: float) -> Membered:
        self._expire(now)
        member = self._members.register(event.registration, now)
        self._schedule(now)
        return Membered(member.incarnation)

    def _heartbeat_received(self, event: events.HeartbeatReceived, now: float) -> Assignment | None:
        self._members.beat(event.member, event.incarnation, event.shards, event.bytes, now)
        job = self._job_of(event.member)
        return Assignment(job.ref.name, job.crew.active[event.member].assignment) if job else None

    def _member_left(self, event: events.MemberLeft, now: float) -> None:
        if member := self._members.leave(event.member, event.incarnation, now):
            self._lose(member, now, event.cursor)
            self._schedule(now)

    def _expire(self, now: float) -> None:
        away_s, self._looked_at = now - self._looked_at, now
        if away_s > self._policy.lease_s / 2:
            # This process was stopped or starved: that nobody was heard meanwhile says nothing about them.
            self._members.forgive(away_s)
        dead = self._members.expire(now)
        for member in dead:
            self._dead.append(member.id)
            self._lose(member, now)
        if dead:
            self._schedule(now)

    def _lose(self, member: Member, now: float, cursor: Cursor | None = None) -> None:
        if job := self._job_of(member.id):
            self._emit(job.lose(member.id, now, cursor))
        if member.role is Role.SERVER:
            for job in self._live():
                if job.placement and any(server.member == member.id for server in job.servers):
                    self._lose_shards(job, _lost_shards(member.id, job.placement, again=not job.recovery.possible), now)

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
        if len(self._live()) >= MAX_LIVE_JOBS:
            raise errors.Overloaded(f"the cluster has {MAX_LIVE_JOBS} jobs that have not ended, the most it takes")
        if earlier:
            self._forget(earlier)
        self._submissions += 1
        self._touched.counts()
        job = self._new_job(JobRef(name, self._submissions), event.spec, now, event.token)
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

    def _checkpoint_requested(self, event: events.CheckpointRequested, now: float) -> Attempt:
        attempt, effects = milestones.request_checkpoint(self.job(event.job), now)
        self._emit(effects)
        return attempt

    def _check_folder(self, spec: Job) -> None:
        asked = bool(spec.restore) or (spec.checkpoints is not None and spec.checkpoints.takes_any)
        asked = asked or (spec.evaluation is not None and spec.evaluation.checkpoint_best)
        if asked and not self._policy.checkpoints:
            raise errors.InvalidJob(f"job {spec.name} asks for checkpoints, and {NO_FOLDER}", job=spec.name)

    # Jobs, as their workers see them.

    def _job_described(self, event: events.JobDescribed, now: float) -> Described:
        member, job = self._members.check(event.worker, event.incarnation), self.job(event.job)
        if job.ended:
            raise _over(job, now)
        self._seat(member, job, event.assignment, now)
        answer, effects = job.describe(event, now)
        self._emit(effects)
        self._schedule(now)
        return answer

    def _join_requested(self, event: events.JoinRequested, now: float) -> Joined:
        member, job = self._members.check(event.worker, event.incarnation), self.job(event.job)
        if not job.ended:
            self._seat(member, job, event.assignment, now)
            self._emit(job.join(event.worker, event.assigned, now))
            if event.assigned:
                self._schedule(now)  # as when the last one is admitted
        return job.joined(event.worker)

    def _lease_requested(self, event: events.LeaseRequested, _: float) -> Lease | NoRange:
        self._members.check(event.worker, event.incarnation)
        job = self.job(event.job)
        has_part = job.crew.has_part(event.worker, event.assignment)
        return job.lease(event.worker, event.done) if has_part else NoRange.FINISHED

    def _evaluation_asked(self, event: events.EvaluationAsked, _: float) -> events.Asked:
        self._members.check(event.worker, event.incarnation)
        job = self.job(event.job)
        if not job.crew.has_part(event.worker, event.assignment):
            return events.Asked(stop=True)
        return milestones.ask_evaluation(job, event.worker, event.step, through=event.through)

    def _evaluation_reported(self, event: events.EvaluationReported, now: float) -> bool:
        self._members.check(event.worker, event.incarnation)
        job = self.job(event.job)
        if not job.crew.has_part(event.worker, event.assignment):
            return False
        wait, effects = milestones.report_evaluation(job, event.worker, event.result, now)
        self._emit(effects)
        return wait

    def _worker_reported(self, event: events.WorkerReported, now: float) -> bool:
        self._members.check(event.worker, event.incarnation)
        job = self.job(event.job)
        if not job.crew.has_part(event.worker, event.assignment):
            return True
        job.report(event, now)
        self._emit(job.checkpoint_when_due(now))
        return False

    def _worker_finished(self, event: events.WorkerFinished, now: float) -> None:
        self._members.check(event.worker, event.incarnation)
        job = self.job(event.job)
        if not job.crew.has_part(event.worker, event.assignment):
            return
        if not (event.lost and job.recovery.possible):
            self._emit(job.finish(event.worker, event.error, now))
        elif job.placement:
            self._lose_shards(job, f"worker {event.worker} found its shards gone: {_last_line(event.error)}", now)
        else:  # the job has gone back meanwhile: this worker found the shards that it had before
            self._emit(job.lose(event.worker, now))
        self._schedule(now)

    def _seat(self, member: Member, job: DurableJob, assignment: int, now: float) -> None:
        """Makes sure that a member has a part in a job that has not ended; sessions take one by asking for it."""
        name = job.spec.name
        if job.crew.has_part(member.id, assignment):
            return
        if not job.spec.is_session or member.role is not Role.SESSION:
            raise errors.Cancelled(f"{member.id} has no part in job {name} (any more)", job=name, worker=member.id)
        if member.enrolled:
            raise errors.Fenced(
                f"incarnation {member.incarnation} of session {member.id} has had its part in a job; register again",
                member=member.id,
                incarnation=member.incarnation,
            )
        if not job.vacancies:
            raise errors.Overloaded(
                f"job {name} has all its {job.spec.workers} workers; submit it with more, or wait until one is through",
                job=name,
                workers=job.spec.workers,
            )
        self._members.take_part(member)
        self._enrol(member, job, now)
        self._schedule(now)

    # What was done.

    def _shards_created(self, event: events.ShardsCreated, now: float) -> None:
        if job := self._job_of_outcome(event):
            self._emit(job.shards_created(now, event.restored))
            self._schedule(now)

    def _worker_admitted(self, event: events.WorkerAdmitted, now: float) -> None:
        if job := self._job_of_outcome(event):
            job.admitted(event.assignment, event.step, now)
            self._schedule(now)  # if it runs now, extra workers may join

    def _worker_fenced(self, event: events.WorkerFenced, _: float) -> None:
        self._outstanding.fenced(event.effect, event.committed_steps)

    def _effect_done(self, event: events.EffectDone, _: float) -> None:
        self._outstanding.end(event.effect)

    def _effect_failed(self, event: events.EffectFailed, now: float) -> None:
        if job := self._job_of_outcome(event):
            if event.lost:
                self._lose_shards(job, event.reason, now)
            else:
                self._emit(job.fail(event.reason, now))
            self._schedule(now)

    def _restore_put_off(self, event: events.RestorePutOff, now: float) -> None:
        if job := self._job_of_outcome(event):
            self._emit(job.put_off(event.reason, now))
            self._schedule(now)

    def _cut_held(self, event: events.CutHeld, _: float) -> events.Held:
        job = self._live_job(event.job)
        if job is None:
            raise errors.Cancelled(f"job {event.job.name} is over")
        return job.accounting.held(job.crew.ranks)

    def _checkpoints_counted(self, event: events.CheckpointsCounted, _: float) -> None:
        if job := self._job_of_outcome(event):
            self._emit(milestones.checkpoints_counted(job, event.largest))

    def _cut_made(self, event: events.CutMade, _: float) -> None:
        if job := self._job_of_outcome(event):
            self._emit(milestones.cut_made(job, event))

    def _checkpoint_written(self, event: events.CheckpointWritten, now: float) -> None:
        if job := self._job_of_outcome(event):
            self._emit(milestones.checkpoint_written(job, event, now))
            self._schedule(now)

    def _checkpoint_failed(self, event: events.CheckpointFailed, now: float) -> None:
        if job := self._job_of_outcome(event):
            if event.lost and job.recovery.possible:
                self._lose_shards(job, event.reason, now)
            else:
                self._emit(milestones.checkpoint_failed(job, event.reason, now))
            self._schedule(now)

    def _job_of_outcome(self, event: AnyOutcome) -> DurableJob | None:
        """The live job that an effect was for; None: there is none any more, or the effect was given up."""
        return self._live_job(event.job) if self._outstanding.end(event.effect) else None

    def _lose_shards(self, job: DurableJob, reason: str, now: float) -> None:
        effects = job.lose_shards(reason, 2 * max(self._policy.lease_s, RETURN_S), now)
        if not job.ended:
            self._outstanding.abandon(job.ref)
        self._emit(effects)

    # Who works on what, and where the variables are.

    def _schedule(self, now: float) -> None:
        """Brings what is nearer to what is wanted. Repeating it changes nothing."""
        workers = self._members.alive(Role.WORKER)
        idle = [worker for worker in workers if self._job_of(worker.id) is None]
        for job in self._live():
            self._staff(job, idle, len(workers), now)
        for job in self._live():  # those that are left over after all jobs have their own
            while job.openings and self._send(idle, job, now):
                pass
        idling = sum(self._job_of(worker.id) is None for worker in workers)
        for job in self._live():
            lacks = [_lack(job, idling), job.recovery.lack]
            if job.unplaced is not None:
                lacks.append(self._place(job, now))
            if not job.ended:
                job.wait_for("; ".join(filter(None, lacks)), now)
        ended = sorted(
            (job for job in self._jobs.values() if job.ended), key=lambda job: (-job.finished_at, -job.ref.submission)
        )
        for job in ended[self._policy.keep_finished :]:
            self._forget(job)

    def _staff(self, job: DurableJob, idle: list[Member], workers: int, now: float) -> None:
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

    def _send(self, idle: list[Member], job: DurableJob, now: float) -> bool:
        """Sends an idle worker to a job, if there is one that is not through with it."""
        member = next((member for member in idle if not job.crew.is_through(member.id)), None)
        if member is None:
            return False
        idle.remove(member)
        self._enrol(member, job, now)
        return True

    def _enrol(self, member: Member, job: DurableJob, now: float) -> None:
        self._assignments += 1
        self._touched.counts()
        job.enrol(member.id, member.incarnation, self._assignments, now)

    def _place(self, job: DurableJob, now: float) -> str:
        """Plans where a job's variables go; says what is lacking for it."""
        servers = self._members.alive(Role.SERVER)
        if not servers or job.recovery.waits_for_servers(len(servers), now):
            return "waiting for servers" if servers else "waiting for a server"
        if job.recovery.waits_for_storage(now):
            return ""  # it says so itself, while it tries too
        variables = dict(job.unplaced or {})
        held = self._placed_bytes()
        loads = [ServerLoad(server.id, server.registration.address, held[server.id]) for server in servers]
        try:
            count = job.spec.shards or default_shards(len(servers), variables.values())
            layouts = plan_shards(variables, count, np.dtype(job.spec.wire))
            shards = assign_shards(layouts, loads)
        except errors.ShoalError as error:
            self._emit(job.fail(f"its variables cannot be placed: {error.message}", now))
            return ""
        self._epoch += 1
        self._touched.counts()
        self._emit(job.place(Placement(job.spec.name, self._epoch, variables, shards), now))
        return ""

    def _placed_bytes(self) -> Counter[str]:
        """Bytes of values that are placed on each server; heartbeats would tell it later."""
        held: Counter[str] = Counter()
        for job in self._jobs.values():
            for shard in job.placement.shards if job.placement else ():
                held[shard.server] += shard.layout.nbytes
        return held

    # Small things.

    def _new_job(self, ref: JobRef, spec: Job, now: float, token: str, saved: SavedJob | None = None) -> DurableJob:
        changed = partial(self._touched.job, ref.submission)
        job = DurableJob(ref, spec, now, token, saved, changed, checkpoints=self._policy.checkpoints)
        self._jobs[ref.name] = job
        return job

    def _live(self) -> list[DurableJob]:
        return [job for job in self._jobs.values() if not job.ended]

    def _live_job(self, ref: JobRef) -> DurableJob | None:
        job = self._jobs.get(ref.name)
        return job if job and job.ref == ref and not job.ended else None

    def _job_of(self, worker: str) -> DurableJob | None:
        return next((job for job in self._jobs.values() if worker in job.crew.active), None)

    def _forget(self, job: DurableJob) -> None:
        self._emit(job.drop())
        for part in job.parts:
            self._touched.job(job.ref.submission, part)
        del self._jobs[job.spec.name]

    def _emit(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, RemoveWorker | DropShards):
                # The dead ones have forgotten it anyway, and waiting for them would hold up what comes after.
                alive = {server.registration.address for server in self._members.alive(Role.SERVER)}
                servers = tuple(server for server in effect.servers if server.address in alive)
                if servers:
                    self._effects.append(self._outstanding.add(replace(effect, servers=servers)))
            else:
                self._effects.append(self._outstanding.add(effect))

    def _member_status(self, member: Member, now: float) -> MemberStatus:
        job = self._job_of(member.id) if member.alive else None
        return MemberStatus(
            member=member.id,
            role=member.role,
            incarnation=member.incarnation,
            address=member.registration.address,
            device=member.registration.device,
            metrics_address=member.registration.metrics_address,
            alive=member.alive,
            silent_s=max(0.0, now - member.last_seen),
            shards=member.shards,
            bytes=member.bytes,
            job=job.spec.name if job else "",
        )


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _lack(job: DurableJob, idle: int) -> str:
    """Whom a job waits for, where so many workers are idle."""
    needed, there = job.spec.fewest_workers, len(job.crew.active)
    if job.spec.is_session:
        lacking = there < needed and job.state is not JobState.RUNNING
        return f"waiting for sessions: {there} of {needed}" if lacking else ""
    if job.state is JobState.PENDING:
        return f"waiting for workers: {idle} of {needed}"
    return f"waiting for workers: {there} of {needed}" if job.vacancies and there < needed else ""


def _lost_shards(server: str, placement: Placement, *, again: bool) -> str:
    numbers = [str(shard.layout.shard) for shard in placement.shards if shard.server == server]
    what = f"shard{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
    return f"server {server} is gone, and with it the only replica of {what}{'; submit the job again' if again else ''}"


def _over(job: DurableJob, now: float) -> errors.ShoalError:
    name = job.spec.name
    if job.state is JobState.FAILED:
        return errors.JobFailed(f"job {name} failed: {job.status(now).reason}", job=name)
    return errors.Cancelled(f"job {name} is over ({job.state.value}); submit it again to go on", job=name)
