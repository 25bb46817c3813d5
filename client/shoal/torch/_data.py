"""A loader of batches whose samples the workers of a job divide among themselves."""

import math
from collections.abc import Iterator, Sized
from typing import Any, Protocol, cast

import numpy as np
import torch.utils.data

from shoal import errors
from shoal._adapters import EpochRanges
from shoal._session.batches import SampleRange
from shoal._system import check_count
from shoal.session import Session
from shoal.torch._optimizer import DistributedOptimizer
from shoal.torch._session import ModelSession


class _Position(Protocol):
    """What is told which batches are loaded."""

    def begin_batch(self, samples: int) -> None: ...

    def end_range(self) -> None: ...


class _RangeSampler(torch.utils.data.Sampler[list[int]]):
    """The batches of one leased range."""

    def __init__(self) -> None:
        self.batches: list[np.ndarray] = []

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class DataLoader:
    """Batches of a data set, in place of a `torch.utils.data.DataLoader` with a `DistributedSampler`.

        loader = shoal.torch.DataLoader(dataset, 64, session=optimizer, num_workers=2)
        for epoch in range(10):
            for x, y in loader:
                ...

    Each iteration is one epoch. The coordinator leases ranges of the shuffled samples to the workers, so a slow worker
    gets fewer, and the ranges of a worker that is lost go to the others. Give the number of epochs and the batch size
    to the optimizer or session (`epochs`, `batch_size`). The weight of each push is the number of samples of the batch.
    If a loop ends early, for example by `break`, the next iteration continues the same epoch. After a resume, the first
    iteration is the rest of an epoch. If no epoch is left, an iteration yields nothing.

    Take the step of a batch before you take the next batch: the push says which samples were trained on. A loop that
    takes batches ahead needs a plain `torch.utils.data.DataLoader` with a sampler. If a step takes several batches,
    give `accumulate`. Without it, the samples of these batches add up, but if the worker is lost, those before the end
    of a range are not trained on.

    Args:
        dataset: a data set with a length, whose samples have numbers.
        batch_size: samples of a batch. It must be the batch size of the job, which is the default.
        session: the optimizer, the `ModelSession` or the `shoal.Session` that trains on the batches.
        shuffle: always true: the job's seed gives the order.
        accumulate: number of parts in which each batch of the job is loaded, 1 or more. Give the number of backward
            passes for each step, whose gradients add up, and the samples of all of them as the job's batch size. A
            batch with fewer samples has as many parts as samples.
        options: `num_workers`, `collate_fn`, `pin_memory`, `timeout`, `worker_init_fn`, `multiprocessing_context`,
            `generator`, `prefetch_factor` or `pin_memory_device` of `torch.utils.data.DataLoader`. Batches are loaded
            ahead within a range.

    Raises:
        InvalidData: the data set has no length, or no samples.
        BadRequest: the batch size is not that of the job, or an option cannot be used here.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        session: DistributedOptimizer | ModelSession | Session,
        shuffle: bool = True,
        accumulate: int = 1,
        **options: Any,
    ) -> None:
        self._samples = _length(dataset)
        self._session = session if isinstance(session, Session) else session.session
        self._position = None if isinstance(session, Session) else cast("_Position", session)
        if batch_size not in (None, self._session.batch_size):
            raise errors.BadRequest(
                f"batch_size is {batch_size}, and that of job {self._session.job} is {self._session.batch_size}; give "
                "batch_size to the optimizer or session, too"
            )
        _check_options(shuffle, options)
        self.dataset, self._sampler = dataset, _RangeSampler()
        self._parts = check_count("accumulate", accumulate, 1)
        keeps = options.get("num_workers", 0) > 0
        self._loader: Any = torch.utils.data.DataLoader(
            dataset, batch_sampler=self._sampler, persistent_workers=keeps, **options
        )
        self._epochs = EpochRanges()

    def __iter__(self) -> Iterator[Any]:
        for leased in self._epochs.of_one(lambda: self._session.ranges(self._samples)):
            yield from self._loaded(leased)
            if self._position:
                self._position.end_range()

    @property
    def epoch(self) -> int:
        """Number of the epoch of the job that was read last, from 0."""
        return self._epochs.epoch

    def __len__(self) -> int:
        """Returns about how many batches, or parts of them, each worker gets in an epoch, if all are equally fast."""
        return self._parts * math.ceil(self._samples / (self._session.batch_size * self._session.workers))

    def _loaded(self, leased: SampleRange) -> Iterator[Any]:
        parts = [np.array_split(it, min(self._parts, len(it))) for it in leased.batches]
        self._sampler.batches = [part for its in parts for part in its]
        whole = [index for index, its in enumerate(parts) for _ in its]  # by part, the index of its batch
        for index, part_numbers, part in zip(whole, self._sampler.batches, self._loader, strict=True):
            leased.begin(index)
            if self._position:
                self._position.begin_batch(len(part_numbers))
            yield part


def _length(dataset: Any) -> int:
    if isinstance(dataset, torch.utils.data.IterableDataset) or not isinstance(dataset, Sized):
        raise errors.InvalidData(
            f"{type(dataset).__name__} has no length, so the workers cannot divide its samples; give a data set with "
            "__len__ and __getitem__, or divide a stream yourself by session.rank"
        )
    if not (samples := len(dataset)):
        raise errors.InvalidData(f"{type(dataset).__name__} has no samples; give a data set with some")
    return samples


def _check_options(shuffle: bool, options: dict[str, Any]) -> None:
    if not shuffle:
        raise errors.BadRequest("shuffle is False, and a job reads its samples in a shuffled order; leave it out")
    for name in ("sampler", "batch_sampler", "drop_last", "persistent_workers"):
        if options.pop(name, None):
            raise errors.BadRequest(f"{name} cannot be used here: the coordinator leases the samples; leave it out")


__all__ = ["DataLoader"]
