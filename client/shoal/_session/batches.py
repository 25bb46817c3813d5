"""Batches of a session: the sample numbers of its leased ranges, and its position in these ranges."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from shoal import errors
from shoal._wire import LATEST_ORDER, Cursor, Lease, NoRange
from shoal.data._reading import SampleOrder, ShuffledSamples, cut
from shoal.job import Job

_LOG = logging.getLogger("shoal")

# Seconds until a session asks again for a range if it got none: twice as long each time, up to the second number.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0

# Seconds for which a session that closes waits until the step of its last push is closed. It does not wait longer,
# because the users of the others may have paused them.
CLOSE_WAIT_S = 3.0


class DataPosition:
    """The position of a session in its data.

    Args:
        joins_gradients: whether an accepted push is applied only when its step closes, as in synchronous mode.

    Attributes:
        pushed: the position as of its last push; None before the first one.
    """

    def __init__(self, *, joins_gradients: bool) -> None:
        self.pushed: Cursor | None = None
        self._joins_gradients = joins_gradients
        self._closed: Cursor | None = None  # as of the last push whose step is known to be closed

    def passed_barrier(self) -> None:
        """Records that the steps of all pushes are closed."""
        self._closed = self.pushed

    @property
    def applied(self) -> Cursor | None:
        """The position up to which all pushes are known to be applied."""
        return self._closed if self._joins_gradients else self.pushed

    def await_last(self, barrier: Callable[[float], object]) -> None:
        """Waits until the last push is applied, for at most `CLOSE_WAIT_S`. Call it after the push is settled.

        Args:
            barrier: waits for these seconds until the step of the push is closed, or raises.
        """
        if self.applied != self.pushed:
            with suppress(errors.ShoalError):
                barrier(CLOSE_WAIT_S)
                self.passed_barrier()


@dataclass(frozen=True, slots=True)
class SampleRange:
    """A range of the shuffled samples that a session has leased, cut into batches.

    Iteration begins each batch and yields its numbers. A loop that loads batches ahead calls `begin` itself.

    Attributes:
        epoch: number of the epoch, from 0.
        batches: by batch, the numbers of its samples: int64 arrays.
        begin: called with the index of a batch, before its gradients are pushed. The next push then says that the
            samples up to this batch are trained on. If the session is lost, other sessions get the rest.
    """

    epoch: int
    batches: Sequence[np.ndarray]
    begin: Callable[[int], None]

    def __iter__(self) -> Iterator[np.ndarray]:
        for index, numbers in enumerate(self.batches):
            self.begin(index)
            yield numbers


class NumberedBatches:
    """Numbers of the samples of each batch, from the ranges that a session leases.

    Args:
        samples: samples in one epoch.
        spec: the job, with its batch size and its seed. The last batch of a range may be smaller.
        lease: reports the lease with a number as done, and leases the next range.
        skip: skips a step, so that other sessions need not wait for this one while it has no range.
        pushed: the session's position as of its last push. The batches begin there if it still leases that range.

    Attributes:
        cursor: the session's position after the current batch; None if it has no batch.
    """

    def __init__(
        self,
        samples: int,
        spec: Job,
        lease: Callable[[int], Lease | NoRange],
        skip: Callable[[], object],
        pushed: Cursor | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._permuted: SampleOrder = ShuffledSamples(samples, spec.seed)
        self._spec, self._lease, self._skip, self._sleep = spec, lease, skip, sleep
        self._pushed = pushed
        self.cursor: Cursor | None = None

    def __iter__(self) -> Iterator[np.ndarray]:
        for leased in self.ranges():
            yield from leased

    def ranges(self) -> Iterator[SampleRange]:
        """Yields the ranges. The previous one is done when the next is asked for."""
        done, leased, pause_s = 0, False, _FIRST_PAUSE_S
        while True:
            # A loop that ends early keeps the position: the gradients of its last batch may still be pushed.
            self.cursor = None
            answer, done = self._lease(done), 0
            if answer is NoRange.FINISHED:
                if not leased:
                    _LOG.warning(no_data_left(self._spec))
                return
            if isinstance(answer, NoRange):
                others_wait = self._spec.consistency.needs_every_worker
                if others_wait:
                    self._skip()
                self._sleep(pause_s)
                pause_s = pause_s if others_wait else min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            leased, pause_s = True, _FIRST_PAUSE_S
            yield self._range(answer)
            done = answer.number

    def _range(self, lease: Lease) -> SampleRange:
        if lease.order != LATEST_ORDER:
            raise errors.WrongVersion(
                f"the job's data has order {lease.order}, and this version of Shoal knows {LATEST_ORDER} for sessions; "
                "use the coordinator's version of Shoal"
            )
        consumed = self._pushed.consumed if self._pushed and self._pushed.lease == lease.number else 0
        left = lease.range.after(consumed)
        batches = [*cut(self._permuted.numbers(left.epoch, left.start, left.stop), self._spec.batch_size)]
        ends = [consumed + end for end in accumulate(map(len, batches))]

        def begin(index: int) -> None:
            self.cursor = Cursor(lease.number, ends[index])

        return SampleRange(left.epoch, batches, begin)


def no_data_left(spec: Job) -> str:
    """Returns the warning of a session that gets no batch, because all data of its job is done."""
    done = "its epoch is done" if spec.epochs == 1 else f"all {spec.epochs} epochs are done"
    return (
        f"there are no more batches: job {spec.name} has no data left, {done}; to train longer, give more "
        "epochs (epochs=) to the session or the optimizer in a rerun"
    )


__all__ = ["CLOSE_WAIT_S", "DataPosition", "NumberedBatches", "SampleRange", "no_data_left"]
