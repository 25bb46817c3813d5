"""A session's access to the data of its job: the ranges of samples that it leases."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from shoal._session.batches import DataPosition, NumberedBatches, SampleRange
from shoal._session.job_access import JobAccess
from shoal._system import check_count
from shoal._training import Pipeline, PushResult
from shoal._wire import Lease, NoRange


class DataAccess(JobAccess):
    """The part of a session that concerns the samples that it trains on."""

    _batches: NumberedBatches | None  # the batches that the user's loop reads
    _position: DataPosition
    _parameters: Pipeline

    @property
    def batch_size(self) -> int:
        """The largest number of samples of a batch of `batches`."""
        return self._participant.spec.batch_size

    def skip(self) -> PushResult:
        """Skips this step."""
        raise NotImplementedError

    def batches(self, n_samples: int) -> Iterator[np.ndarray]:
        """Yields the numbers of the samples of each batch, until the sessions together have read all samples.

            for numbers in session.batches(len(images)):
                params = session.pull()
                loss, gradients = loss_and_gradients(params, images[numbers])
                session.push(gradients, weight=len(numbers))

        The coordinator leases ranges of the shuffled samples to the sessions. A range is done when its session asks for
        the next one. If a session is lost or leaves, another one reads its whole range; otherwise each sample is read
        once in an epoch. A session that closes without an error gives back only the samples after its last push. If the
        same session calls `batches` again, it continues after its last push. Checkpoints contain the position in the
        data as of the last push. If no data is left, this yields nothing and warns.

        Args:
            n_samples: samples in one epoch, 1 or more; the same for all sessions. The job's `epochs`, `batch_size`,
                `range_size` and `seed` apply.

        Yields:
            int64 arrays of at most `batch_size` numbers, each from 0 to `n_samples` - 1.

        Raises:
            InvalidJob: another session, or the checkpoint, has another number of samples.
            NonFiniteGradient, Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: see `push`.
        """
        samples = check_count("n_samples", n_samples, 1)
        with self._alive():
            self._batches = self._numbered(samples)
        return iter(self._batches)

    def ranges(self, n_samples: int) -> Iterator[SampleRange]:
        """Yields the ranges of samples that `batches` would read, each with its epoch and the numbers of its batches.

        Use it to load the batches of a range ahead:

            for leased in session.ranges(len(images)):
                for index, batch in enumerate(loaded_ahead(leased.batches)):
                    leased.begin(index)
                    session.push(gradients(session.pull(), batch), weight=len(batch))

        Args:
            n_samples: see `batches`.

        Yields:
            The ranges. A range is done when the next one is asked for, so do not ask ahead.

        Raises:
            InvalidJob, NonFiniteGradient, Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: see `batches`.
        """
        samples = check_count("n_samples", n_samples, 1)
        with self._alive():
            self._batches = self._numbered(samples)
        return self._batches.ranges()

    def _numbered(self, samples: int) -> NumberedBatches:
        lease = partial(self._lease, samples)
        return NumberedBatches(samples, self._participant.spec, lease, self.skip, self._position.pushed)

    def _lease(self, n_samples: int, done: int) -> Lease | NoRange:
        with self._alive(), self._times.timed("wait"):
            self._settle()
            # The updates of a range that is done are then in every later checkpoint. In synchronous mode, the ranges
            # depend only on the step.
            if self._participant.spec.consistency.joins_gradients:
                self._parameters.barrier()
            answer: Lease | NoRange = NoRange.FINISHED
            try:
                answer = self._participant.lease(done, n_samples)
            finally:
                self._times.await_range(answer is NoRange.WAIT)
            return answer


__all__ = ["DataAccess"]
