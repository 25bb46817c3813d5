"""Participant: a worker's part in a job. It calls the coordinator to enter the job, lease data, report and finish.

The worker daemon, its trainer and users' sessions use it. Values go through `ParameterClient`.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shoal import _tracing, errors
from shoal._memory.gc_control import delayed_gc
from shoal._rpc import CoordinatorClient, HeartbeatPace
from shoal._security import Credentials
from shoal._training.failover import EnteredPlacement
from shoal._training.failures import end_of
from shoal._training.overlap import Pipeline
from shoal._training.parameters import ParameterClient
from shoal._training.push_norm import PushNorm
from shoal._training.report import Report
from shoal._wire import Cursor, EvaluationAck, EvaluationClaim, Lease, NoRange, Placement, ReportAck, without_middle
from shoal.job import Job
from shoal.optim import OptimizerState
from shoal.status import Evaluation, JobStatus
from shoal.v1 import job_pb2
from shoal.variables import Variable, variable_from_array

# Seconds that the coordinator may let one Join wait, and more seconds until its deadline.
_JOIN_WAIT_S, _JOIN_SLACK_S = 20.0, 10.0
# Seconds between two Joins if the coordinator answered the first one within a second although the worker is not ready,
# for example because it stops.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _EARLY_S = 0.01, 0.25, 1.0
# Deadline of a report. A longer wait is not useful, because the next report carries the same data.
_REPORT_TIMEOUT_S = 2.0
# Seconds between two questions whether the job goes on, while a server does not answer.
_ASK_AGAIN_S = 0.5
# Limit of an error's text. A longer one keeps its beginning, which has the reason of the job, and its end, which is the
# end of the traceback.
_MAX_ERROR_BYTES = 32_768

_OVER = {job_pb2.SUCCEEDED, job_pb2.FAILED, job_pb2.CANCELLED}


class Participant:
    """A worker in a job.

    Args:
        coordinator: client of the coordinator; not closed here.
        job: name of the job.
        worker: member id.
        incarnation: incarnation of the member. A participant's part ends with it.
        assignment: number of the assignment, from the heartbeat's reply; 0 for a session.
        credentials: what the participant presents to servers. Default: those of `coordinator`.
        sleep: waits for a number of seconds.

    Attributes:
        rank: rank of the worker in the job; known after `enter`.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        job: str,
        worker: str,
        incarnation: int,
        assignment: int = 0,
        *,
        credentials: Credentials | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.job, self.worker, self.incarnation = job, worker, incarnation
        # Fields of every request.
        self._identity: dict[str, Any] = {
            "job": job,
            "worker": worker,
            "incarnation": incarnation,
            "assignment": assignment,
        }
        self._entered = EnteredPlacement(coordinator, job)
        self._calls: dict[str, Any] = {  # how each client of the parameters makes its calls
            "refresh": self._entered.refresh,
            "locate": self._entered.locate,
            "on_retry": self._on_retry,
            "credentials": credentials or coordinator.credentials,
        }
        self._reported = Report()  # sum of all reports that the coordinator has received
        self.rank = 0
        self._coordinator = coordinator
        self._jobs = coordinator.jobs
        self._sleep = sleep
        self._asked_at = float("-inf")  # when a repeated call last asked for the job's state
        self._given: dict[str, np.ndarray] = {}  # given values, for the case that this worker is the value sender
        self._state: OptimizerState | None = None  # likewise
        self._spec: Job | None = None
        self._ended: errors.JobFailed | errors.Cancelled | None = None  # why the job ended, once this is known

    @property
    def spec(self) -> Job:
        """The specification of the job, fetched once.

        Raises:
            UnknownJob: there is no such job.
        """
        if self._spec is None:
            self._spec = Job.from_proto(self._status().spec)
        return self._spec

    def describe(
        self, variables: Mapping[str, Variable | np.ndarray], samples: int, state: OptimizerState | None = None
    ) -> None:
        """Sends the program's variables and the number of its samples (0 without a data set).

        An array stands for a variable with the array's values as initial values; see `variable_from_array`. So does the
        array of a `Variable.of`. A state is what `checked_state` returns.

        Raises:
            InvalidVariable: an array has an unsupported dtype, or a variable is inconsistent.
            InvalidJob: another worker has described the job differently.
        """
        values = {name: it.values if isinstance(it, Variable) else it for name, it in variables.items()}
        given = {name: array for name, array in values.items() if array is not None}
        with delayed_gc():
            known = ((name, _variable(value)) for name, value in variables.items())
            described = [(it.with_state(state.updates) if state else it).to_proto(name) for name, it in known]
        request = job_pb2.DescribeRequest(**self._identity, variables=described, samples=samples)
        self._coordinator.call(self._jobs.Describe, request)
        self._given, self._state = given, state

    def enter(
        self,
        stop: Callable[[], bool] = lambda: False,
        upload: Callable[[dict[str, np.ndarray]], dict[str, Any]] = lambda values: values,
    ) -> Pipeline:
        """Waits until the variables are placed and this worker is admitted.

        Sends the initial values meanwhile if this worker is the value sender.

        Args:
            stop: called several times a second; True ends the wait.
            upload: as for `Pipeline`.

        Returns:
            The pipeline for the job's steps.

        Raises:
            JobFailed: the job failed meanwhile; the message says why.
            Cancelled: `stop` returned True, or the job ended in another way.
        """
        assigned, pause = False, _FIRST_PAUSE_S
        placement: Placement | None = None
        while True:
            began = time.monotonic()
            try:
                reply = self._join(assigned, placement, stop)
            except errors.Cancelled as error:
                raise (self._stopped() if stop() else error) from None
            if reply.state in _OVER:
                raise self._over(reply.state)
            if reply.HasField("placement"):
                placement = Placement.from_proto(reply.placement)
                self._entered.generation = placement.generation
            if placement and reply.assign_values and not assigned:
                self._assign(placement, reply.restored)
                assigned = True
            elif placement and reply.ready:
                break
            elif stop():
                raise self._stopped()
            elif time.monotonic() - began < _EARLY_S:
                self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        self._given, self._state = {}, None  # the memory of the given values is not needed any more
        self._spec, self.rank = Job.from_proto(reply.spec), reply.rank
        parameters = self._parameters(placement, reply.step)
        overlap = self._spec.overlap and self._spec.consistency.overlaps
        traces = _tracing.Traces("step", job=self.job, worker=self.worker, rank=self.rank)
        return Pipeline(parameters, overlap=overlap, upload=upload, traces=traces)

    def lease(self, done: int = 0, samples: int = 0) -> Lease | NoRange:
        """Leases the next range of samples.

        Args:
            done: number of the lease whose range is done; 0 means none.
            samples: samples in one epoch of a session's data; 0 for a worker.

        Returns:
            The lease, or the reason why there is none.
        """
        request = job_pb2.LeaseRequest(**self._identity, done=done, samples=samples)
        reply = self._coordinator.call(self._jobs.Lease, request)
        match reply.WhichOneof("answer"):
            case "range":
                return Lease.from_proto(reply.range, reply.order)
            case "finished":
                return NoRange.FINISHED
            case _:
                return NoRange.WAIT

    def claim_evaluation(self, step: int, *, finished_training: bool = False) -> EvaluationClaim:
        """Asks whether this worker should make an evaluation.

        Args:
            step: the worker's current step.
            finished_training: the worker has finished, except for the evaluation at the end.

        Returns:
            The number of the evaluation, and whether to stop.
        """
        request = job_pb2.ClaimEvaluationRequest(**self._identity, step=step, finished_training=finished_training)
        reply = self._coordinator.call(self._jobs.ClaimEvaluation, request)
        return EvaluationClaim(reply.number, reply.stop)

    def report_evaluation(self, result: Evaluation) -> EvaluationAck:
        """Sends the result of an evaluation. Repeat the call as long as the answer has `wait` set."""
        request = job_pb2.ReportEvaluationRequest(**self._identity, result=result.to_proto())
        reply = self._coordinator.call(self._jobs.ReportEvaluation, request)
        return EvaluationAck(reply.wait, reply.stop)

    def report(
        self, report: Report, pace: HeartbeatPace | None = None, *, retry_for_s: float | None = 0.0
    ) -> ReportAck:
        """Sends a report.

        Args:
            report: the report.
            pace: the pace of the member's heartbeats. The report counts as one. None if the member sends no heartbeats.
            retry_for_s: seconds of retries while the coordinator does not answer; None means the default of other
                calls.

        Returns:
            The coordinator's answer.

        Raises:
            Unreachable, DeadlineExceeded: the coordinator does not answer; merge this report with the next one
                (`Report.merged_with`).
        """
        totals = self._reported.merged_with(replace(report, values={}, log=(), timings=(), ranks=()))
        request = job_pb2.ReportRequest(
            **self._identity,
            step=totals.step,
            accepted=totals.accepted,
            rejected=totals.rejected,
            dropped=totals.dropped,
            samples=totals.samples,
            values=report.values,
            staleness=totals.staleness,
            log=report.log,
            timings=[timing.to_proto() for timing in report.timings],
            ranks=[times.to_proto() for times in report.ranks],
        )
        pace = pace or HeartbeatPace()
        sent_at = pace.now
        pace.reporting()
        with _tracing.root("report", job=self.job, worker=self.worker):
            reply = self._coordinator.call(
                self._jobs.Report, request, timeout_s=_REPORT_TIMEOUT_S, retry_for_s=retry_for_s
            )
        pace.answered(sent_at, reply.heartbeat_interval_s)
        self._reported = totals
        if reply.done:
            # The coordinator may be about to stop with the cluster, so its reply says how the job has ended.
            self._ended = end_of(self.job, reply.ended) or self._ended
            return ReportAck.DONE
        return ReportAck.STOP_AFTER_BATCH if reply.stop_after_batch else ReportAck.CONTINUE

    def finish(
        self,
        error: str = "",
        *,
        shards_lost: bool = False,
        trainer_failed: bool = False,
        others_go_on: bool = False,
        cursor: Cursor | None = None,
        retry_for_s: float | None = None,
    ) -> None:
        """Reports that this worker has finished its part in the job.

        Args:
            error: the error that the job fails with; empty means success.
            shards_lost: the error is that servers have lost the job's shards.
            trainer_failed: the trainer was killed several times in a row, so the worker is to be quarantined.
            others_go_on: a session with an error only leaves, if its job has other sessions.
            cursor: the position in the leased range, up to which all pushes are applied; None if no range is leased.
            retry_for_s: seconds of retries while the coordinator does not answer; None means the default of other
                calls.

        Raises:
            Unreachable: the coordinator did not answer.
        """
        request = job_pb2.FinishRequest(
            **self._identity,
            error=without_middle(error, _MAX_ERROR_BYTES),
            shards_lost=shards_lost,
            trainer_failed=trainer_failed,
            others_go_on=others_go_on,
            lease=cursor.lease if cursor else 0,
            consumed=cursor.consumed if cursor else 0,
        )
        self._coordinator.call(self._jobs.Finish, request, retry_for_s=retry_for_s)

    def status(self, retry_for_s: float | None = None) -> JobStatus:
        """Returns the status of the job.

        Args:
            retry_for_s: seconds of retries while the coordinator does not answer; None means the default of other
                calls.

        Raises:
            UnknownJob: there is no such job.
        """
        return JobStatus.from_proto(self._status(retry_for_s))

    def restore_note(self) -> str:
        """Returns how the job differs from its checkpoint; empty if it does not, or the coordinator does not answer."""
        if not self.spec.restore:
            return ""
        try:
            return self.status(retry_for_s=0).restore_note
        except errors.ShoalError:  # the session has entered, and its next call tells of what ends it
            return ""

    def ended(self) -> errors.JobFailed | errors.Cancelled | None:
        """Returns why the job has failed or was cancelled; None if neither, or the coordinator does not answer."""
        if self._ended is None:
            try:
                self._ended = end_of(self.job, self._status(retry_for_s=0))
            except errors.ShoalError:
                return None
        return self._ended

    def _status(self, retry_for_s: float | None = None) -> job_pb2.JobStatus:
        request = job_pb2.GetRequest(job=self.job)
        return self._coordinator.call(self._jobs.Get, request, retry_for_s=retry_for_s).status

    def _join(self, assigned: bool, placement: Placement | None, stop: Callable[[], bool]) -> job_pb2.JoinReply:
        request = job_pb2.JoinRequest(
            **self._identity,
            assigned=assigned,
            wait_s=_JOIN_WAIT_S,
            generation=placement.generation if placement else 0,
        )
        return self._coordinator.call(self._jobs.Join, request, timeout_s=_JOIN_WAIT_S + _JOIN_SLACK_S, abandon=stop)

    def _stopped(self) -> errors.Cancelled:
        return errors.Cancelled(f"{self.worker} stopped waiting to enter job {self.job}", job=self.job)

    def _over(self, state: job_pb2.JobState.ValueType) -> errors.ShoalError:
        if state != job_pb2.SUCCEEDED and (end := end_of(self.job, self._status())):
            return end
        name = job_pb2.JobState.Name(state)
        return errors.Cancelled(f"job {self.job} is over ({name.lower()}); it cannot be entered", job=self.job)

    def _assign(self, placement: Placement, restored: Collection[str]) -> None:
        values = {name: value for name, value in self._given.items() if name not in restored}
        with ParameterClient(placement, **self._calls) as client:
            client.assign(values, None if restored else self._state)  # a checkpoint has its own state

    def _parameters(self, placement: Placement, step: int) -> ParameterClient:
        spec = self.spec
        clips_pushes = spec.optimizer.clip_norm and not spec.consistency.joins_gradients
        return ParameterClient(
            placement,
            worker=self.worker,
            incarnation=self.incarnation,
            step=step,
            norm=PushNorm(spec.optimizer) if clips_pushes else None,
            replicated=spec.replicas > 1,
            **self._calls,
        )

    def _on_retry(self) -> None:
        """Counts a repeated call to a server, and ends it if its job has ended, for example because of that server.

        Raises:
            JobFailed, Cancelled, UnknownJob: the job has ended, or does not exist any more.
        """
        self._coordinator.retries.count("server")
        if time.monotonic() - self._asked_at < _ASK_AGAIN_S:
            return
        self._asked_at = time.monotonic()
        try:
            status = self._status(retry_for_s=0)
        except errors.UnknownJob:
            raise
        except errors.ShoalError:  # the server may answer before the coordinator does
            return
        if end := end_of(self.job, status):
            self._ended = end
            raise end
        if status.state in _OVER:
            raise errors.Cancelled(f"job {self.job} has succeeded; stop the loop", job=self.job)


def _variable(value: Variable | np.ndarray) -> Variable:
    return variable_from_array(value) if isinstance(value, np.ndarray) else value


__all__ = ["Participant", "Report"]
