"""Pipeline of pulls and pushes that run while a worker computes.

One thread sends the gradients of the last step, and then fetches the values of the next step:

    the loop      | compute step 0 |       compute step 1        |       compute step 2
    the thread    | pull for 1     | push of 0, then pull for 2  | push of 1, then pull for 3

So the values of a step include all pushes of this worker except its last one. In any mode, a server answers a pull for
a step when that step may begin. In some modes (synchronous, or bounded staleness with a bound of 0), a step may begin
only after the worker's push of the step before. Overlap then gains nothing, and the loop pulls and pushes in turn.

In any mode, the program may give the gradients of a step one by one. A second thread, the sender, then sends the first
ones while the loop computes the others. With overlap, the pull for step n + 2 waits until the sender has sent the
gradients of step n.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from shoal import _tracing, errors
from shoal._memory.buffers import BufferPool
from shoal._training.call_threads import CallThreads
from shoal._training.gradient_buffers import GradientBuffers
from shoal._training.parameters import ParameterClient, PullResult, Push, PushResult
from shoal._wire import Cursor
from shoal.optim import OptimizerState
from shoal.variables import Variable

Gradients: TypeAlias = Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]]

# Limits of the buffer pool for gradients: bytes retained, and seconds before they are released.
_SPARE_BYTES, _SPARE_S = 1 << 30, 30.0


class Pipeline:
    """Pulls and pushes of a training loop, which can overlap with its computation.

    Not thread-safe.

    Args:
        parameters: client of the parameters; the pipeline is its only user.
        overlap: whether calls overlap with computation. If False, each call completes before it returns.
        upload: receives each pull's values on the thread that fetched them; `pull` returns its result. A worker uses it
            to copy values to its device.
        traces: traces of the worker's steps. A pull belongs to the step that it is for, and a push to its own step.
    """

    def __init__(
        self,
        parameters: ParameterClient,
        *,
        overlap: bool,
        upload: Callable[[dict[str, np.ndarray]], dict[str, Any]] = lambda values: values,
        traces: _tracing.Traces | None = None,
    ) -> None:
        self._parameters = parameters
        self._upload = upload
        self.traces = traces or _tracing.Traces("step")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pipeline") if overlap else None
        self._sender = CallThreads("pushes")  # sends gradients that are given one by one
        self._feeding: Push | None = None  # the push that still accepts gradients
        self._memory = BufferPool(_SPARE_BYTES, _SPARE_S)
        self._fetched: Future[PullResult] | None = None  # the next step's values
        self._sent: Future[PushResult] | None = None  # the last step's push
        self._outdated = False  # whether the fetched values lack a push that the user has settled

    @property
    def step(self) -> int:
        """The next step."""
        return self._parameters.step

    @property
    def overlap(self) -> bool:
        """Whether calls overlap with computation."""
        return self._thread is not None

    @property
    def variables(self) -> Mapping[str, Variable]:
        """The variables of the job, by name."""
        return self._parameters.servers.packer.variables

    def pull(self) -> dict[str, np.ndarray]:
        """Pulls as `ParameterClient.pull` does. If the last push failed, `settle` raises its error."""
        self._check_not_feeding()
        if self._thread is None:
            with self.traces.span(self.step, "pull"):
                return self._upload(self._parameters.pull())
        with self.traces.span(self.step, "wait"):
            pulled = self._drain()
        outdated, self._outdated = self._outdated, False
        if pulled is None or outdated or pulled.step != self.step:  # pulled again, or not pulled, since the last push
            pulled = self._run(self.step)
        values = self._parameters.take(pulled)
        self._fetched = self._thread.submit(self._fetch_behind, self._sent, self.step)
        return values

    def buffers(self) -> GradientBuffers:
        """Returns arrays for this step's gradients; see `Session.buffers`."""
        self._check_not_feeding()
        self._memory.trim()
        return self._parameters.buffers(self._memory.take)

    def push(
        self,
        gradients: Gradients,
        *,
        updates: Mapping[str, np.ndarray] | None = None,
        weight: float = 1.0,
        cursor: Cursor | None = None,
        learning_rate: float | None = None,
    ) -> PushResult:
        """Pushes as `ParameterClient.push` does. Arrays of a mapping, except `buffers`, may change when this returns.

        Args:
            gradients: arrays by variable; or pairs of name and array, as they become available. Each pair is sent while
                the next one is computed, and its array must not change before the push is settled.
            updates, weight, cursor, learning_rate: as for `ParameterClient.push`.

        Returns:
            The result of the push. With overlap, the outcome is "sent", and `settle` returns the result before the next
            push.

        Raises:
            BadRequest: the last push is not settled, or these `buffers` were pushed before, so their memory may have
                been in use while they were filled.
            InvalidGradient, NonFiniteGradient, Fenced, UnknownJob, Unreachable: as for `ParameterClient.push`.
        """
        self._check_not_feeding()
        if self._sent is not None:
            raise errors.BadRequest("the last push is not settled; call settle() before the next push")
        if not isinstance(gradients, Mapping):
            push = self._parameters.begin(updates, weight, cursor)
            return self._push_as_ready(replace(push, learning_rate=learning_rate), gradients)
        if self._thread is None:
            given: dict[str, Any] = {"updates": updates, "weight": weight, "cursor": cursor}
            push_all = partial(self._parameters.push, gradients, **given, learning_rate=learning_rate)
            return self._traced(self.step, push_all)
        if isinstance(gradients, GradientBuffers) and gradients.pushed:
            raise errors.BadRequest(
                "these gradient buffers were pushed before, and that push may still have read them while they were "
                "filled; request new buffers for each step, or push dict(buffers) after the last push is settled"
            )
        self._memory.trim()
        push = self._parameters.prepare(gradients, updates, weight, cursor, memory=self._memory.take)
        self._parameters.go_on(push.step + 1)
        self._sent = self._thread.submit(self._send, replace(push, learning_rate=learning_rate))
        return PushResult("sent", 0, self.step)

    def _push_as_ready(self, push: Push, gradients: Iterable[tuple[str, np.ndarray]]) -> PushResult:
        self._feeding = push
        try:
            sent = self._sender.submit(partial(self._send, push))
            try:
                self._parameters.feed(push, gradients)
            except BaseException:
                wait([sent])  # the push fails, and nothing of this step is being sent afterwards
                raise
        finally:
            push.give_up()
            self._feeding = None
        self._sent = sent
        del sent  # as in `settle`
        if self._thread is None:
            result = self._settled()
            assert result is not None
            return result
        self._parameters.go_on(push.step + 1)
        return PushResult("sent", 0, self.step)

    def settle(self) -> PushResult | None:
        """Waits for the last push, and returns its result; None if there is none.

        Raises:
            NonFiniteGradient: the gradients held NaN or Inf. Nothing changed, and the next pull skips the step.
            Fenced, UnknownJob, Unreachable: as for `ParameterClient.push`.
        """
        if self._sent is None:
            return None
        with self.traces.span(self.step, "settle"):
            return self._settled()

    def refresh(self) -> None:
        """Makes the next pull fetch the values again, so that they include the last push. Call it after `settle`."""
        self._outdated = self._fetched is not None

    def _settled(self) -> PushResult | None:
        sent, self._sent = self._sent, None
        try:
            return sent.result() if sent else None
        finally:
            del sent  # otherwise a failure's traceback would keep the failure and its memory alive

    def skip(self) -> PushResult:
        """Skips the step as `ParameterClient.skip` does. Call it after `settle`."""
        self._check_not_feeding()
        self._drain()
        return self._traced(self.step, self._parameters.skip, "skip")

    def barrier(self) -> None:
        """Waits as `ParameterClient.barrier` does. Call it after `settle`."""
        self._check_not_feeding()
        with self.traces.span(self.step, "barrier"):
            self._drain()
            self._parameters.barrier()

    @property
    def updates(self) -> int:
        """See `ParameterClient.updates`."""
        return self._parameters.updates

    def optimizer_state(self, slots: Sequence[str]) -> OptimizerState:
        """Returns slots as `ParameterClient.optimizer_state` does. Call it after `settle`."""
        self._check_not_feeding()
        with self.traces.span(self.step, "state"):
            self._drain()
            return self._parameters.optimizer_state(slots)

    def last_barrier(self, within_s: float) -> None:
        """Waits as `barrier` does, for a limited time. Only `close` may be called afterwards.

        Args:
            within_s: seconds after which the client is closed, which ends the wait.

        Raises:
            Cancelled: the time has passed.
        """
        limit = threading.Timer(within_s, self._parameters.close)  # any thread may close the client
        limit.daemon = True
        limit.start()
        try:
            self.barrier()
        finally:
            limit.cancel()
            limit.join()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the client, which ends the threads and their calls."""
        if feeding := self._feeding:
            feeding.give_up()
        self._parameters.close()
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._sender.close()
        self.traces.close()

    def _check_not_feeding(self) -> None:
        """Raises BadRequest if a generator of gradients calls the pipeline that waits for it."""
        if self._feeding:
            raise errors.BadRequest(
                "a push still reads gradients, from a generator or from the backward pass of shoal.torch; make this "
                "call after the push or after optimizer.step()"
            )

    def _fetch_behind(self, sent: "Future[PushResult] | None", step: int) -> PullResult:
        """Returns the values for the step after this one, which include all pushes that began before."""
        if sent:
            wait([sent])
        return self._fetch(step, ahead=1)

    def _run(self, step: int) -> PullResult:
        assert self._thread
        return self._thread.submit(self._fetch, step, ahead=0).result()

    def _fetch(self, step: int, *, ahead: int) -> PullResult:
        with self.traces.span(step + ahead, "pull", ahead=ahead):
            pulled = self._parameters.fetch(step, ahead=ahead)
            return replace(pulled, values=self._upload(pulled.values))

    def _send(self, push: Push) -> PushResult:
        return self._traced(push.step, partial(self._parameters.send, push))

    def _traced(self, step: int, call: Callable[[], PushResult], name: str = "push") -> PushResult:
        """Makes the call that ends a step, in a span."""
        with self.traces.span(step, name):
            result = call()
        self.traces.end(step, outcome=result.outcome, staleness=result.staleness)
        return result

    def _drain(self) -> PullResult | None:
        """Waits for the prefetched values, if there are any, and releases them."""
        fetched, self._fetched = self._fetched, None
        try:
            return fetched.result() if fetched else None
        finally:
            del fetched  # as in `settle`


__all__ = ["Gradients", "Pipeline"]
