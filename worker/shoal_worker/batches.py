"""Sources of batches: leased ranges of an epoch's order, cut into batches and read ahead."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import errors
from shoal._wire import LATEST_ORDER, Cursor, Lease, NoRange
from shoal.data._reading import PermutedSamples, SampleOrder, ShuffledBlocks, ShuffledSamples, cut
from shoal.data._reading.batches import read
from shoal.data._reading.prefetcher import Prefetcher
from shoal.program import DEFAULT_PREFETCH, Blocks, Dataset, RandomDataset
from shoal_worker.batch_seeds import epoch_seed

# The orders of single samples, by their version. The order of blocks is the same in both.
_ORDERS: dict[int, Callable[[int, int], SampleOrder]] = {0: PermutedSamples, 1: ShuffledSamples}


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one step.

    Attributes:
        data: the data set's batch; None if the program makes its own batches.
        samples: number of samples.
        cursor: the worker's position after training on it; None if no data is leased.
        place: its epoch, and the place of its first sample in that epoch's order; None if no data is leased.
    """

    data: Any
    samples: int
    cursor: Cursor | None = None
    place: tuple[int, int] | None = None


class Batches(ABC):
    """A source of batches.

    Attributes:
        batch_size: samples of a batch; the last one of a range may have fewer. 0 if the program makes its own batches.
    """

    batch_size = 0

    @property
    @abstractmethod
    def has_next(self) -> bool:
        """Returns whether `take` has a batch without another lease."""

    @property
    @abstractmethod
    def cursor(self) -> Cursor | None:
        """Returns the position in the leased range; None if nothing is leased."""

    @abstractmethod
    def lease(self) -> NoRange | None:
        """Leases the next range and reports the last one as done. Returns the reason if there is no range."""

    @abstractmethod
    def take(self) -> Batch:
        """Returns the next batch. Raises the data set's error if reading this batch failed."""

    @abstractmethod
    def close(self) -> None:
        """Stops reading."""


class LeasedBatches(Batches):
    """Batches of the ranges that the coordinator leases, in order.

    Every worker draws the same order of an epoch from the seed, so a range has the same samples on every worker.
    Reading ahead stays within the leased range and ends with `close`. A random data set gets the seed of its epoch.

    Args:
        dataset: the program's data set, with at least one sample.
        batch_size: samples; the last batch of a range may have fewer.
        seed: the job's seed.
        lease: asks the coordinator for a range: `Participant.lease`.
        prepare: called once on the reading thread, before it reads.

    Raises:
        ProgramError: the data set's `blocks` or `prefetch` are invalid.
    """

    def __init__(
        self,
        dataset: Dataset | RandomDataset,
        batch_size: int,
        seed: int,
        lease: Callable[[int], Lease | NoRange],
        *,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._dataset, self.batch_size, self._seed = dataset, batch_size, seed
        self._order, self._order_version = order_of(dataset, seed), LATEST_ORDER
        prefetch_of(dataset)  # raises early if it is invalid
        self._request_lease = lease
        self._prepare = prepare
        self._lease: int = 0  # number of the current lease; 0 if there is none
        self._start: tuple[int, int] = (0, 0)  # epoch, and the place in its order at which the range begins
        self._consumed: int = 0  # samples of the range
        self._samples: deque[int] = deque()  # of each remaining batch of the range
        self._reading: Iterator[Any] = iter(())  # the remaining batches

    @property
    def has_next(self) -> bool:
        return bool(self._samples)

    @property
    def cursor(self) -> Cursor | None:
        return Cursor(self._lease, self._consumed) if self._lease else None

    def lease(self) -> NoRange | None:
        self.close()
        answer = self._request_lease(self._lease)
        self._lease = 0
        if isinstance(answer, NoRange):
            return answer
        if answer.order != self._order_version:  # a job from before the latest version
            self._order = order_of(self._dataset, self._seed, answer.order)
            self._order_version = answer.order
        leased = answer.range
        self._lease, self._start, self._consumed = answer.number, (leased.epoch, leased.start), 0
        size, samples = self.batch_size, leased.samples
        self._samples.extend(min(size, samples - start) for start in range(0, samples, size))
        if samples:
            self._read(leased.epoch, cut(self._order.numbers(leased.epoch, leased.start, leased.stop), size))
        return None

    def take(self) -> Batch:
        samples = self._samples.popleft()
        try:
            data = next(self._reading)
        except StopIteration:
            left = len(self._samples) + 1
            raise errors.ProgramError(
                f"the data set's batches() ended {left} batches early; it must yield one for each item of its plan"
            ) from None
        epoch, start = self._start
        place = epoch, start + self._consumed
        self._consumed += samples
        return Batch(data, samples, self.cursor, place)

    def close(self) -> None:
        self._samples.clear()
        close = getattr(self._reading, "close", None)
        self._reading = iter(())
        if close is not None:
            with suppress(Exception):  # an unfinished generator; its error concerns no step
                close()

    def _read(self, epoch: int, plan: Iterable[np.ndarray]) -> None:
        seed = epoch_seed(self._seed, epoch)
        self._reading = ahead_of(self._dataset, plan, seed=seed, prepare=self._prepare)


class NoBatches(Batches):
    """Batches of programs without a data set: there is always one more, with no samples."""

    @property
    def has_next(self) -> bool:
        return True

    @property
    def cursor(self) -> None:
        return None

    def lease(self) -> NoRange | None:
        return None

    def take(self) -> Batch:
        return Batch(None, 0)

    def close(self) -> None:
        """Does nothing: there is nothing to read."""


def order_of(dataset: Dataset | RandomDataset, seed: int, version: int = LATEST_ORDER) -> SampleOrder:
    """Returns the data set's order: of its blocks if it has any, otherwise of single samples.

    Args:
        dataset: the data set.
        seed: the job's seed.
        version: version of the order, as `LedgerRecord.order` describes it.

    Returns:
        The order.

    Raises:
        ProgramError: the blocks do not add up to all samples, or the data set has no `batches` method.
        WrongVersion: this version of Shoal does not know the version of the order.
    """
    if version not in _ORDERS:
        raise errors.WrongVersion(
            f"the job's data has order {version}, but this worker knows only the orders up to {LATEST_ORDER}; start "
            "workers of the coordinator's version of Shoal"
        )
    blocks, samples = getattr(dataset, "blocks", None), len(dataset)
    if not isinstance(blocks, Blocks):
        return _ORDERS[version](samples, seed)
    kind = type(dataset).__name__
    if blocks.samples != samples:
        raise errors.ProgramError(
            f"data set {kind} has {blocks.samples} samples in its blocks, but its len() is {samples}; make them equal"
        )
    if not callable(getattr(dataset, "batches", None)):
        raise errors.ProgramError(f"data set {kind} has blocks, but no batches(plan); see shoal.program.BlockDataset")
    return ShuffledBlocks(blocks, seed)


def prefetch_of(dataset: Dataset | RandomDataset) -> int:
    """Returns the number of batches to read ahead. A method named `prefetch` is ignored.

    Raises:
        ProgramError: `prefetch` is not an integer >= 0.
    """
    wish = getattr(dataset, "prefetch", DEFAULT_PREFETCH)
    if callable(wish):
        return DEFAULT_PREFETCH
    if isinstance(wish, bool) or not isinstance(wish, int) or wish < 0:
        raise errors.ProgramError(
            f"`prefetch` of data set {type(dataset).__name__} is {wish!r}; "
            "give the number of batches to read ahead as an integer, or 0 to read each when it is needed"
        )
    return wish


def ahead_of(
    dataset: Dataset | RandomDataset,
    plan: Iterable[np.ndarray],
    *,
    seed: int | None = None,
    prepare: Callable[[], object] = lambda: None,
) -> Generator[Any, None, None] | Prefetcher[Any]:
    """Reads the batches of a plan, ahead of their use unless the data set's `prefetch` is 0.

    Args:
        dataset: the data set to read.
        plan: the sample numbers of each batch.
        seed: seed of a random data set; None reads it without one.
        prepare: called once on the reading thread, before it reads.

    Returns:
        The batches, in the order of the plan.

    Raises:
        ProgramError: the data set's `prefetch` is invalid.
    """
    ahead, reading = prefetch_of(dataset), read(dataset, plan, seed)
    return Prefetcher(reading, ahead, prepare=prepare) if ahead else reading


__all__ = ["Batch", "Batches", "LeasedBatches", "NoBatches", "ahead_of", "order_of", "prefetch_of"]
