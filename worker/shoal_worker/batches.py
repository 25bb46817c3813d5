"""Which examples come next: leased ranges of an epoch's seeded permutation, cut into batches."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import numpy as np

from shoal._participant import DataRange, NoRange


class Batches(ABC):
    """A source of batches."""

    @property
    @abstractmethod
    def in_hand(self) -> bool:
        """Whether `take` has a batch to give without a lease."""

    @abstractmethod
    def lease(self) -> NoRange | None:
        """Gets the next batches, giving back those that are trained on; None, or why there are none."""

    @abstractmethod
    def take(self) -> np.ndarray | None:
        """The numbers of the next batch's examples, int64; None where the program makes its own batches."""


class LeasedBatches(Batches):
    """Batches of the ranges that the coordinator leases, in order.

    Every worker draws the same permutation of an epoch from (seed, epoch) alone, so a range means the same examples
    whoever trains on it.

    Args:
        examples: of one pass.
        batch_size: examples; the last batch of a range may have fewer.
        seed: of the job.
        lease: asks the coordinator, `Participant.lease`.
    """

    def __init__(self, examples: int, batch_size: int, seed: int, lease: Callable[[int], DataRange | NoRange]) -> None:
        self._examples, self._batch_size, self._seed = examples, batch_size, seed
        self._ask = lease
        self._held: int = 0  # lease of the range in hand; 0: none
        self._queue: deque[np.ndarray] = deque()  # what is left of that range
        self._epoch: int | None = None  # that _permutation belongs to
        self._permutation = np.empty(0, np.int64)

    @property
    def in_hand(self) -> bool:
        return bool(self._queue)

    def lease(self) -> NoRange | None:
        answer = self._ask(self._held)
        self._held = 0
        if isinstance(answer, NoRange):
            return answer
        self._held = answer.lease
        numbers = self._permutation_of(answer.epoch)[answer.start : answer.stop]
        self._queue.extend(
            numbers[start : start + self._batch_size] for start in range(0, len(numbers), self._batch_size)
        )
        return None

    def take(self) -> np.ndarray | None:
        return self._queue.popleft()

    def _permutation_of(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            key = np.array([self._seed, epoch], np.uint64)
            self._permutation = np.random.Generator(np.random.Philox(key=key)).permutation(self._examples)
            self._epoch = epoch
        return self._permutation


class NoBatches(Batches):
    """For programs without a data set: there is always one more step to take, with no examples."""

    @property
    def in_hand(self) -> bool:
        return True

    def lease(self) -> NoRange | None:
        return None

    def take(self) -> np.ndarray | None:
        return None


__all__ = ["Batches", "LeasedBatches", "NoBatches"]
