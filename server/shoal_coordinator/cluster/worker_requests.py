"""What workers say of their jobs: how they enter, train, evaluate and report, and when they are through. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

from shoal import errors
from shoal._wire import EvaluationAck, EvaluationClaim, Lease, NoRange, ReportAck
from shoal.status import JobState, Role
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.membership import Member, Membership
from shoal_coordinator.cluster.outcome_handler import OutcomeHandler
from shoal_coordinator.cluster.scheduler import Scheduler
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import DescribeResult, Effect, JoinResult, events


class WorkerRequests:
    """Takes in what workers say, of their part in a job; whoever has none (any more) is told so.

    Args:
        jobs: of the cluster.
        members: of the cluster; events of those that are no members are refused.
        scheduler: gives sessions their parts.
        outcomes: told of a loss of shards that a worker has found.
        emit: told what is now to be done.
        schedule: called with the time when something has changed by which others may get on.

    Attributes:
        handlers: by event: what takes it in, and answers it.
    """

    def __init__(
        self,
        jobs: JobTable,
        members: Membership,
        scheduler: Scheduler,
        outcomes: OutcomeHandler,
        emit: Callable[[Iterable[Effect]], None],
        schedule: Callable[[float], None],
    ) -> None:
        self._jobs, self._members = jobs, members
        self._scheduler, self._outcomes = scheduler, outcomes
        self._emit, self._schedule = emit, schedule
        self.handlers: dict[type[events.Event[Any]], Callable[[Any, float], Any]] = {
            events.JobDescribed: self._job_described,
            events.JoinRequested: self._join_requested,
            events.LeaseRequested: self._lease_requested,
            events.EvaluationClaimed: self._evaluation_asked,
            events.EvaluationReported: self._evaluation_reported,
            events.WorkerReported: self._worker_reported,
            events.WorkerFinished: self._worker_finished,
        }

    def _job_described(self, event: events.JobDescribed, now: float) -> DescribeResult:
        member, job = self._members.check(event.worker, event.incarnation), self._jobs.named(event.job)
        if job.ended:
            raise _over(job, now)
        self._seat(member, job, event.assignment, now)
        answer, effects = job.describe(event, now)
        self._emit(effects)
        self._schedule(now)
        return answer

    def _join_requested(self, event: events.JoinRequested, now: float) -> JoinResult:
        member, job = self._members.check(event.worker, event.incarnation), self._jobs.named(event.job)
        if not job.ended:
            self._seat(member, job, event.assignment, now)
            self._emit(job.join(event.worker, event.assigned, now))
            if event.assigned:
                self._schedule(now)  # as when the last one is admitted
        return job.joined(event.worker)

    def _lease_requested(self, event: events.LeaseRequested, _: float) -> Lease | NoRange:
        self._members.check(event.worker, event.incarnation)
        job = self._jobs.named(event.job)
        has_part = job.has_part(event.worker, event.assignment)
        return job.lease(event.worker, event.done) if has_part else NoRange.FINISHED

    def _evaluation_asked(self, event: events.EvaluationClaimed, _: float) -> EvaluationClaim:
        self._members.check(event.worker, event.incarnation)
        job = self._jobs.named(event.job)
        if not job.has_part(event.worker, event.assignment):
            return EvaluationClaim(stop=True)
        return job.claim_evaluation(event.worker, event.step, through=event.through)

    def _evaluation_reported(self, event: events.EvaluationReported, now: float) -> EvaluationAck:
        self._members.check(event.worker, event.incarnation)
        job = self._jobs.named(event.job)
        if not job.has_part(event.worker, event.assignment):
            return EvaluationAck(stop=True)
        verdict, effects = job.report_evaluation(event.worker, event.result, now)
        self._emit(effects)
        return verdict

    def _worker_reported(self, event: events.WorkerReported, now: float) -> ReportAck:
        self._members.check(event.worker, event.incarnation)
        job = self._jobs.named(event.job)
        if not job.has_part(event.worker, event.assignment):
            return ReportAck.DONE
        job.report(event, now)
        self._emit(job.checkpoint_when_due(now))
        return ReportAck.STOP_AFTER_BATCH if job.stopping else ReportAck.CONTINUE

    def _worker_finished(self, event: events.WorkerFinished, now: float) -> None:
        self._members.check(event.worker, event.incarnation)
        job = self._jobs.named(event.job)
        if not job.has_part(event.worker, event.assignment):
            return
        if not (event.lost and job.goes_back):
            self._emit(job.finish(event.worker, event.error, now))
        elif job.placement:
            lost = f"worker {event.worker} found its shards gone: {_last_line(event.error)}"
            self._outcomes.lose_shards(job, lost, now)
        else:  # the job has gone back meanwhile: this worker found the shards that it had before
            self._emit(job.lose(event.worker, now))
        self._schedule(now)

    def _seat(self, member: Member, job: JobMachine, assignment: int, now: float) -> None:
        """Makes sure that a member has a part in a job that has not ended; sessions take one by asking for it."""
        name = job.spec.name
        if job.has_part(member.id, assignment):
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
        self._scheduler.enrol(member, job, now)
        self._schedule(now)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _over(job: JobMachine, now: float) -> errors.ShoalError:
    name = job.spec.name
    if job.state is JobState.FAILED:
        return errors.JobFailed(f"job {name} failed: {job.status(now).reason}", job=name)
    return errors.Cancelled(f"job {name} is over ({job.state.value}); submit it again to go on", job=name)
