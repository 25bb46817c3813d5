"""Batches of a session: leased ranges of an epoch's order, as the numbers of samples."""

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np

from shoal import errors
from shoal._wire import LATEST_ORDER, Cursor, Lease, NoRange
from shoal.data._reading import SampleOrder, ShuffledSamples, cut
from shoal.job import Job

_LOG = logging.getLogger("shoal")

_ASK_AGAIN_S = 0.05  # seconds until a session asks again for a range, if it got none


class NumberedBatches:
    """Numbers of the samples of each batch, from the ranges that a session leases.

    Args:
        samples: samples in one epoch.
        spec: the job, with its batch size and its seed. The last batch of a range may be smaller.
        lease: reports the lease with a number as done, and leases the next range.
        skip: skips a step, so that other sessions need not wait for this one while it has no range.

    Attributes:
        cursor: the session's position after the current batch; None if it has no batch.
    """

    def __init__(
        self,
        samples: int,
        spec: Job,
        lease: Callable[[int], Lease | NoRange],
        skip: Callable[[], object],
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._permuted: SampleOrder = ShuffledSamples(samples, spec.seed)
        self._spec, self._lease, self._skip, self._sleep = spec, lease, skip, sleep
        self.cursor: Cursor | None = None

    def __iter__(self) -> Iterator[np.ndarray]:
        done, leased = 0, False
        try:
            while True:
                answer = self._lease(done)
                done, self.cursor = 0, None
                if answer is NoRange.FINISHED:
                    if not leased:
                        _LOG.warning(no_data_left(self._spec))
                    return
                if isinstance(answer, NoRange):
                    if self._spec.consistency.needs_every_worker:
                        self._skip()
                    self._sleep(_ASK_AGAIN_S)
                    continue
                leased = True
                yield from self._of(answer)
                done = answer.number
        finally:
            self.cursor = None

    def _of(self, lease: Lease) -> Iterator[np.ndarray]:
        if lease.order != LATEST_ORDER:
            raise errors.WrongVersion(
                f"the job's data has order {lease.order}, and this version of Shoal knows {LATEST_ORDER} for sessions; "
                "use the coordinator's version of Shoal"
            )
        leased, consumed = lease.range, 0
        for numbers in cut(self._permuted.numbers(leased.epoch, leased.start, leased.stop), self._spec.batch_size):
            consumed += len(numbers)
            self.cursor = Cursor(lease.number, consumed)
            yield numbers


def no_data_left(spec: Job) -> str:
    """Returns the warning of a session that gets no batch, because all data of its job is done."""
    epochs = "1 epoch is" if spec.epochs == 1 else f"{spec.epochs} epochs are"
    return (
        f"session.batches yields nothing: job {spec.name} has no data left, {spec.epochs} of {epochs} done; to train "
        "on, ask for more epochs (epochs= of client.session) in a rerun"
    )


__all__ = ["NumberedBatches", "no_data_left"]
