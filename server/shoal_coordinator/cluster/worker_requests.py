"""Handling of the events by which workers take part in their jobs (no I/O).

A worker enters the job, leases data, evaluates, reports and finishes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shoal import errors
from shoal._wire import EvaluationAck, EvaluationClaim, Lease, NoRange, ReportAck
from shoal._wire.limits import MAX_LEAD
from shoal.evaluation_policy import reduces_on_plateau
from shoal.status import JobState, JobStatus, Role
from shoal_coordinator.cluster.job_limits import JobLimits
from shoal_coordinator.cluster.job_table import LAST_CHECKPOINT, JobTable
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.cluster.outcome_handler import OutcomeHandler
from shoal_coordinator.cluster.scheduler import Scheduler
from shoal_coordinator.cluster.shards import CopyKeeper
from shoal_coordinator.job import JobMachine, QuarantineReason
from shoal_coordinator.messages import DescribeResult, Effect, JoinResult, events


class WorkerRequests:
    """Handles events from workers about their assignments. A worker whose assignment in the job has ended is told to
    stop. A worker that had none is refused.

    Args:
        jobs: jobs of the cluster.
        members: members of the cluster; events of other processes are refused.
        scheduler: gives sessions their assignments.
        outcomes: handles a loss of shards that a worker has found.
        emit: receives the effects that are decided.
        schedule: runs the scheduler, given the time; called after a change that other jobs may wait for.
        limits: the limits of jobs.
        copies: keeps the copies of jobs complete.
        declare_lost: handles members as lost, as those whose heartbeat timeout has expired.

    Attributes:
        handlers: the handler of each type of event.
    """

    def __init__(
        self,
        jobs: JobTable,
        members: Membership,
        scheduler: Scheduler,
        outcomes: OutcomeHandler,
        emit: Callable[[Iterable[Effect]], None],
        schedule: Callable[[float], None],
        limits: JobLimits,
        copies: CopyKeeper,
        declare_lost: Callable[[Sequence[Member], float], None],
    ) -> None:
        self._jobs, self._members, self._limits = jobs, members, limits
        self._scheduler, self._outcomes, self._copies = scheduler, outcomes, copies
        self._emit, self._schedule, self._declare_lost = emit, schedule, declare_lost
        self.handlers: dict[type[events.ClusterEvent[Any]], Callable[[Any, float], Any]] = {
            events.JobAbandoned: self._job_abandoned,
            events.JobDescribed: self._job_described,
            events.JoinRequested: self._join_requested,
            events.LeaseRequested: self._lease_requested,
            events.EvaluationClaimed: self._evaluation_claimed,
            events.EvaluationReported: self._evaluation_reported,
            events.WorkerReported: self._worker_reported,
            events.WorkerFinished: self._worker_finished,
        }

    def _job_abandoned(self, event: events.JobAbandoned, now: float) -> JobStatus:
        job = self._jobs.named(event.job)
        if not (job.workers.keys() - {event.session} or job.all_workers_finished):
            self._emit(job.cancel(now, event.reason))
            self._schedule(now)
        return job.status(now)

    def _job_described(self, event: events.JobDescribed, now: float) -> DescribeResult:
        member, job = self._members.check(event.worker, event.incarnation), self._jobs.named(event.job)
        if job.ended:
            raise _over(job, now)
        if job.all_workers_finished:  # a session may have the variables of another run
            raise _ending(job)
        if job.spec.is_session and (
            conflict := job.conflict(member.id, event.description)
        ):  # refused before it takes a rank from others
            raise errors.InvalidJob(f"job {event.job} goes on without this session: {conflict}", job=event.job)
        self._limits.check_description(job, event.description, self._jobs.live)
        self._ensure_assignment(member, job, event.assignment, now)
        answer, effects = job.describe(event, now)
        self._emit(effects)
        # Otherwise nothing has changed; a job may have 1,000 workers. A conflict can fail a job without effects.
        if effects or answer.conflict or job.unplaced is not None:
            self._schedule(now)
        return answer

    def _join_requested(self, event: events.JoinRequested, now: float) -> JoinResult:
        member, job = self._members.check(event.worker, event.incarnation), self._jobs.named(event.job)
        if not job.ended:
            self._ensure_assignment(member, job, event.assignment, now)
            self._emit(job.join(event.worker, event.assigned, now, waits=event.waits))
            if event.assigned:
                self._schedule(now)  # the job may run now, and extra workers may join
        return job.joined(event.worker)

    def _lease_requested(self, event: events.LeaseRequested, now: float) -> Lease | NoRange:
        self._members.check(event.worker, event.incarnation)
        job = self._jobs.named(event.job)
        assigned = self._is_assigned(event.worker, event.assignment, job)
        return job.lease(event.worker, event.done, now, event.samples) if assigned else NoRange.FINISHED

    def _evaluation_claimed(self, event: events.EvaluationClaimed, now: float) -> EvaluationClaim:
        self._members.check(event.worker, event.incarnation)
        job = self._jobs.named(event.job)
        if not self._is_assigned(event.worker, event.assignment, job):
            return EvaluationClaim(stop=True)
        _check_steps(job, event.worker, [event.step], now)
        return job.claim_evaluation(event.worker, event.step, finished_training=event.finished_training)

    def _evaluation_reported(self, event: events.EvaluationReported, now: float) -> EvaluationAck:
        self._members.check(event.worker, event.incarnation)
        job = self._jobs.named(event.job)
        if not self._is_assigned(event.worker, event.assignment, job):
            return EvaluationAck(stop=True)
        _check_steps(job, event.worker, [event.result.step], now)
        ack, effects = job.report_evaluation(event.worker, event.result, now)
        self._emit(effects)
        if reduces_on_plateau(job.spec.evaluation) and job.spec.consistency.needs_every_worker:
            # The others wait for this worker, so the next step has the new rate on all servers.
            return replace(ack, wait=ack.wait or self._outcomes.sets_learning_rate(job.ref))
        return ack

    def _worker_reported(self, event: events.WorkerReported, now: float) -> ReportAck:
        self._members.mark_alive(event.worker, event.incarnation, now)
        job = self._jobs.named(event.job)
        if not self._is_assigned(event.worker, event.assignment, job):
            return ReportAck.DONE
        last = event.timings[-1].step if event.timings else 0
        # The counts are those of pushes: a worker makes one in each step.
        _check_steps(job, event.worker, (event.step, event.accepted, event.rejected, event.dropped, last), now)
        job.report(event, now)
        self._emit(job.checkpoint_when_due(now))
        return ReportAck.STOP_AFTER_BATCH if job.stopping else ReportAck.CONTINUE

    def _worker_finished(self, event: events.WorkerFinished, now: float) -> None:
        self._members.check(event.worker, event.incarnation)
        job = self._jobs.named(event.job)
        if not self._is_assigned(event.worker, event.assignment, job):
            return
        if event.trainer_failed and self._has_others(job, event.worker, now):
            reason = _last_line(event.error)
            self._end(
                job, event.worker, partial(job.quarantine, event.worker, QuarantineReason.CRASHED, reason, now), now
            )
        elif not (event.shards_lost and job.can_restart):
            self._emit(job.finish(event.worker, event.error, now, event.cursor, others_go_on=event.others_go_on))
        elif job.copies.complete > 1:  # its server is lost or restarted, but the backups have everything
            self._copies.probe_all(job, now)
            self._emit(job.lose(event.worker, now))
        elif job.placement:
            reason = f"worker {event.worker} found its shards gone: {_last_line(event.error)}"
            self._outcomes.lose_shards(job, reason, now)
        else:  # the job has restarted meanwhile, and this worker had its earlier shards
            self._emit(job.lose(event.worker, now))
        self._schedule(now)

    def end_hung(self, now: float, interval_s: float) -> bool:
        """Ends the incarnations of hung workers, which others wait for.

        Args:
            now: seconds of Unix time.
            interval_s: seconds from one report of a worker to the next.

        Returns:
            Whether there were any hung workers.
        """
        ended = False
        for job in self._jobs.live:
            workers, why = job.hung_workers(now, interval_s)
            for worker in workers:
                others = self._has_others(job, worker, now)
                self._end(job, worker, partial(job.lose_hung, worker, why, now, others=others), now)
                ended = True
        return ended

    def _has_others(self, job: JobMachine, worker: str, now: float) -> bool:
        """Returns whether another worker may get an assignment in a job, now or when that worker is idle."""
        others = (member for member in self._members.alive(Role.WORKER) if member.id != worker)
        return not job.spec.is_session and any(not job.is_quarantined(member.id, now) for member in others)

    def _end(self, job: JobMachine, worker: str, lose: Callable[[], Iterable[Effect]], now: float) -> None:
        """Ends a worker's incarnation. Its daemon registers again, which ends the trainer; servers know the new one."""
        self._members.leave(worker, job.workers[worker], now)
        self._emit(lose())

    def _is_assigned(self, worker: str, assignment: int, job: JobMachine) -> bool:
        """Returns whether a live worker has this assignment in a job. Raises Forbidden if it never had one there."""
        if job.has_assignment(worker, assignment):
            return True
        if not self._jobs.was_assigned(worker, job):
            name = job.spec.name
            raise errors.Forbidden(
                f"{worker} has no assignment in job {name}, and had none; call for jobs that the replies to its own "
                "heartbeats name, with the number of the assignment",
                job=name,
                worker=worker,
            )
        return False

    def _ensure_assignment(self, member: Member, job: JobMachine, assignment: int, now: float) -> None:
        """Checks that a member has an assignment in a job that has not ended. A session gets one by asking for it."""
        name = job.spec.name
        if job.has_assignment(member.id, assignment):
            return
        if not job.spec.is_session or member.role is not Role.SESSION:
            raise errors.Cancelled(f"{member.id} has no assignment in job {name}", job=name, worker=member.id)
        if member.enrolled:
            raise errors.Fenced(
                f"incarnation {member.incarnation} of session {member.id} was already in a job; register again",
                member=member.id,
                incarnation=member.incarnation,
            )
        if job.all_workers_finished:
            raise _ending(job)
        if not job.free_ranks:
            self._free_place(job, now)
        if not job.free_ranks:
            timeout_s = self._members.heartbeat_timeout_s
            raise errors.Overloaded(
                f"job {name} is full: it has all its {job.spec.workers} workers. If the process of one has died, its "
                f"place becomes free {timeout_s:g} s later. For more workers, open a session with another job name and "
                "a larger `workers`",
                job=name,
                workers=job.spec.workers,
                free_after_s=timeout_s,
            )
        self._members.mark_enrolled(member)
        self._scheduler.assign(member, job, now)
        self._schedule(now)

    def _free_place(self, job: JobMachine, now: float) -> None:
        """Declares an absent session of a full job lost, because another session wants its place."""
        lost = (self._members.lose_absent(worker, now) for worker in sorted(job.workers))
        self._declare_lost(next(filter(None, lost), []), now)


def _check_steps(job: JobMachine, worker: str, steps: Iterable[int], now: float) -> None:
    """Raises BadRequest if a worker cannot have made as many steps as it reports. Called before anything changes."""
    limit = job.step_limit(worker, now)
    for step in steps:
        if step > limit:
            name = job.spec.name
            raise errors.BadRequest(
                f"{worker} reports step {step} of job {name}, but its workers cannot have taken so many steps: the "
                f"limit is now step {limit}, MAX_LEAD ({MAX_LEAD}) above the highest step that they can have reached. "
                "Report the step of the worker's last push",
                job=name,
                worker=worker,
                step=step,
                limit="MAX_LEAD",
            )


def _ending(job: JobMachine) -> errors.Cancelled:
    return errors.Cancelled(f"job {job.spec.name} {LAST_CHECKPOINT}", job=job.spec.name)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _over(job: JobMachine, now: float) -> errors.ShoalError:
    name = job.spec.name
    if job.state is JobState.FAILED:
        return errors.JobFailed(f"job {name} failed: {job.status(now).reason}", job=name)
    return errors.Cancelled(f"job {name} has ended ({job.state.value}); submit it again to continue", job=name)
