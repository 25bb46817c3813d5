"""Process that writes a checkpoint and kills itself at a given point: checkpoint_writer.py ROOT NUMBER POINT SEED.

It writes as servers and the coordinator do: three shards, then the manifest. The process wraps the system calls of a
write. At the call that POINT selects, it kills itself. If POINT is "none", it writes everything.
"""

import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from shoal._checkpoint import direct_io
from shoal._checkpoint.catalogue import Catalogue, path_of
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import Manifest
from shoal._checkpoint.slices import tensor_name
from shoal._checkpoint.tensor_files import write_tensors

JOB = "digits"
SHARDS, ROWS, COLUMNS = 3, 40, 100

# By name: the step of writing one file (see `_Steps`), and whether it is the manifest's or that of a shard drawn.
POINTS = {
    "before a file": ("open", False),
    "in a file": ("write", False),
    "before its fsync": ("fsync file", False),
    "before its rename": ("rename", False),
    "after its rename": ("fsync folder", False),
    "before the manifest": ("open", True),
    "in the manifest": ("write", True),
    "after the manifest": ("fsync folder", True),
}


def values(number: int) -> np.ndarray:
    """Returns the variable that a checkpoint holds."""
    return np.random.default_rng(number).normal(size=(ROWS * SHARDS, COLUMNS)).astype(np.float32)


def write(root: Path, number: int) -> None:
    """Writes a whole checkpoint."""
    catalogue = Catalogue(LocalStorage(root))
    kernel = values(number)
    entries = []
    for shard in range(SHARDS):
        rows = kernel[shard * ROWS : (shard + 1) * ROWS]
        named = [(tensor_name("value", shard * ROWS, "kernel"), rows.dtype, rows.shape)]
        pieces = [rows[start : start + 7].reshape(-1).view(np.uint8).data for start in range(0, ROWS, 7)]
        path = (*path_of(JOB, number), f"shard-{shard:05}.safetensors")
        entries.append(write_tensors(catalogue.folder, path, named, pieces))
    catalogue.publish(Manifest(JOB, number, 0.0, number, number, {}, (), tuple(entries)))


class _Steps:
    """Counts files as they are opened, and kills the process at a step of one of them."""

    def __init__(self, step: str, file: int, after_writes: int) -> None:
        self._step, self._file, self._after_writes = step, file, after_writes
        self._files = -1
        self._renamed = True
        for name in ("open", "pwrite", "fsync", "rename"):
            setattr(os, name, self._watched(getattr(self, f"_{name}"), getattr(os, name)))

    def _watched(self, note: Callable[..., None], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            note(real, *arguments)
            return real(*arguments, **options)

        return call

    def _open(self, _real: Any, _path: str, flags: int, *_: Any) -> None:
        if flags & os.O_CREAT:
            self._files += 1
            self._renamed, self._writes = False, 0
            self._reached("open")

    def _pwrite(self, real: Callable[[int, Any, int], int], descriptor: int, data: np.ndarray, start: int) -> None:
        if self._here("write") and self._writes == self._after_writes:
            real(descriptor, data[: len(data) // 2], start)  # torn in a block, not between two
            die()
        self._writes += 1

    def _fsync(self, *_: Any) -> None:
        if self._files >= 0:
            self._reached("fsync folder" if self._renamed else "fsync file")

    def _rename(self, *_: Any) -> None:
        self._reached("rename")
        self._renamed = True

    def _here(self, step: str) -> bool:
        return (step, self._files) == (self._step, self._file)

    def _reached(self, step: str) -> None:
        if self._here(step):
            die()


def die() -> NoReturn:
    """Ends the process at once, without any cleanup, as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is dead")


def main(arguments: Sequence[str]) -> None:
    root, number, point, seed = arguments
    direct_io.BLOCK_BYTES = 4096  # a shard's file is some
    if point != "none":
        chance = random.Random(f"{point} {seed}")
        step, manifest = POINTS[point]
        _Steps(step, SHARDS if manifest else chance.randrange(SHARDS), 0 if manifest else chance.randrange(4))
    write(Path(root), int(number))


if __name__ == "__main__":
    main(sys.argv[1:])
