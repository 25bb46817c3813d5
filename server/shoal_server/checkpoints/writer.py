"""Shards to a checkpoint's files, and back: what of an arena lies where in a file, and the threads that write."""

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
    Named,
    Rows,
    SavedVariables,
    no_storage_message,
    path_of,
    tensor_name,
    write_tensors,
)
from shoal._wire import ArenaLayout, Slice, row_elements
from shoal.variables import Variable
from shoal_server.shards import Arena, Snapshot

_log = structlog.get_logger(__name__)

# Jobs that are written at the same time. More would share the same disk; if it was one, a write that hangs would hold
# up the checkpoints of all jobs.
_THREADS = 4


@dataclass(eq=False, slots=True)
class _Save:
    """This server's part of one checkpoint.

    Attributes:
        waiting: the snapshots that are not written yet, each being saved. Whoever sets `begun` ends them; if nobody
            has, whoever sets `given_up` does.
        outcome: the files, or why there are none.
        begun: a thread is at work on it, or was.
        given_up: nobody wants it any more. Both are guarded by the saver's lock.
    """

    job: str
    number: int
    cut: int
    variables: Mapping[str, Variable]
    waiting: list[Snapshot]
    outcome: Future[list[FileEntry] | errors.ShoalError] = field(default_factory=Future)
    begun: bool = False
    given_up: bool = False


class CheckpointWriter:
    """Writes shards in the background: a job's checkpoints one after the other, those of some jobs at the same time.

    Of each job it knows the latest alone. A coordinator begins another one only when it is done with the one before,
    which is given up then, as it is when the job's shards are dropped.

    Args:
        folder: of checkpoints; None: this server has none.
        name: of this server, for messages.
    """

    def __init__(self, folder: CheckpointStorage | None, name: str = "") -> None:
        self._folder, self._who = folder, f"server {name}" if name else "this server"
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoints")
        self._lock = threading.Lock()  # guards all below; no other is taken under it
        self._saves: dict[str, _Save] = {}  # by job, the latest
        self._served: set[str] = set()  # jobs for which a thread is at work, or asked for

    @property
    def folder(self) -> CheckpointStorage:
        """Where checkpoints are.

        Raises:
            StorageFailed: this server has no such folder.
        """
        if self._folder is None:
            raise no_storage_message(self._who)
        return self._folder

    def begin(
        self, job: str, number: int, cut: int, variables: Mapping[str, Variable], snapshots: Sequence[Snapshot]
    ) -> None:
        """Begins to write shards, and gives up the job's earlier checkpoint; ends snapshots when they are written.

        Args:
            job: whose.
            number: of the checkpoint.
            cut: which cut it is, in the files' names: a job that is submitted again may take a number that an earlier
                one of its name had, whose files come late. They must not end up as this one's.
            variables: the job's.
            snapshots: being saved.
        """
        with self._lock:
            earlier = self._take_out(job)
            self._saves[job] = _Save(job, number, cut, variables, [*snapshots])
            if job not in self._served:
                self._served.add(job)
                self._threads.submit(self._serve, job)
        if earlier:
            _give_up(earlier)

    def drop(self, job: str) -> None:
        """Gives up a job's checkpoint, if one is not written yet; a file that is being written still is."""
        with self._lock:
            save = self._take_out(job)
        if save:
            _give_up(save)

    def clear(self) -> None:
        """Gives up those of all jobs."""
        with self._lock:
            jobs = [*self._saves]
        for job in jobs:
            self.drop(job)

    def collect(self, job: str, number: int, *, within_s: float) -> list[FileEntry] | None:
        """The files of a checkpoint, once they are written; None: they are not yet.

        Raises:
            StorageFailed: they could not be written.
            UnknownCheckpoint: the latest that was begun here is another.
        """
        with self._lock:
            save = self._saves.get(job)
        if save is None or save.number != number:
            raise errors.UnknownCheckpoint(f"checkpoint {number} of {job} was not begun on this server, or given up")
        try:
            outcome = save.outcome.result(within_s)
        except TimeoutError:
            return None
        if isinstance(outcome, errors.ShoalError):
            raise outcome.with_traceback(None)
        return outcome

    def close(self) -> None:
        """Gives up what has not begun, and waits for what has."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _take_out(self, job: str) -> _Save | None:
        """With the lock: gives up a job's checkpoint, which is returned if no thread will end it."""
        save = self._saves.pop(job, None)
        if save is None:
            return None
        save.given_up = True
        return None if save.begun else save

    def _serve(self, job: str) -> None:
        """Writes what there is to write of a job, until there is nothing."""
        while True:
            with self._lock:
                save = self._saves.get(job)
                if save is None or save.begun:
                    self._served.remove(job)
                    return
                save.begun = True
            try:
                save.outcome.set_result(self._written(save))
            except Exception as error:  # a defect; who asks for the files is told
                _log.exception("a checkpoint could not be written", job=job, number=save.number)
                save.outcome.set_exception(error.with_traceback(None))

    def _written(self, save: _Save) -> list[FileEntry] | errors.ShoalError:
        entries = []
        try:
            while save.waiting:
                if self._is_given_up(save):
                    raise _given_up(save)
                entries.append(self._write(save, save.waiting[0]))
                save.waiting.pop(0).end_saving()
        except errors.ShoalError as error:
            _log.warning("a checkpoint could not be written", job=save.job, number=save.number, why=error.message)
            # Not raised: what raised it would be kept with its traceback, and with that a copy of the shards.
            return error.with_traceback(None)
        finally:
            _end(save)
        return entries

    def _write(self, save: _Save, snapshot: Snapshot) -> FileEntry:
        shard = snapshot.layout.shard
        path = (*path_of(save.job, save.number), f"shard-{shard:05}-{save.cut}.safetensors")
        metadata = {"job": save.job, "shard": str(shard), "version": str(snapshot.version)}
        return write_tensors(self.folder, path, _tensors(snapshot, save.variables), _data(snapshot), metadata)

    def _is_given_up(self, save: _Save) -> bool:
        with self._lock:
            return save.given_up


def _end(save: _Save) -> None:
    while save.waiting:
        save.waiting.pop().end_saving()


def _give_up(save: _Save) -> None:
    _end(save)
    save.outcome.set_result(_given_up(save))


def _given_up(save: _Save) -> errors.Cancelled:
    return errors.Cancelled(
        f"checkpoint {save.number} of {save.job} was given up: its shards were dropped, or another was begun"
    )


def load(saved: SavedVariables, arena: Arena, variables: Mapping[str, Variable], *, slots: bool = True) -> None:
    """Fills an arena with what was saved of its slices and, unless they are to begin anew, of their slots."""
    arrays = {VALUE: arena.values, **(arena.slots if slots else {})}
    wanted: list[Rows] = []
    for part in arena.layout.slices:
        start, stop = _extent(part, variables[part.variable])
        kinds = saved.kinds(part.variable)
        wanted += [
            (kind, part.variable, part.row_start, array[start:stop]) for kind, array in arrays.items() if kind in kinds
        ]
    saved.read(*wanted)


def _tensors(snapshot: Snapshot, variables: Mapping[str, Variable]) -> Iterator[Named]:
    """In the order in which the bytes lie in memory: each arena's values, then its slots one by one."""
    for arena, values, slots in zip(snapshot.layout.arenas, snapshot.values, snapshot.slots, strict=True):
        for kind, array in ((VALUE, values), *slots.items()):
            yield from _slices(kind, array.dtype, arena, variables)


def _slices(kind: str, dtype: np.dtype, arena: ArenaLayout, variables: Mapping[str, Variable]) -> Iterator[Named]:
    for part in arena.slices:
        shape = variables[part.variable].shape
        cut = (part.row_stop - part.row_start, *shape[1:]) if shape else ()
        yield tensor_name(kind, part.row_start, part.variable), dtype, cut


def _data(snapshot: Snapshot) -> Iterator[memoryview]:
    for values, slots in zip(snapshot.values, snapshot.slots, strict=True):
        for array in (values, *slots.values()):
            yield array.view(np.uint8).data


def _extent(part: Slice, variable: Variable) -> tuple[int, int]:
    return part.offset, part.offset + (part.row_stop - part.row_start) * row_elements(variable.shape)


__all__ = ["CheckpointWriter", "load"]
