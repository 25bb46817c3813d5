"""Pulls and pushes that run while a worker computes: a thread fetches the next values and sends the last gradients.

That thread takes one thing after the other, in this order:

    the loop      | compute step 0 |       compute step 1        |       compute step 2
    the thread    | pull for 1     | push of 0, then pull for 2  | push of 1, then pull for 3

So a step's values have all pushes of this worker but its last one. The shard lets such a pull through when the step
that it is for may begin, whatever the mode; where a mode needs the last push first (synchronous, or a bound of 0) there
is nothing to gain, and the loop pulls and pushes in turn.

In any mode the gradients of one step may be given one by one: then another thread sends the first while the last are
computed, and the pull for the step after next waits for that thread.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from shoal import _tracing, errors
from shoal._memory.buffers import BufferPool
from shoal._training.gradient_buffers import GradientBuffers
from shoal._training.parameters import ParameterClient, PullResult, Push, PushResult
from shoal._wire import Cursor

Gradients: TypeAlias = Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]]

# Of memory that held gradients on their way: the most that is kept, and for how long.
_SPARE_BYTES, _SPARE_S = 1 << 30, 30.0


class Pipeline:
    """A loop's pulls and pushes, overlapping with its computation if it wants that.

    Not for several threads at once.

    Args:
        parameters: used by nobody else while this is.
        overlap: False: everything is done when its call returns.
        upload: is given each pull's values as soon as they are there, on the thread that fetched them; `pull` returns
            what it returns. A worker has them brought to its device so.
        traces: of the worker's steps: a pull is part of the step that it is for, also if that has not begun, and a push
            of its own, also if the next one has.
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
        self._sender: ThreadPoolExecutor | None = None  # of gradients that come one by one
        self._feeding: Push | None = None  # the push whose gradients are still to come
        self._memory = BufferPool(_SPARE_BYTES, _SPARE_S)
        self._fetched: Future[PullResult] | None = None  # the next step's values
        self._sent: Future[PushResult] | None = None  # the last step's push

    @property
    def step(self) -> int:
        """The step to take next."""
        return self._parameters.step

    def pull(self) -> dict[str, np.ndarray]:
        """As `ParameterClient.pull`; a push that failed meanwhile is for `settle` to tell."""
        self._check_not_feeding()
        if self._thread is None:
            with self.traces.span(self.step, "pull"):
                return self._upload(self._parameters.pull())
        with self.traces.span(self.step, "wait"):
            pulled = self._drain()
        if pulled is None or pulled.step != self.step:  # pulled again, or not at all, since the last push
            pulled = self._run(self.step)
        values = self._parameters.take(pulled)
        self._fetched = self._thread.submit(self._fetch_behind, self._sent, self.step)
        return values

    def buffers(self) -> GradientBuffers:
        """Arrays to compute this step's gradients into; see `Session.buffers`."""
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
    ) -> PushResult:
        """As `ParameterClient.push`. Arrays of a mapping, but for `buffers`, may be changed as soon as this returns.

        Args:
            gradients: by variable; or pairs of name and array one after the other, as they become ready: then each goes
                out while the next is computed. Arrays that come so must not change before the push is settled.
            updates, weight, cursor: as there.

        Raises:
            BadRequest: `buffers` that were pushed before, where that push may have been on its way as they were filled.

        Returns:
            What became of it; "sent" where it overlaps: then `settle` says what became of it, before the next push.
        """
        self._check_not_feeding()
        if self._sent is not None:
            raise errors.BadRequest("settle the last push before the next one")
        if not isinstance(gradients, Mapping):
            return self._push_as_ready(gradients, updates, weight, cursor)
        if self._thread is None:
            push_all = partial(self._parameters.push, gradients, updates=updates, weight=weight, cursor=cursor)
            return self._traced(self.step, push_all)
        if isinstance(gradients, GradientBuffers) and gradients.pushed:
            raise errors.BadRequest(
                "these gradient buffers were pushed before: their memory may have been on its way while it was filled "
                "again; ask for new ones each step, or push dict(buffers) once the last push is settled"
            )
        self._memory.trim()
        push = self._parameters.prepare(gradients, updates, weight, cursor, memory=self._memory.take)
        self._parameters.go_on(push.step + 1)
        self._sent = self._thread.submit(self._send, push)
        return PushResult("sent", 0, self.step)

    def _push_as_ready(
        self,
        gradients: Iterable[tuple[str, np.ndarray]],
        updates: Mapping[str, np.ndarray] | None,
        weight: float,
        cursor: Cursor | None,
    ) -> PushResult:
        self._sender = self._sender or ThreadPoolExecutor(1, thread_name_prefix="pushes")
        self._feeding = push = self._parameters.begin(updates, weight, cursor)
        try:
            sent = self._sender.submit(self._send, push)
            try:
                self._parameters.feed(push, gradients)
            except BaseException:
                wait([sent])  # which gives up: nothing of this step is on its way any more
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
        """Waits for the push that is on its way: what became of it; None: there is none.

        Raises:
            NonFiniteGradient: it held NaN or Inf. Nothing changed; with the next pull its step is passed by.
            Fenced, UnknownJob, Unreachable: as for `ParameterClient.push`.
        """
        if self._sent is None:
            return None
        with self.traces.span(self.step, "settle"):
            return self._settled()

    def _settled(self) -> PushResult | None:
        sent, self._sent = self._sent, None
        try:
            return sent.result() if sent else None
        finally:
            del sent  # or a failure, by its traceback, would keep itself, and the memory that it is about

    def skip(self) -> PushResult:
        """As `ParameterClient.skip`; after `settle`."""
        self._check_not_feeding()
        self._drain()
        return self._traced(self.step, self._parameters.skip, "skip")

    def barrier(self) -> None:
        """As `ParameterClient.barrier`; after `settle`."""
        self._check_not_feeding()
        with self.traces.span(self.step, "barrier"):
            self._drain()
            self._parameters.barrier()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads, and what they do, by closing the client."""
        if feeding := self._feeding:
            feeding.give_up()
        self._parameters.close()
        for thread in (self._thread, self._sender):
            if thread:
                thread.shutdown(wait=True, cancel_futures=True)
        self.traces.close()

    def _check_not_feeding(self) -> None:
        """A generator of gradients must not use what is waiting for it."""
        if self._feeding:
            raise errors.BadRequest("called while a push still takes gradients one by one: let it end first")

    def _fetch_behind(self, sent: "Future[PushResult] | None", step: int) -> PullResult:
        """The values for the step after this one, with all pushes that were begun before."""
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
        """Makes the call that a step ends with."""
        with self.traces.span(step, name):
            result = call()
        self.traces.end(step, outcome=result.outcome, staleness=result.staleness)
        return result

    def _drain(self) -> PullResult | None:
        """Waits for the values that are fetched ahead, if there are any, and lets go of them."""
        fetched, self._fetched = self._fetched, None
        try:
            return fetched.result() if fetched else None
        finally:
            del fetched  # as in `settle`


__all__ = ["Gradients", "Pipeline"]
