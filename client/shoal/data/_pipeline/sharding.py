"""The share of a process in a pipeline of batches."""

from collections.abc import Iterator

import numpy as np

from shoal import errors
from shoal._system import check_count
from shoal.data._pipeline.elements import Element, part_of
from shoal.data._pipeline.options import AutoShardPolicy
from shoal.data._pipeline.sources import Samples
from shoal.data._pipeline.splitting import part_bounds
from shoal.data._pipeline.stages import Batched, DataPipeline, PipelineStage, Prefetch


def shard(dataset: DataPipeline, processes: int, process: int, replicas: int = 1) -> DataPipeline:
    """Returns the batches of one process, from a pipeline of batches for all processes together.

    The policy is that of the pipeline's options. A batch of n samples is divided between all replicas of all processes
    as evenly as possible: the sizes differ by at most 1, and the first replicas have the larger parts.

    - DATA: a batch of the process is its part of a batch, so all processes together train on the same batches as one
      process would. It has no samples if the batch has too few.
    - FILE and OFF: the process reads its files, or all data. Each batch is divided into as many parts as there are
      processes, and all of them are batches of this process, one after the other. At each step, the processes together
      have as many samples as a batch.

    Args:
        dataset: the pipeline, whose elements are batches.
        processes: number of processes.
        process: number of this process, from 0.
        replicas: number of replicas in each process.

    Raises:
        BadRequest: a number is out of range.
        InvalidData: the batches are smaller than the number of replicas, or the policy is FILE and the source has no
            files, or fewer than there are processes.
    """
    check_count("processes", processes, 1)
    check_count("replicas", replicas, 1)
    if check_count("process", process) >= processes:
        raise errors.BadRequest(f"process is {process}, but there are {processes} processes, counted from 0")
    size = _batch_size(dataset)
    if size is not None and size < processes * replicas:
        raise errors.InvalidData(
            f"a batch has {size} samples, but {processes * replicas} replicas share it ({replicas} in each of "
            f"{processes} processes); give batch(n) with n of at least {processes * replicas}: it is the size for all "
            "replicas together"
        )
    policy = dataset.options.experimental_distribute.auto_shard_policy
    dataset = dataset.fresh()  # a process that has iterated it, to look at the data, keeps the order of the others
    if processes == 1:
        return dataset
    if policy is AutoShardPolicy.AUTO:
        enough = _files(dataset) >= processes
        policy = AutoShardPolicy.FILE if enough else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE:
        dataset = _on_files(dataset, processes, process)
    return _below_prefetch(dataset, policy is AutoShardPolicy.DATA, processes, process, replicas)


class _OwnShare(PipelineStage):
    """The part of one process of each batch."""

    def __init__(self, before: DataPipeline, processes: int, process: int, replicas: int) -> None:
        super().__init__(before)
        self._processes, self._process, self._replicas = processes, process, replicas

    def _elements(self) -> Iterator[Element]:
        for batch in self.before._elements():
            yield self._part(batch, self._process)

    def _part(self, batch: Element, process: int) -> Element:
        parts, first = self._processes * self._replicas, process * self._replicas
        return part_of(batch, lambda samples: part_bounds(samples, parts, first, self._replicas))


class _AllShares(_OwnShare):
    """All parts of each batch. Processes begin with different parts, so that their sizes add up at each step."""

    def _elements(self) -> Iterator[Element]:
        for batch in self.before._elements():
            for turn in range(self._processes):
                yield self._part(batch, (self._process + turn) % self._processes)

    def _count(self) -> float | None:
        before = self.before._count()
        return None if before is None else before * self._processes


def _below_prefetch(dataset: DataPipeline, one: bool, processes: int, process: int, replicas: int) -> DataPipeline:
    """Adds the division, before a final `prefetch`: its thread then computes only what the process needs."""
    if isinstance(dataset, Prefetch):
        return dataset.over(_below_prefetch(dataset.before, one, processes, process, replicas))
    return (_OwnShare if one else _AllShares)(dataset, processes, process, replicas)


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
