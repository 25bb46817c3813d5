"""Sessions: user training loops that take part in a job as workers, in any framework that can use NumPy arrays."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal

import numpy as np

from shoal import errors
from shoal._rpc import CoordinatorClient
from shoal._session import open_sessions
from shoal._session.batches import DataPosition
from shoal._session.data_access import DataAccess
from shoal._session.endings import ENDING, closed, declared_lost, forked, job_gone
from shoal._session.entry import entering
from shoal._session.inputs import numbers_of, rate_of, report_of, weight_of
from shoal._session.reports import Reports
from shoal._session.step_times import StepTimes
from shoal._session.waits import SessionWaits
from shoal._system import check_count, check_type
from shoal._system.logs import Log
from shoal._training import Gradients, PushResult, Report, failure_text, member_id
from shoal.optim import OptimizerState

_log = Log(__name__)


class Session(DataAccess):
    """A worker of a job in your own process. `Client.session` opens it; the end of `with`, or `close`, closes it.

        variables = {"w": np.zeros(3), "b": shoal.Variable((1,), initializer=shoal.initializers.Ones())}
        with client.session("my-job", variables=variables, optimizer=shoal.optim.SGD(0.1)) as session:
            for x, y in batches:
                params = session.pull()
                loss, gradients = loss_and_gradients(params, x, y)
                session.push(gradients, weight=len(x), metrics={"loss": loss})

    The constructor waits until the job has all its sessions and the variables are placed. A session that has other
    variables than its job is refused. The job succeeds when the last session has closed. If a session closes because of
    an exception or Ctrl-C, its traceback is in the job's log, and the others go on; the last one, or any with
    `on_error="fail"`, makes the job fail. `Client.pull` returns the variables until the job is dropped.

    Open one session per process or thread; a session is not thread-safe. If the process stalls for longer than the
    heartbeat timeout, the session is declared lost: the others go on, and its next call raises `Fenced`.

    Args:
        coordinator: client of the coordinator.
        job: name of the job, also an attribute.
        variables: variables of the job: a tree. None joins a job that another session describes.
        options: fields of the job; see `Client.session`.
        worker: member id, also an attribute. "" means a random one.
        on_error: "leave" or "fail"; see `Client.session`.
        optimizer_state: see `Client.session`.
        clock: returns seconds from any origin, for timings.

    Raises:
        BadRequest: an argument is invalid. `Client.session` describes the other errors.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        job: str,
        variables: Any,
        options: Mapping[str, Any],
        *,
        worker: str = "",
        on_error: Literal["leave", "fail"] = "leave",
        optimizer_state: OptimizerState | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if on_error not in ("leave", "fail"):
            raise errors.BadRequest(f"on_error is {on_error!r}; give 'leave' or 'fail'")
        self.job, self.worker, self._on_error = job, member_id(worker), on_error
        self._coordinator, self._pid = coordinator, os.getpid()
        self._times = StepTimes(clock)
        self._unsettled: tuple[float, Mapping[str, float]] = (0.0, {})  # samples and metrics of the push in progress
        self._incarnation, self._fenced, self._closed = 0, False, False
        self._lost: errors.ShoalError | None = None  # the error that ended this session
        self._told = False  # whether a call has raised it
        self._batches = None
        self._listed = open_sessions.OpenSession(coordinator, job, self.worker)
        with entering(coordinator, job, self.worker, variables, options, self._live_as, optimizer_state) as entered:
            self._participant, self._membership = entered.participant, entered.membership
            self._parameters, self._inputs = entered.parameters, entered.inputs
            self._position = DataPosition(joins_gradients=self._participant.spec.consistency.joins_gradients)
            lose = partial(self._lose, told=False)  # the next call raises it, or `close`
            self._reports = Reports(self._participant, self._membership.pace, self._times.steps, lose, clock)
            self._waits = SessionWaits(self._participant, self._parameters, self._times, self._reports, clock)
        open_sessions.add(self._listed)

    @property
    def step(self) -> int:
        """The number of the next step: the steps that this session has taken, or more if it has skipped ahead."""
        return self._parameters.step

    def pull(self) -> Any:
        """Returns the values of all variables, as soon as the job's consistency mode allows it.

        Returns:
            New arrays in the variables' shapes and dtypes: by name, or in the tree that this session was given.

        Raises:
            Fenced: this session was declared lost. The message says what to do.
            UnknownJob: the job was dropped, or the coordinator was restarted with another store.
            JobFailed: the job has failed. The message says why.
            Cancelled: the job was cancelled or has ended, or this session is closed.
            Unreachable: a server did not answer for too long.
        """
        with self._alive(), self._times.timed("pull"):
            values = self._parameters.pull()
        self._position.passed_barrier()
        self._times.pulled()
        return self._inputs.rebuilt(values)

    def buffers(self) -> dict[str, np.ndarray]:
        """Returns arrays for this step's gradients, which the push does not need to copy.

        The arrays may be shared memory of a server. Write each one in place (`np.multiply(a, b, out=buffers["w"])`) or
        replace it in the dict, and push the dict itself. Request new buffers for each step. Do not change pushed
        buffers before the push is settled; with overlap, they cannot be pushed again.

        Returns:
            Arrays by name for every trainable variable, in its shape and dtype, with undefined content.

        Raises:
            Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: see `pull`.
        """
        with self._alive():
            return self._parameters.buffers()

    def push(
        self,
        gradients: Any,
        *,
        updates: Any = None,
        weight: float = 1.0,
        metrics: Mapping[str, float] | None = None,
        samples: int | None = None,
        learning_rate: float | None = None,
    ) -> PushResult:
        """Pushes this step's gradients. They count completely or not at all, and only once.

        Args:
            gradients: gradients of all trainable variables, in their shapes and dtypes: a dict by name, for example
                `buffers`, or a tree as for the variables. It can also be an iterable of (name, array) pairs in any
                order, such as a generator: the session then sends the first arrays while the next are computed. Do not
                change these arrays before the push is settled. If the generator raises, nothing counts, and the step
                can be pushed again. The generator must not use the session. A gradient may be None if a gradient of
                zeros leaves the variable unchanged: with plain `SGD` without weight decay, or if the variable's group
                is frozen. Otherwise None is refused.
            updates: values, or increments for the aggregation "sum", of non-trainable variables: a dict by name, or a
                tree. If you give one of an aggregation, give all of that aggregation. A variable without an update
                keeps its value.
            weight: weight in the mean of a synchronous step, > 0: usually the number of samples.
            metrics: metrics of the step by name, such as {"loss": 0.3}. If there are more than 256, "loss" and the
                first others are kept.
            samples: number of samples of the step, for the progress of the job. None means the weight.
            learning_rate: that of the update, >= 0. In a synchronous step, that of the lowest rank that gives one
                counts. If no worker gives one, that of the job counts.

        Returns:
            The outcome. With backup workers, each server closes its own steps, and "accepted" means that at least one
            server accepted the push. With overlap, the outcome is "sent", and the next call raises the error of a
            failed push.

        Raises:
            InvalidGradient: names, shapes or dtypes do not match, or the weight is not above 0; nothing counts.
            NonFiniteGradient: a gradient contains NaN or Inf; nothing has changed. `skip` the step, or push other
                values. With overlap, the previous push had them, and its step is skipped. This push is not sent.
            BadRequest: the weight, a metric or another number is invalid, or `buffers` were pushed; nothing was sent.
            Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: see `pull`.
        """
        weight, rate = weight_of(weight), rate_of(learning_rate)
        arrays: Gradients = self._inputs.pushed(gradients, self._times.generated)
        new = None if updates is None else self._inputs.updates(updates)
        numbers, counted = numbers_of(metrics), weight if samples is None else check_count("samples", samples)
        cursor = self._batches.cursor if self._batches else None
        with self._alive():
            with self._times.timed("push"):
                self._settle()
                step, push = self.step, partial(self._parameters.push, weight=weight, learning_rate=rate)
                with self._reports.counting_rejected(self._parameters):
                    result = push(arrays, updates=new, cursor=cursor)
            self._position.pushed = cursor or self._position.pushed
            self._times.stepped(step)
            if result.outcome == "sent":
                self._unsettled = counted, numbers
            else:
                self._reports.outbox.add_metrics(report_of(result, counted, numbers))
            return result

    def settle(self) -> PushResult | None:
        """Waits for the last push of a job with overlap. The next pull includes it.

        Returns:
            The outcome of the push, or None if no push is in progress.

        Raises:
            NonFiniteGradient, Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: see `push`.
        """
        with self._alive(), self._times.timed("push"):
            result = self._settle()
            self._parameters.refresh()
            return result

    @property
    def overlap(self) -> bool:
        """Whether pulls and pushes run while the loop computes: the job has `overlap`, and a mode that allows it."""
        return self._parameters.overlap

    @property
    def updates(self) -> int:
        """Number of updates that the values of the last pull had received: that of the shard with the fewest."""
        return self._parameters.updates

    def optimizer_state(self) -> OptimizerState:
        """Returns the slots of the optimizer and the number of updates, as of the values that `pull` returns.

        In synchronous mode the state is exact: it belongs to the values of the last pull, if no push came after it. In
        other modes, and with backup workers, slots and variables may differ by some updates of other sessions. A
        checkpoint has an exact state.

        Returns:
            New arrays by slot and variable, in the variables' shapes and dtypes; float16 and bfloat16 variables have
            float32 slots.

        Raises:
            NonFiniteGradient, Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: see `push`.
        """
        with self._alive(), self._times.timed("pull"):
            self._settle()
            return self._parameters.optimizer_state(self._participant.spec.optimizer.slots)

    def skip(self) -> PushResult:
        """Skips this step, so that no other worker waits for this session's gradients.

        Raises:
            NonFiniteGradient, Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: see `push`.
        """
        with self._alive():
            with self._times.timed("push"):
                self._settle()
                step = self.step
                result = self._parameters.skip()
            self._times.stepped(step)
            self._reports.outbox.add_metrics(Report(step=self.step))
            return result

    def barrier(self) -> None:
        """Waits until `pull` would return, without transferring the values.

        Raises:
            NonFiniteGradient, Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: see `push`.
        """
        with self._alive(), self._times.timed("wait"):
            self._settle()
            self._parameters.barrier()
            self._position.passed_barrier()

    def close(self, error: str | BaseException = "") -> None:
        """Closes the session, even if this call raises. A second call does nothing.

        Args:
            error: an exception, or a text, for the job's reason and its log. The job fails with it if it has no other
                session, or if `on_error` is "fail". "" means that the session has finished its work.

        Raises:
            BadRequest: `error` is neither; the session stays open.
            Unreachable: the coordinator did not answer. It counts the session as lost after the heartbeat timeout.
            Fenced, UnknownJob, JobFailed, Cancelled: see `pull`; raised unless an earlier call has raised it.
            ShoalError: the last push failed, in a job with overlap. The job fails with this error.
        """
        check_type("error", error, (str, BaseException), "an exception or a text, or leave it out")
        if self._closed or os.getpid() != self._pid:
            return  # the session of a forked process is its parent's
        self._closed = True
        with ExitStack() as closing:
            closing.callback(open_sessions.remove, self._listed)
            closing.callback(self._membership.stop)
            closing.callback(self._parameters.close)
            closing.callback(self._waits.stop)
            if self._told:
                return
            if self._fenced or self._lost:
                raise self._lost or declared_lost(self.job, self.worker)
            if self._coordinator.closed:
                raise closed(self.job, self.worker, of_client=True)
            failure = self._last_failure()
            text = failure_text(error or failure or "")
            self._reports.outbox.add_lines(text.splitlines())
            with self._as_session_errors(), self._times.timed("wait"):
                self._reports.send_last()
                if self._lost:
                    raise self._lost
                try:
                    if not text:
                        self._position.await_last(self._parameters.last_barrier)
                finally:  # also if Ctrl-C ends the wait
                    cursor = None if text else self._position.applied
                    self._participant.finish(text, others_go_on=self._on_error == "leave", cursor=cursor)
            if failure:
                raise failure

    def __repr__(self) -> str:
        return f"Session({self.job!r}, worker={self.worker!r}, rank={self.rank}, step={self.step})"

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
            return
        try:
            self.close(error)
        except errors.ShoalError as second:  # the first error is the one that the user needs
            _log.warning("closing the session raised a second error", job=self.job, reason=second.message)

    def _settle(self) -> PushResult | None:
        with self._reports.counting_rejected(self._parameters):
            result = self._parameters.settle()
        if result:
            self._reports.outbox.add_metrics(report_of(result, *self._unsettled))
        return result

    def _last_failure(self) -> errors.ShoalError | None:
        """Waits for the push in progress, and returns the error with which it failed, if any."""
        try:
            with self._as_session_errors(), self._times.timed("push"):
                self._settle()
        except errors.ShoalError as failure:
            return failure
        return None

    def _live_as(self, incarnation: int) -> None:
        """Records the member's incarnation, on the heartbeat thread. A new one means that this session is fenced."""
        self._fenced = self._incarnation not in {0, incarnation}
        self._incarnation = incarnation

    @contextmanager
    def _alive(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise forked(self.job, self.worker, self._pid)
        if self._closed or self._coordinator.closed:
            raise closed(self.job, self.worker, of_client=not self._closed)
        if self._reports.over and not self._lost:
            raise errors.Cancelled(f"job {self.job} has ended for {self.worker}; stop the loop", job=self.job)
        if self._fenced:
            self._lose(declared_lost(self.job, self.worker))
        if self._lost:
            raise self._lose(self._lost)
        try:  # not `_as_session_errors`, which would cost a second generator for each call
            yield
        except ENDING as error:
            raise self._lose(error) from None

    @contextmanager
    def _as_session_errors(self) -> Iterator[None]:
        """Converts errors that end this session to ones that say what to do, and records them."""
        try:
            yield
        except ENDING as error:
            raise self._lose(error) from None

    def _lose(self, error: errors.ShoalError, *, told: bool = True) -> errors.ShoalError:
        """Records and returns the error that ended this session, which the caller raises if `told`.

        An unreachable server alone does not end it.
        """
        if self._lost is None:
            self._lost = error if isinstance(error, errors.JobFailed | errors.Cancelled) else self._participant.ended()
        if self._lost is None and not isinstance(error, errors.Unreachable):
            gone = declared_lost if isinstance(error, errors.Fenced) else job_gone
            self._lost = gone(self.job, self.worker)
        self._told = self._told or (told and self._lost is not None)
        return self._lost or error


__all__ = ["PushResult", "Session"]
