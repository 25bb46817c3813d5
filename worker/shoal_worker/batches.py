"""Which samples come next, and their reading: leased ranges of an epoch's order, cut into batches, read ahead."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import errors
from shoal._wire import Cursor, Lease, NoRange
from shoal.data._reading import SampleOrder, ShuffledBlocks, ShuffledSamples, cut
from shoal.data._reading.batches import read
from shoal.data._reading.prefetcher import Prefetcher
from shoal.program import DEFAULT_PREFETCH, Blocks, Dataset, RandomDataset
from shoal_worker.batch_seeds import epoch_seed


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes on.

    Attributes:
        data: what the data set gave; None where the program makes its own batches.
        samples: samples in it.
        cursor: where a worker is that has trained on it; None where no data is leased.
        place: its epoch, and the place of its first sample in that epoch's order; None where no data is leased.
    """

    data: Any
    samples: int
    cursor: Cursor | None = None
    place: tuple[int, int] | None = None


class Batches(ABC):
    """A source of batches.

    Attributes:
        batch_size: samples of a batch, of which a range's last may have fewer; 0: the program makes its own.
    """

    batch_size = 0

    @property
    @abstractmethod
    def in_hand(self) -> bool:
        """Whether `take` has a batch to give without a lease."""

    @property
    @abstractmethod
    def cursor(self) -> Cursor | None:
        """How much of the leased range was taken; None: nothing is leased."""

    @abstractmethod
    def lease(self) -> NoRange | None:
        """Gets the next batches, giving back those that are trained on; None, or why there are none."""

    @abstractmethod
    def take(self) -> Batch:
        """The next batch; raises what the data set raised when it read this one."""

    @abstractmethod
    def close(self) -> None:
        """Reads no more."""


class LeasedBatches(Batches):
    """Batches of the ranges that the coordinator leases, in order.

    Every worker draws the same order of an epoch from the seed, so a range means the same samples whoever has it.
    What is read ahead is of the range in hand: nothing that is not leased, and nothing after `close`. A data set that
    takes a seed is given its epoch's.

    Args:
        dataset: of the program, with one sample at least.
        batch_size: samples; the last batch of a range may have fewer.
        seed: of the job.
        lease: asks the coordinator, `Participant.lease`.
        prepare: called on the thread that reads, before it does.

    Raises:
        ProgramError: the data set's `blocks` or `prefetch` make no sense.
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
        self._order = order_of(dataset, seed)
        prefetch_of(dataset)  # says now what is wrong with it
        self._ask = lease
        self._prepare = prepare
        self._held: int = 0  # lease of the range in hand; 0: none
        self._start: tuple[int, int] = (0, 0)  # epoch, and where in its order that range begins
        self._taken: int = 0  # samples of it
        self._samples: deque[int] = deque()  # of the batches that are left of that range
        self._reading: Iterator[Any] = iter(())  # those batches

    @property
    def in_hand(self) -> bool:
        return bool(self._samples)

    @property
    def cursor(self) -> Cursor | None:
        return Cursor(self._held, self._taken) if self._held else None

    def lease(self) -> NoRange | None:
        self.close()
        answer = self._ask(self._held)
        self._held = 0
        if isinstance(answer, NoRange):
            return answer
        leased = answer.range
        self._held, self._start, self._taken = answer.number, (leased.epoch, leased.start), 0
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
                f"the data set's batches() ended with {left} still to come; it must give one for each item of its plan"
            ) from None
        epoch, start = self._start
        place = epoch, start + self._taken
        self._taken += samples
        return Batch(data, samples, self.cursor, place)

    def close(self) -> None:
        self._samples.clear()
        close = getattr(self._reading, "close", None)
        self._reading = iter(())
        if close is not None:
            with suppress(Exception):  # of a generator that is not finished: nobody waits for what it says
                close()

    def _read(self, epoch: int, plan: Iterable[np.ndarray]) -> None:
        seed = epoch_seed(self._seed, epoch)
        self._reading = ahead_of(self._dataset, plan, seed=seed, prepare=self._prepare)


class NoBatches(Batches):
    """For programs without a data set: there is always one more step to take, with no samples."""

    @property
    def in_hand(self) -> bool:
        return True

    @property
    def cursor(self) -> None:
        return None

    def lease(self) -> NoRange | None:
        return None

    def take(self) -> Batch:
        return Batch(None, 0)

    def close(self) -> None:
        """There is nothing to read."""


def order_of(dataset: Dataset | RandomDataset, seed: int) -> SampleOrder:
    """The order that suits the data set: of its blocks if it says which, else of single samples.

    Raises:
        ProgramError: its blocks are not all of its samples, or it has no `batches` to read them by.
    """
    blocks, samples = getattr(dataset, "blocks", None), len(dataset)
    if not isinstance(blocks, Blocks):
        return ShuffledSamples(samples, seed)
    kind = type(dataset).__name__
    if blocks.samples != samples:
        raise errors.ProgramError(
            f"the blocks of data set {kind} are {blocks.samples} samples, and len() says {samples}; make them agree"
        )
    if not callable(getattr(dataset, "batches", None)):
        raise errors.ProgramError(f"data set {kind} has blocks, but no batches(plan); see shoal.program.BlockDataset")
    return ShuffledBlocks(blocks, seed)


def prefetch_of(dataset: Dataset | RandomDataset) -> int:
    """How many batches to read ahead.

    Raises:
        ProgramError: `prefetch` is no whole number, 0 or more. A method of that name means something else.
    """
    wish = getattr(dataset, "prefetch", DEFAULT_PREFETCH)
    if callable(wish):
        return DEFAULT_PREFETCH
    if isinstance(wish, bool) or not isinstance(wish, int) or wish < 0:
        raise errors.ProgramError(
            f"`prefetch` of data set {type(dataset).__name__} is {wish!r}; "
            "give the batches to read ahead as a whole number, or 0 to read each in turn"
        )
    return wish


def ahead_of(
    dataset: Dataset | RandomDataset,
    plan: Iterable[np.ndarray],
    *,
    seed: int | None = None,
    prepare: Callable[[], object] = lambda: None,
) -> Generator[Any, None, None] | Prefetcher[Any]:
    """The batch of each item of a plan, read in the way that suits the data set, ahead if it is not against it.

    Args:
        dataset: to be read.
        plan: numbers of samples, a batch an item.
        seed: for a data set that takes one; None: it is read as it is.
        prepare: called on the thread that reads, before it does.

    Raises:
        ProgramError: its `prefetch` makes no sense.
    """
    ahead, reading = prefetch_of(dataset), read(dataset, plan, seed)
    return Prefetcher(reading, ahead, prepare=prepare) if ahead else reading


__all__ = ["Batch", "Batches", "LeasedBatches", "NoBatches", "ahead_of", "order_of", "prefetch_of"]
