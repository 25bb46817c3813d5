"""Sessions: a user's own training loop as a worker of a job, in any framework that knows NumPy arrays."""

import secrets
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import structlog
from numpy.typing import ArrayLike

from shoal import _tracing, errors
from shoal._rpc import CoordinatorClient, MembershipClient
from shoal._training import Gradients, Outbox, Pipeline, PushResult, StepClock, cancel, start_or_find
from shoal._training.participant import Participant, Report
from shoal._training.session_input import as_arrays, as_pair, number, plain, report_of
from shoal._wire import ReportAck
from shoal.v1 import coordinator_pb2
from shoal.variables import Variable

_log = structlog.get_logger(__name__)

# Progress goes to the coordinator with the first push after so many seconds: it is not on the data path.
_REPORT_EVERY_S = 0.5


class Session:
    """A worker of a job that lives in your own process. Opened by `Client.session`; closed by `with`, or `close`.

        variables = {"w": np.zeros(3), "b": shoal.Variable((1,), initializer=shoal.initializers.Ones())}
        with client.session("my-job", variables=variables, optimizer=shoal.optim.SGD(0.1)) as session:
            for x, y in batches:
                params = session.pull()
                loss, gradients = loss_and_gradients(params, x, y)
                session.push(gradients, weight=len(x), metrics={"loss": loss})

    Opening waits until as many sessions as the job has workers are there and the variables are placed. The job
    succeeds when the last one present has closed; one that closes because of an exception fails the job with its
    traceback. The variables stay, for `Client.pull`, until the job is dropped.

    Every process or thread opens a session of its own; one session is not for several threads at once. A thread of the
    session's keeps it alive: a process that stands still for longer than the cluster's lease is declared dead, the
    others go on without it, and its next call raises `Fenced`. What is told to watchers (metrics, log lines) never
    stops a loop: it waits while the coordinator is away, and is cut to what a report may carry.

    Attributes:
        job: the job's name.
        worker: this session's member id.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        job: str,
        variables: Mapping[str, Variable | ArrayLike] | None,
        options: Mapping[str, Any],
        *,
        worker: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job, self.worker = job, worker or f"session-{secrets.token_hex(4)}"
        self._clock = clock
        self._reported_at = clock()
        self._unreported = Outbox()
        self._steps = StepClock()
        self._computing = False  # between a pull and the push that follows, the user's loop does,
        self._since = clock()  # from then on
        self._generating_s = 0.0  # of the block that is timed, for gradients that come one by one
        self._unsettled: tuple[float, Mapping[str, float]] = (0.0, {})  # weight and metrics of a push on its way
        self._incarnation = 0
        self._fenced = self._over = self._closed = False
        self._lost: errors.ShoalError | None = None  # why this session can do nothing more
        with _tracing.root("enter", job=job, worker=self.worker), ExitStack() as opened:
            if start_or_find(coordinator, job, variables, options):
                opened.push(lambda _kind, error, _trace: cancel(coordinator, job) if error else None)
            member = coordinator_pb2.RegisterRequest(role=coordinator_pb2.SESSION, member=self.worker)
            membership = opened.enter_context(MembershipClient(coordinator, member, on_incarnation=self._live_as))
            membership.start()
            self._participant = Participant(coordinator, job, self.worker, membership.incarnation)
            if variables is not None:
                self._participant.describe({name: plain(value) for name, value in variables.items()}, samples=0)
            self._parameters: Pipeline = opened.enter_context(self._participant.enter())
            opened.pop_all()
        self._membership = membership

    @property
    def step(self) -> int:
        """The step to take next: how many this session has taken, or more where others have overtaken it."""
        return self._parameters.step

    @property
    def rank(self) -> int:
        """This session's place among the job's workers, from 0."""
        return self._participant.rank

    def pull(self) -> dict[str, np.ndarray]:
        """All variables, as soon as the job's consistency mode lets this session have them.

        Returns:
            Fresh arrays by name, in the variables' shapes and dtypes.

        Raises:
            Fenced: this session was declared dead; the message says what to do.
            UnknownJob: the job is gone: dropped, or lost by a coordinator that was started on another store.
            JobFailed: the job has failed; the message says why, and what to do where servers were lost.
            Cancelled: the job was cancelled, or is over.
            Unreachable: a server was away for too long.
        """
        with self._alive(), self._timed("pull"):
            values = self._parameters.pull()
        self._computing = True
        return values

    def buffers(self) -> dict[str, np.ndarray]:
        """Arrays to compute this step's gradients into, which saves a push their copy.

        They may lie in memory that a server reads from. Write every one of them, in place (`np.multiply(a, b,
        out=buffers["w"])`), or put another array in its place, and push the dict itself. Ask for new ones for each
        step: once pushed, these must not be changed before the push is settled, and in a job that overlaps they are
        not taken twice.

        Returns:
            By name, for every trainable variable, in its shape and dtype; of any content.

        Raises:
            Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: as for `pull`.
        """
        with self._alive():
            return self._parameters.buffers()

    def push(
        self,
        gradients: Mapping[str, ArrayLike] | Iterable[tuple[str, ArrayLike]],
        *,
        updates: Mapping[str, ArrayLike] | None = None,
        weight: float = 1.0,
        metrics: Mapping[str, float] | None = None,
    ) -> PushResult:
        """Sends this step's gradients; they count whole or not at all, and once.

        Args:
            gradients: of every trainable variable, in its shape and dtype: by name, perhaps `buffers`; or pairs of name
                and array one after the other, such as a generator gives them: then the first go out while the next are
                computed, in whatever order. Arrays that come so must not be changed before the push is settled. If the
                generator raises, nothing counts, and the step can be pushed again; it must not use the session itself.
            updates: values, or increments where they are summed. Of the non-trainable variables of an aggregation
                either every one or none; those that nothing is given of stay as they are.
            weight: in a synchronous step's mean, > 0: the number of samples.
            metrics: figures of the step for whoever watches the job: {"loss": 0.3}. Of more than 256 names the first
                are kept, and "loss".

        Returns:
            What became of it. With backup workers each shard closes its own steps, so "accepted" then means: on one
            shard at least. In a job that overlaps it is "sent", and the next call says what was wrong with it, if
            anything was.

        Raises:
            InvalidGradient: names, shapes or dtypes do not fit; nothing counts.
            NonFiniteGradient: NaN or Inf; nothing changed. `skip` the step, or push it again with other values. In a
                job that overlaps it was the last push that held them; its step is passed by, and this push not sent.
            BadRequest: a metric is no number, or `buffers` were pushed before; nothing was sent.
            Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: as for `pull`.
        """
        arrays: Gradients = as_arrays(gradients) if isinstance(gradients, Mapping) else self._generated(gradients)
        new = as_arrays(updates) if updates else None
        figures = {name: number(name, value) for name, value in (metrics or {}).items()}
        with self._alive():
            with self._timed("push"):
                self._settle()
                step = self.step
                with self._counting_rejected():
                    result = self._parameters.push(arrays, updates=new, weight=weight)
            self._stepped(step)
            if result.outcome == "sent":
                self._unsettled = weight, figures
            else:
                self._account(report_of(result, weight, figures))
            return result

    def settle(self) -> PushResult | None:
        """In a job that overlaps: waits for the last push. What became of it; None: none is on its way.

        Raises:
            NonFiniteGradient, Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: as for `push`.
        """
        with self._alive(), self._timed("push"):
            return self._settle()

    def skip(self) -> PushResult:
        """Passes this step by, so that nobody waits for a gradient of this session's."""
        with self._alive():
            with self._timed("push"):
                self._settle()
                step = self.step
                result = self._parameters.skip()
            self._stepped(step)
            return result

    def barrier(self) -> None:
        """Waits until `pull` would answer, without moving the values."""
        with self._alive(), self._timed("wait"):
            self._settle()
            self._parameters.barrier()

    def log(self, text: str) -> None:
        """Adds lines to the job's log, which goes out with the next report. Lines of more than 8 KiB go as several."""
        for line in text.splitlines():
            self._unreported.add_line(line)
        self._account(Report(step=self.step))

    def close(self, error: str = "") -> None:
        """Ends this session's part in the job, which is then done, or fails if an error's text is given.

        The session is closed in any case, also when it raises.

        Raises:
            Unreachable: the coordinator could not be told; it will miss this session when its lease runs out.
            Fenced, UnknownJob, JobFailed: as for `pull`, where no call has said so before: this end did not count.
            ShoalError: in a job that overlaps: of the last push, as for `push`. The job fails with it.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as closing:
            closing.callback(self._membership.stop)
            closing.callback(self._parameters.close)
            if self._lost:
                return
            if self._fenced:
                raise self._declared_dead()
            failure = self._last_failure()
            self._send_reports()
            if self._lost:
                raise self._lost
            if failure:
                error = error or "".join(traceback.format_exception(failure))
            with self._translated():
                self._participant.finish(error)
            if failure:
                raise failure

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close("".join(traceback.format_exception(error)))
        except errors.ShoalError as second:  # the first error is the one to be seen
            _log.warning("could not end the session", job=self.job, reason=second.message)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Counts the block's time, and as computation what came before it since the pull, or is generated in it."""
        start, self._generating_s = self._clock(), 0.0
        computing_s = start - self._since if self._computing else 0.0
        try:
            yield
        finally:
            self._since = self._clock()
            self._steps.observe(phase, self._since - start - self._generating_s)
            self._steps.observe("compute", computing_s + self._generating_s)

    def _generated(self, gradients: Iterable[tuple[str, ArrayLike]]) -> Iterator[tuple[str, np.ndarray]]:
        """The same as arrays, on this thread; notes the time that they take."""
        pairs = iter(gradients)
        while True:
            start = self._clock()
            try:
                pair = next(pairs)
            except StopIteration:
                return
            finally:
                self._generating_s += self._clock() - start
            yield as_pair(pair)

    def _stepped(self, step: int) -> None:
        self._steps.stepped(step)
        self._computing = False

    def _settle(self) -> PushResult | None:
        with self._counting_rejected():
            result = self._parameters.settle()
        if result:
            self._account(report_of(result, *self._unsettled))
        return result

    def _last_failure(self) -> errors.ShoalError | None:
        """Waits for the push that is on its way: what it failed with."""
        try:
            with self._translated():
                self._settle()
        except errors.ShoalError as failure:
            return failure
        return None

    @contextmanager
    def _counting_rejected(self) -> Iterator[None]:
        try:
            yield
        except errors.NonFiniteGradient:
            self._account(Report(step=self.step, rejected=1))
            raise

    def _live_as(self, incarnation: int) -> None:
        """Notes, on the heartbeat's thread, that this member has begun another life: this session's is over."""
        self._fenced = self._incarnation not in {0, incarnation}
        self._incarnation = incarnation

    @contextmanager
    def _alive(self) -> Iterator[None]:
        if self._closed or (self._over and not self._lost):
            raise errors.Cancelled(f"job {self.job} is over for {self.worker}: stop the loop", job=self.job)
        if self._fenced:
            self._lost = self._lost or self._declared_dead()
        if self._lost:
            raise self._lost
        with self._translated():
            yield

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Notes that this session is lost, and says so in its own words."""
        try:
            yield
        except (errors.Fenced, errors.UnknownJob, errors.Unreachable) as error:
            self._lose(error)
            raise self._lost or error from None

    def _lose(self, error: errors.ShoalError) -> None:
        """Notes what is lost: all, if the job has failed; else nothing by a server that is away, which may be back."""
        if self._lost is None:
            self._lost = self._participant.failure()
        if self._lost is None and not isinstance(error, errors.Unreachable):
            self._lost = self._declared_dead() if isinstance(error, errors.Fenced) else self._job_gone()

    def _job_gone(self) -> errors.UnknownJob:
        return errors.UnknownJob(
            f"job {self.job} is gone: it was dropped, or the coordinator was started on a store that does not have it, "
            "and its variables are gone with it. Close this session; to begin anew, open one with the values that you "
            "have",
            job=self.job,
            worker=self.worker,
        )

    def _declared_dead(self) -> errors.Fenced:
        return errors.Fenced(
            f"{self.worker} of job {self.job} was declared dead: it was silent for longer than the cluster's lease. "
            "What it had pushed counts; the others went on without it. Close this session and open a new one",
            job=self.job,
            worker=self.worker,
        )

    def _account(self, report: Report) -> None:
        self._unreported.add_metrics(report)
        if self._clock() - self._reported_at >= _REPORT_EVERY_S:
            self._send_reports()

    def _send_reports(self) -> None:
        """Sends what there is and never raises: a step that was taken is not undone by telling of it."""
        self._reported_at = self._clock()
        if timings := self._steps.take():
            self._unreported.add_metrics(Report(step=self.step, timings=timings))
        while report := self._unreported.take():
            try:
                self._over = self._participant.report(report) is ReportAck.DONE
                if self._over:
                    self._lost = self._lost or self._participant.failure()
            except (errors.Unreachable, errors.DeadlineExceeded) as error:  # training goes on without the coordinator
                _log.debug("could not report", job=self.job, reason=error.message)
                self._unreported.put_back(report)
                return
            except (errors.Fenced, errors.UnknownJob) as error:  # the next call says so
                self._lose(error)
                return
            except errors.ShoalError as error:  # the same again would be refused again
                _log.warning("a report was refused", job=self.job, reason=error.message)


__all__ = ["PushResult", "Session"]
