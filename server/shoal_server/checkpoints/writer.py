"""Checkpoint writer: background threads that write shards to files, and the layout of arenas in files."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import structlog

from shoal import errors
from shoal._checkpoint import (
    VALUE,
    CheckpointStorage,
    FileEntry,
    Rows,
    SavedVariables,
    TensorHeader,
    no_storage_message,
    path_of,
    tensor_name,
    write_tensors,
)
from shoal._wire import ArenaLayout, Slice, row_elements
from shoal.variables import Variable
from shoal_server.shards import Arena, ShardSnapshot

_log = structlog.get_logger(__name__)

# Jobs whose checkpoints are written in parallel. More would share the same disk; with a single thread, one write that
# hangs would block all jobs.
_THREADS = 4
# Jobs that are restored in parallel. A restore that hangs keeps its thread until the storage answers.
_RESTORES = 8


@dataclass(eq=False, slots=True)
class _WriteTask:
    """This server's part of one checkpoint.

    Attributes:
        waiting: snapshots that are not written yet. The thread that sets `begun` ends them. If no thread has set
            `begun`, the thread that sets `abandoned` ends them.
        outcome: the files, or the error.
        begun: a thread has started to write it. Guarded by the writer's lock.
        abandoned: the result is no longer needed. Guarded by the writer's lock.
    """

    job: str
    number: int
    cut: int
    variables: Mapping[str, Variable]
    waiting: list[ShardSnapshot]
    outcome: Future[list[FileEntry] | errors.ShoalError] = field(default_factory=Future)
    begun: bool = False
    abandoned: bool = False


class CheckpointWriter:
    """Writes shards in the background: the checkpoints of one job in sequence, those of several jobs in parallel.

    It keeps only the latest checkpoint of each job. A coordinator begins the next one only after it is done with the
    one before. So the writer abandons the earlier checkpoint when a new one begins, or when the shards are dropped.

    Args:
        storage: checkpoint storage; None means that this server has none.
        name: this server's name, for messages.

    Attributes:
        restore_threads: threads for restores alone, because a restore blocks its thread while the storage hangs.
    """

    def __init__(self, storage: CheckpointStorage | None, name: str = "") -> None:
        self._storage, self._owner = storage, f"server {name}" if name else "this server"
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoints")
        self.restore_threads = ThreadPoolExecutor(_RESTORES, thread_name_prefix="restores")
        self._lock = threading.Lock()  # guards all below; no other lock is taken under it
        self._tasks: dict[str, _WriteTask] = {}  # by job; the latest
        self._served: set[str] = set()  # jobs that a thread serves or is queued for

    @property
    def storage(self) -> CheckpointStorage:
        """The checkpoint storage.

        Raises:
            StorageFailed: this server has none.
        """
        if self._storage is None:
            raise no_storage_message(self._owner)
        return self._storage

    def begin(
        self, job: str, number: int, cut: int, variables: Mapping[str, Variable], snapshots: Sequence[ShardSnapshot]
    ) -> None:
        """Starts to write a job's shards, and abandons the job's earlier checkpoint.

        Each snapshot is ended once it is written.

        Args:
            job: name of the job.
            number: number of the checkpoint.
            cut: number of the cut; part of the file names. A resubmitted job may reuse a checkpoint number. The cut
                keeps its files apart from files that the earlier job wrote late.
            variables: the job's variables, by name.
            snapshots: snapshots of the shards, being saved.
        """
        with self._lock:
            earlier = self._take_out(job)
            self._tasks[job] = _WriteTask(job, number, cut, variables, [*snapshots])
            if job not in self._served:
                self._served.add(job)
                self._threads.submit(self._serve, job)
        if earlier:
            _abandon(earlier)

    def drop(self, job: str) -> None:
        """Abandons a job's unwritten checkpoint. A file that is being written is still completed."""
        with self._lock:
            task = self._take_out(job)
        if task:
            _abandon(task)

    def clear(self) -> None:
        """Abandons the checkpoints of all jobs."""
        with self._lock:
            jobs = [*self._tasks]
        for job in jobs:
            self.drop(job)

    def collect(self, job: str, number: int, *, within_s: float) -> list[FileEntry] | None:
        """Returns the files of a checkpoint.

        Args:
            job: name of the job.
            number: number of the checkpoint.
            within_s: longest wait, in seconds.

        Returns:
            The files; None if they are not written yet.

        Raises:
            StorageFailed: they could not be written.
            UnknownCheckpoint: another checkpoint was begun here since, or none.
            Cancelled: the checkpoint was abandoned.
        """
        with self._lock:
            task = self._tasks.get(job)
        if task is None or task.number != number:
            raise errors.UnknownCheckpoint(f"checkpoint {number} of {job} was not begun here, or was abandoned")
        try:
            outcome = task.outcome.result(within_s)
        except TimeoutError:
            return None
        if isinstance(outcome, errors.ShoalError):
            raise outcome.with_traceback(None)
        return outcome

    def close(self) -> None:
        """Cancels the checkpoints that have not begun, and waits for the others."""
        for threads in (self._threads, self.restore_threads):
            threads.shutdown(wait=True, cancel_futures=True)

    def _take_out(self, job: str) -> _WriteTask | None:
        """Abandons a job's checkpoint; returns it if the caller must end it. Called with the lock held."""
        task = self._tasks.pop(job, None)
        if task is None:
            return None
        task.abandoned = True
        return None if task.begun else task

    def _serve(self, job: str) -> None:
        """Writes the checkpoints of a job until none is left."""
        while True:
            with self._lock:
                task = self._tasks.get(job)
                if task is None or task.begun:
                    self._served.remove(job)
                    return
                task.begun = True
            try:
                task.outcome.set_result(self._written(task))
            except Exception as error:  # a defect; `collect` raises it
                _log.exception("a checkpoint could not be written", job=job, number=task.number)
                task.outcome.set_exception(error.with_traceback(None))

    def _written(self, task: _WriteTask) -> list[FileEntry] | errors.ShoalError:
        entries = []
        try:
            while task.waiting:
                if self._is_abandoned(task):
                    raise _abandoned_error(task)
                entries.append(self._write(task, task.waiting[0]))
                task.waiting.pop(0).end_saving()
        except errors.ShoalError as error:
            _log.warning("a checkpoint could not be written", job=task.job, number=task.number, why=error.message)
            # Returned, not raised: a traceback would keep a copy of the shards in memory.
            return error.with_traceback(None)
        finally:
            _end(task)
        return entries

    def _write(self, task: _WriteTask, snapshot: ShardSnapshot) -> FileEntry:
        shard = snapshot.layout.shard
        path = (*path_of(task.job, task.number), f"shard-{shard:05}-{task.cut}.safetensors")
        metadata = {"job": task.job, "shard": str(shard), "version": str(snapshot.version)}
        return write_tensors(self.storage, path, _tensors(snapshot, task.variables), _data(snapshot), metadata)

    def _is_abandoned(self, task: _WriteTask) -> bool:
        with self._lock:
            return task.abandoned


def _end(task: _WriteTask) -> None:
    while task.waiting:
        task.waiting.pop().end_saving()


def _abandon(task: _WriteTask) -> None:
    _end(task)
    task.outcome.set_result(_abandoned_error(task))


def _abandoned_error(task: _WriteTask) -> errors.Cancelled:
    return errors.Cancelled(
        f"checkpoint {task.number} of {task.job} was abandoned: its shards were dropped, or another was begun"
    )


def load(saved: SavedVariables, arena: Arena, variables: Mapping[str, Variable], *, slots: bool = True) -> None:
    """Fills an arena with the saved values of its slices and, by default, of their slots.

    Args:
        saved: the checkpoint's variables.
        arena: the arena to fill.
        variables: the job's variables, by name.
        slots: whether to restore the slots, too; otherwise they stay as they are.

    Raises:
        CorruptCheckpoint: a file is damaged.
    """
    arrays = {VALUE: arena.values, **(arena.slots if slots else {})}
    wanted: list[Rows] = []
    for part in arena.layout.slices:
        start, stop = _extent(part, variables[part.variable])
        kinds = saved.kinds(part.variable)
        wanted += [
            (kind, part.variable, part.row_start, array[start:stop]) for kind, array in arrays.items() if kind in kinds
        ]
    saved.read(*wanted)


def _tensors(snapshot: ShardSnapshot, variables: Mapping[str, Variable]) -> Iterator[TensorHeader]:
    """Yields names, dtypes and shapes in memory order: each arena's values, then its slots one by one."""
    for arena, values, slots in zip(snapshot.layout.arenas, snapshot.values, snapshot.slots, strict=True):
        for kind, array in ((VALUE, values), *slots.items()):
            yield from _slices(kind, array.dtype, arena, variables)


def _slices(
    kind: str, dtype: np.dtype, arena: ArenaLayout, variables: Mapping[str, Variable]
) -> Iterator[TensorHeader]:
    for part in arena.slices:
        shape = variables[part.variable].shape
        cut = (part.row_stop - part.row_start, *shape[1:]) if shape else ()
        yield tensor_name(kind, part.row_start, part.variable), dtype, cut


def _data(snapshot: ShardSnapshot) -> Iterator[memoryview]:
    for values, slots in zip(snapshot.values, snapshot.slots, strict=True):
        for array in (values, *slots.values()):
            yield array.view(np.uint8).data


def _extent(part: Slice, variable: Variable) -> tuple[int, int]:
    return part.offset, part.offset + (part.row_stop - part.row_start) * row_elements(variable.shape)


__all__ = ["CheckpointWriter", "load"]
