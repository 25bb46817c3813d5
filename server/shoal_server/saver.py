"""Shards to a checkpoint's files, and back: what of an arena lies where in a file, and the thread that writes."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import structlog

from shoal import errors
from shoal._checkpoint.catalogue import path_of
from shoal._checkpoint.files import Named, write_tensors
from shoal._checkpoint.folders import Folder, no_folder
from shoal._checkpoint.manifest import FileEntry
from shoal._checkpoint.slices import VALUE, Rows, SavedVariables, tensor_name
from shoal._layout import ArenaLayout, Slice, row_elements
from shoal.variables import Variable
from shoal_server.arena import Arena
from shoal_server.snapshot import Snapshot

_log = structlog.get_logger(__name__)

# Checkpoints of which files are kept in mind until somebody has asked for them.
_MAX_SAVES = 64


class Saver:
    """Writes shards in the background, one checkpoint after the other.

    Args:
        folder: of checkpoints; None: this server has none.
        name: of this server, for messages.
    """

    def __init__(self, folder: Folder | None, name: str = "") -> None:
        self._folder, self._who = folder, f"server {name}" if name else "this server"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._lock = threading.Lock()  # guards _saves
        # By job and number, oldest first: the files, or why there are none.
        self._saves: dict[tuple[str, int], Future[list[FileEntry] | errors.ShoalError]] = {}

    @property
    def folder(self) -> Folder:
        """Where checkpoints are.

        Raises:
            StorageFailed: this server has no such folder.
        """
        if self._folder is None:
            raise no_folder(self._who)
        return self._folder

    def begin(self, job: str, number: int, variables: Mapping[str, Variable], snapshots: Sequence[Snapshot]) -> None:
        """Begins to write shards; ends their snapshots when they are written.

        Args:
            job: whose.
            number: of the checkpoint.
            variables: the job's.
            snapshots: being saved.
        """
        with self._lock:
            self._saves[job, number] = self._thread.submit(self._write, job, number, variables, snapshots)
            while len(self._saves) > _MAX_SAVES:
                del self._saves[next(iter(self._saves))]

    def collect(self, job: str, number: int, *, within_s: float) -> list[FileEntry] | None:
        """The files of a checkpoint, once they are written; None: they are not yet.

        Raises:
            StorageFailed: they could not be written.
            UnknownCheckpoint: none of that number was begun here.
        """
        with self._lock:
            save = self._saves.get((job, number))
        if save is None:
            raise errors.UnknownCheckpoint(f"checkpoint {number} of {job} was not begun on this server")
        try:
            outcome = save.result(within_s)
        except TimeoutError:
            return None
        if isinstance(outcome, errors.ShoalError):
            raise outcome.with_traceback(None)
        return outcome

    def close(self) -> None:
        """Gives up what has not begun, and waits for what has."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _write(
        self, job: str, number: int, variables: Mapping[str, Variable], snapshots: Sequence[Snapshot]
    ) -> list[FileEntry] | errors.ShoalError:
        waiting = [*snapshots]
        entries = []
        try:
            while waiting:
                snapshot = waiting[0]
                path = (*path_of(job, number), f"shard-{snapshot.layout.shard:05}.safetensors")
                metadata = {"job": job, "shard": str(snapshot.layout.shard), "version": str(snapshot.version)}
                tensors = _tensors(snapshot, variables)
                entries.append(write_tensors(self.folder, path, tensors, _data(snapshot), metadata))
                waiting.pop(0).end_saving()
        except errors.ShoalError as error:
            _log.warning("a checkpoint could not be written", job=job, number=number, why=error.message)
            # Not raised: what raised it would be kept with its traceback, and with that a copy of the shards.
            return error.with_traceback(None)
        finally:
            for snapshot in waiting:
                snapshot.end_saving()
        return entries


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


__all__ = ["Saver", "load"]
