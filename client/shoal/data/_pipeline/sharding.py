"""The share of a process in a pipeline of batches."""

from collections.abc import Callable, Iterator

import numpy as np

from shoal import errors
from shoal._system import check_count
from shoal.data._pipeline.elements import Element, part_of
from shoal.data._pipeline.options import AutoShardPolicy
from shoal.data._pipeline.sources import Samples
from shoal.data._pipeline.splitting import part_bounds
from shoal.data._pipeline.stages import Batched, DataPipeline, PipelineStage, Prefetch


def shard(
    dataset: DataPipeline,
    processes: int,
    process: int,
    replicas: int = 1,
    *,
    first: int | None = None,
    in_sync: int | None = None,
) -> DataPipeline:
    """Returns the batches of one process, from a pipeline of batches for all replicas in sync.

    The policy is that of the pipeline's options. A batch of n samples is divided as evenly as possible: the sizes
    differ by at most 1, and the first parts are the larger ones.

    - DATA: a batch is divided between all replicas, and the process gets the parts of its own, so all processes
      together train on the same batches as one process would. It has no samples if the batch has too few.
    - FILE and OFF: the process reads its files, or all data. Each batch is divided into as many parts as there are
      processes, and all of them are batches of this process, one after the other. At each step, the processes together
      have as many samples as a batch.

    If the replicas of other processes are not in sync, no batch is divided between processes. With DATA, the process
    then gets every nth batch.

    Args:
        dataset: the pipeline, whose elements are batches.
        processes: number of processes.
        process: number of this process, from 0.
        replicas: number of replicas in this process.
        first: number of its first replica; None means that all processes have as many replicas.
        in_sync: number of replicas that take a step together; None means those of all processes.

    Raises:
        BadRequest: a number is out of range.
        InvalidData: the batches are smaller than the number of replicas, or the policy is FILE and the source has no
            files, or fewer than there are processes.
    """
    check_count("processes", processes, 1)
    check_count("replicas", replicas, 1)
    if check_count("process", process) >= processes:
        raise errors.BadRequest(f"process is {process}, but there are {processes} processes, counted from 0")
    together = processes * replicas if in_sync is None else in_sync
    start = process * replicas if first is None else first
    _check_size(dataset, together)
    policy = dataset.options.experimental_distribute.auto_shard_policy
    dataset = dataset.fresh()  # a process that has iterated it, to look at the data, keeps the order of the others
    if processes == 1:
        return dataset
    if policy is AutoShardPolicy.AUTO:
        enough = _files(dataset) >= processes
        policy = AutoShardPolicy.FILE if enough else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE:
        dataset = _on_files(dataset, processes, process)
    if together == replicas:
        whole = policy is not AutoShardPolicy.DATA
        return dataset if whole else _below_prefetch(dataset, lambda before: before.shard(processes, process))
    if policy is AutoShardPolicy.DATA:
        return _below_prefetch(dataset, lambda before: _OwnShare(before, together, start, replicas))
    return _below_prefetch(dataset, lambda before: _AllShares(before, processes, process))


class _OwnShare(PipelineStage):
    """The parts of one process's replicas of each batch."""

    def __init__(self, before: DataPipeline, parts: int, first: int, count: int) -> None:
        super().__init__(before)
        self._parts, self._first, self._own = parts, first, count

    def _elements(self) -> Iterator[Element]:
        for batch in self.before._elements():
            yield part_of(batch, lambda samples: part_bounds(samples, self._parts, self._first, self._own))


class _AllShares(PipelineStage):
    """All parts of each batch. Processes begin with different parts, so that their sizes add up at each step."""

    def __init__(self, before: DataPipeline, processes: int, process: int) -> None:
        super().__init__(before)
        self._processes, self._process = processes, process

    def _elements(self) -> Iterator[Element]:
        for batch in self.before._elements():
            for turn in range(self._processes):
                yield self._part(batch, (self._process + turn) % self._processes)

    def _count(self) -> float | None:
        before = self.before._count()
        return None if before is None else before * self._processes

    def _part(self, batch: Element, part: int) -> Element:
        return part_of(batch, lambda samples: part_bounds(samples, self._processes, part, 1))


def _below_prefetch(dataset: DataPipeline, divide: Callable[[DataPipeline], DataPipeline]) -> DataPipeline:
    """Divides the batches before a final `prefetch`: its thread then computes only what the process needs."""
    if isinstance(dataset, Prefetch):
        return dataset.over(_below_prefetch(dataset.before, divide))
    return divide(dataset)


def _check_size(dataset: DataPipeline, replicas: int) -> None:
    size = _batch_size(dataset)
    if size is not None and size < replicas:
        raise errors.InvalidData(
            f"a batch has {size} samples, but {replicas} replicas share it; give batch(n) with n of at least "
            f"{replicas}: it is the size for all replicas together"
        )


def _batch_size(dataset: DataPipeline) -> int | None:
    """Returns the size of the batches, or None if no stage `batch` made them."""
    while not isinstance(dataset, Batched):
        if not isinstance(dataset, PipelineStage):
            return None
        dataset = dataset.before
    return dataset.size


def _starts(dataset: DataPipeline) -> np.ndarray:
    """Returns the number of the first sample of each file, and the number of all samples; empty without files."""
    while isinstance(dataset, PipelineStage):
        dataset = dataset.before
    source = dataset.dataset if isinstance(dataset, Samples) else None
    found: np.ndarray = getattr(source, "file_starts", np.empty(0, np.int64))
    return found


def _files(dataset: DataPipeline) -> int:
    return max(0, len(_starts(dataset)) - 1)


def _on_files(dataset: DataPipeline, processes: int, process: int) -> DataPipeline:
    """Returns the same stages over every nth file."""
    if isinstance(dataset, PipelineStage):
        return dataset.over(_on_files(dataset.before, processes, process))
    starts, files = _starts(dataset), _files(dataset)
    if files < processes or not isinstance(dataset, Samples):
        has = f"has {files} files, which are too few for {processes} processes" if files else "does not read files"
        raise errors.InvalidData(
            f"the policy is AutoShardPolicy.FILE, but the source of the pipeline {has}; use AutoShardPolicy.DATA or "
            "AUTO, or write more files"
        )
    return dataset.within((int(starts[file]), int(starts[file + 1])) for file in range(process, files, processes))


__all__ = ["shard"]
