"""Handling of the events by which users submit and change jobs (no I/O).

A user submits a job, cancels it, drops it, requests a checkpoint of it or sets its learning rate.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from shoal import errors
from shoal.job import Job
from shoal.status import JobStatus
from shoal_coordinator.cluster.dirty_records import DirtyRecords
from shoal_coordinator.cluster.job_table import JobTable, exists
from shoal_coordinator.cluster.policy import ClusterPolicy
from shoal_coordinator.job import NO_STORAGE, JobCounters, JobMachine, Submission
from shoal_coordinator.messages import Effect, JobRef, TakeCheckpointResult, events


class UserRequests:
    """Handles events from users about their jobs.

    Args:
        jobs: jobs of the cluster.
        dirty: receives the keys of records that change.
        counters: the cluster's counters, which new jobs add to.
        emit: receives the effects that are decided.
        schedule: runs the scheduler, given the time; called after a change that other jobs may wait for.
        forget: frees the shards of an ended job, and removes the job with its records.
        policy: settings of the operator.

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
    ) -> None:
        self._jobs, self._dirty, self._counters, self._policy = jobs, dirty, counters, policy
        self._emit, self._schedule, self._forget = emit, schedule, forget
        self.submissions = 0
        self.handlers: dict[type[events.ClusterEvent[Any]], Callable[[Any, float], Any]] = {
            events.JobSubmitted: self._job_submitted,
            events.JobCancelled: self._job_cancelled,
            events.JobDropped: self._job_dropped,
            events.CheckpointRequested: self._checkpoint_requested,
            events.LearningRateRequested: self._learning_rate_requested,
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
