"""Handling of the events by which users submit and change jobs, and drain servers (no I/O).

A user submits a job, cancels it, drops it, requests a checkpoint of it or sets its learning rate. A user orders that a
server drains.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from shoal import errors
from shoal.job import Job
from shoal.status import JobStatus, Role
from shoal_coordinator.cluster.dirty_records import DirtyRecords
from shoal_coordinator.cluster.job_table import JobTable, exists
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.cluster.policy import ClusterPolicy
from shoal_coordinator.cluster.shards import DrainCoordinator
from shoal_coordinator.job import NO_STORAGE, JobCounters, JobMachine, Submission
from shoal_coordinator.messages import Effect, JobRef, TakeCheckpointResult, events

# Jobs that an error names; it counts the others.
_MAX_NAMED = 5


class UserRequests:
    """Handles events from users about their jobs, and about servers.

    Args:
        jobs: jobs of the cluster.
        dirty: receives the keys of records that change.
        counters: the cluster's counters, which new jobs add to.
        emit: receives the effects that are decided.
        schedule: runs the scheduler, given the time; called after a change that other jobs may wait for.
        forget: frees the shards of an ended job, and removes the job with its records.
        policy: settings of the operator.
        members: members of the cluster.
        draining: moves jobs off draining servers.

    Attributes:
        handlers: the handler of each type of event.
        submissions: the last number of a submission. It never decreases: each number is used once.
    """

    def __init__(
        self,
        jobs: JobTable,
        dirty: DirtyRecords,
        counters: JobCounters,
        emit: Callable[[Iterable[Effect]], None],
        schedule: Callable[[float], None],
        forget: Callable[[JobMachine], None],
        policy: ClusterPolicy,
        members: Membership,
        draining: DrainCoordinator,
    ) -> None:
        self._jobs, self._dirty, self._counters, self._policy = jobs, dirty, counters, policy
        self._emit, self._schedule, self._forget = emit, schedule, forget
        self._members, self._draining = members, draining
        self.submissions = 0
        self.handlers: dict[type[events.ClusterEvent[Any]], Callable[[Any, float], Any]] = {
            events.JobSubmitted: self._job_submitted,
            events.JobCancelled: self._job_cancelled,
            events.JobDropped: self._job_dropped,
            events.CheckpointRequested: self._checkpoint_requested,
            events.LearningRateRequested: self._learning_rate_requested,
            events.DrainOrdered: self._drain_ordered,
        }

    def _job_submitted(self, event: events.JobSubmitted, now: float) -> JobStatus:
        name = event.spec.name
        earlier = self._jobs.get(name)
        if earlier and earlier.submission.repeats(event.token, event.submitter):
            return earlier.status(now)
        if earlier and not earlier.ended:
            raise exists(earlier)
        self._check_storage(event.spec)
        self._policy.jobs.check_submission(event, self._jobs.live)
        if earlier:
            self._forget(earlier)
        self.submissions += 1
        self._dirty.counts()
        ref = JobRef(name, self.submissions)
        role = event.submitter_role
        job = self._new_job(Submission(ref, event.spec, event.token, event.submitter, event.spec_bytes, role), now)
        self._schedule(now)
        return job.status(now)

    def _job_cancelled(self, event: events.JobCancelled, now: float) -> JobStatus:
        job = self._jobs.named(event.job)
        self._emit(job.cancel(now, event.reason))
        self._schedule(now)
        return job.status(now)

    def _job_dropped(self, event: events.JobDropped, _: float) -> None:
        job = self._jobs.named(event.job)
        if not job.ended:
            raise errors.JobRunning(f"job {event.job} is {job.state.value}; cancel it first", job=event.job)
        self._forget(job)

    def _checkpoint_requested(self, event: events.CheckpointRequested, now: float) -> TakeCheckpointResult:
        attempt, effects = self._jobs.named(event.job).request_checkpoint(now)
        self._emit(effects)
        return attempt

    def _learning_rate_requested(self, event: events.LearningRateRequested, _: float) -> None:
        self._emit(self._jobs.named(event.job).set_learning_rate(event.learning_rate))

    def _drain_ordered(self, event: events.DrainOrdered, now: float) -> None:
        member = self._members.find(event.member)
        if member is None or not (member.alive or (member.order and member.drained)):
            state = "has left" if member and member.draining else "is lost" if member else "is not a member"
            raise errors.UnknownMember(
                f"cannot drain {event.member!r:.80}: it {state}; `shoal status` shows the servers", member=event.member
            )
        if member.role is not Role.SERVER:
            raise errors.BadRequest(f"{member.id} is a {member.role.value}; only servers can be drained")
        if event.incarnation and event.incarnation != member.incarnation:
            raise errors.Fenced(
                f"incarnation {event.incarnation} of {member.id} has ended; it is now incarnation {member.incarnation}",
                member=member.id,
                incarnation=event.incarnation,
            )
        if not member.alive or event.order == member.order:
            return
        if not event.order.force and not member.draining:
            self._check_not_needed(member)
        self._draining.note_wait(member, None, now)
        self._draining.start(member, now, event.order)
        self._schedule(now)

    def _check_not_needed(self, server: Member) -> None:
        """Checks that the jobs with shards on a server, or about to move there, keep their values and have a server."""
        last = all(it is server for it in self._members.not_draining)
        # Those that move off other draining servers have only the last one to move to.
        needed_by = {server.id, *(it.id for it in self._members.alive(Role.SERVER) if last)}
        hosted = [job for job in self._jobs.live if any(it.member in needed_by for it in job.servers)]
        kept = [job for job in hosted if job.can_checkpoint or (not last and self._draining.moves_off(job, server))]
        lost = [job.ref.name for job in hosted if job not in kept]
        waiting = [job.ref.name for job in kept if last]
        consequences = [
            *([f"{_named(waiting)} would wait for another server, each with a last checkpoint"] if waiting else []),
            *([f"{_named(lost)} would lose the values there and fail, because {NO_STORAGE}"] if lost else []),
        ]
        if consequences:
            why = f"{server.id} is the last server that can take shards, so " if last else ""
            advice = "start another server first" if last else "cancel the jobs first"
            raise errors.ServerNeeded(
                f"{server.id} is not drained: {why}{', and '.join(consequences)}; {advice}, or drain it with --force",
                member=server.id,
            )

    def _check_storage(self, spec: Job) -> None:
        requested = bool(spec.restore) or (spec.checkpoints is not None and spec.checkpoints.takes_any)
        requested = requested or (spec.evaluation is not None and spec.evaluation.checkpoint_best)
        if requested and not self._policy.checkpoints:
            raise errors.InvalidJob(f"job {spec.name} needs checkpoints, but {NO_STORAGE}", job=spec.name)

    def _new_job(self, submission: Submission, now: float) -> JobMachine:
        changed, storage = partial(self._dirty.job, submission.ref.submission), self._policy.checkpoints
        job = JobMachine.begun(submission, now, changed, checkpoints=storage, counters=self._counters)
        self._jobs.add(job)
        return job


def _named(jobs: Sequence[str]) -> str:
    """Returns the names of jobs, as many as an error shows."""
    left = len(jobs) - _MAX_NAMED
    shown = ", ".join(jobs[:_MAX_NAMED]) + (f" and {left} more" if left > 0 else "")
    return f"{'job' if len(jobs) == 1 else 'jobs'} {shown}"
