"""The data set of NumPy arrays, in memory or in mapped files."""

import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from shoal import errors
from shoal.data._files import errors_naming
from shoal.data._structure import flatten
from shoal.program import DEFAULT_PREFETCH

# The header before each member of a zip file, up to the lengths of the two fields that follow.
_ZIP_HEADER = struct.Struct("<4s22xHH")


class Arrays:
    """NumPy arrays whose first dimension is the samples.

        dataset = Arrays({"x": "images.npy", "y": labels})
        dataset = Arrays("train.npz")

    A batch has the structure of `arrays`: an array for an array, a dict for a dict or an .npz file, a tuple for a
    tuple. Files are mapped into memory: a batch reads the memory pages of its samples, and the system caches them.
    Compressed members of an .npz file (`numpy.savez_compressed`) cannot be mapped and are read completely. Single
    samples are shuffled, so a disk sees random reads.

    Args:
        arrays: an array, the path of an .npy or .npz file, or a dict, tuple or list of these, at any depth. A relative
            path is relative to the working directory of the worker.
        prefetch: number of batches to read ahead. 0 means that each batch is read at its step.

    Raises:
        InvalidData: a file is missing, damaged or contains Python objects, or the arrays have different lengths or no
            samples.
    """

    def __init__(self, arrays: Any, *, prefetch: int = DEFAULT_PREFETCH) -> None:
        opened, self._rebuild = flatten(_opened(arrays), "Arrays")
        self._arrays = list(opened.values())
        self.prefetch = prefetch
        if not len(self):
            raise errors.InvalidData("Arrays has arrays without rows; give at least one sample")

    def __len__(self) -> int:
        return len(self._arrays[0])

    def batch(self, indices: np.ndarray) -> Any:
        return self._rebuild([array[indices] for array in self._arrays])


def _opened(value: Any) -> Any:
    """Returns the same structure, with arrays in place of paths."""
    match value:
        case str() | os.PathLike():
            return _read(os.fspath(value))
        case dict():
            return {key: _opened(item) for key, item in value.items()}
        case tuple() | list():
            items = [_opened(item) for item in value]
            named = type(value) is not tuple and isinstance(value, tuple)
            return type(value)(*items) if named else type(value)(items)
    return value


def _read(path: str) -> np.ndarray | dict[str, np.ndarray]:
    if "://" in path:
        raise errors.InvalidData(f"{path} cannot be mapped into memory; copy it to a disk of the worker first")
    kinds = (ValueError, zipfile.BadZipFile, struct.error)
    with errors_naming(path, *kinds):
        if not Path(path).stat().st_size:
            raise errors.InvalidData(f"{path} is empty; write it again, with numpy.save or numpy.savez")
        if not zipfile.is_zipfile(path):
            return _plain(np.load(path, mmap_mode="r", allow_pickle=False))
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if not members:
                raise errors.InvalidData(f"{path} contains no arrays; write it again, with numpy.savez")
            arrays = {}
            for member in members:
                name = member.filename.removesuffix(".npy")
                with errors_naming(f"{name} in {path}", *kinds):
                    arrays[name] = _member(path, archive, member)
            return arrays


def _member(path: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    if member.compress_type != zipfile.ZIP_STORED:
        with archive.open(member) as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        _, name_length, extra_length = _ZIP_HEADER.unpack(file.read(_ZIP_HEADER.size))
        file.seek(name_length + extra_length, os.SEEK_CUR)
        major, _ = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = header(file)
        if dtype.hasobject:
            raise errors.InvalidData(
                f"{member.filename} in {path} contains Python objects, which only pickle reads; save arrays of numbers"
            )
        if not all(shape):  # nothing to map
            return np.empty(shape, dtype)
        return _plain(np.memmap(path, dtype, "r", file.tell(), shape, order="F" if by_columns else "C"))


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns the same memory as an `np.ndarray`, so that its rows are not memmaps."""
    return array.view(np.ndarray)


__all__ = ["Arrays"]
