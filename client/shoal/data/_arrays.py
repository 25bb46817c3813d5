"""The data set of NumPy arrays, in memory or in mapped files."""

import io
import lzma
import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from shoal import errors
from shoal.data._block_reader import check_number
from shoal.data._files import MOST_DEFLATED, errors_naming, read_into
from shoal.data._structure import flatten
from shoal.program import DEFAULT_PREFETCH

# The header before each member of a zip file, up to the lengths of the two fields that follow.
_ZIP_HEADER = struct.Struct("<4s22xHH")
# Bytes of an array's header. NumPy reads at most 10,000 characters of it.
_MOST_HEADER = 64 << 10
# What damaged archives and arrays raise: a RuntimeError if the archive is encrypted, and NotImplementedError for an
# unknown compression.
_DAMAGE = (
    ValueError,
    OverflowError,
    RuntimeError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
)


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
        max_bytes: largest decompressed size of the compressed members of one .npz file. A larger file is refused before
            it is decompressed.
        prefetch: number of batches to read ahead. 0 means that each batch is read at its step.

    Raises:
        InvalidData: a file is missing, damaged, too large or contains Python objects, or the arrays have different
            lengths or no samples.
    """

    def __init__(self, arrays: Any, *, max_bytes: int = 1 << 32, prefetch: int = DEFAULT_PREFETCH) -> None:
        check_number("max_bytes", max_bytes, least=1)
        opened, self._rebuild = flatten(_opened(arrays, max_bytes), "Arrays")
        self._arrays = list(opened.values())
        self.prefetch = prefetch
        if not len(self):
            raise errors.InvalidData("Arrays has arrays without rows; give at least one sample")

    def __len__(self) -> int:
        return len(self._arrays[0])

    def batch(self, indices: np.ndarray) -> Any:
        return self._rebuild([array[indices] for array in self._arrays])


def _opened(value: Any, max_bytes: int) -> Any:
    """Returns the same structure, with arrays in place of paths."""
    match value:
        case str() | os.PathLike():
            return _read(os.fspath(value), max_bytes)
        case dict():
            return {key: _opened(item, max_bytes) for key, item in value.items()}
        case tuple() | list():
            items = [_opened(item, max_bytes) for item in value]
            named = type(value) is not tuple and isinstance(value, tuple)
            return type(value)(*items) if named else type(value)(items)
    return value


def _read(path: str, max_bytes: int) -> np.ndarray | dict[str, np.ndarray]:
    if "://" in path:
        raise errors.InvalidData(f"{path} cannot be mapped into memory; copy it to a disk of the worker first")
    with errors_naming(path, *_DAMAGE):
        size = Path(path).stat().st_size
        if not size:
            raise errors.InvalidData(f"{path} is empty; write it again, with numpy.save or numpy.savez")
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as file:
                return _mapped(path, file, path)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if not members:
                raise errors.InvalidData(f"{path} contains no arrays; write it again, with numpy.savez")
            packed = sum(member.file_size for member in members if member.compress_type != zipfile.ZIP_STORED)
            if packed > max_bytes:
                raise errors.InvalidData(
                    f"{path} has {packed:,} bytes when it is decompressed, but max_bytes is {max_bytes:,}; raise it, "
                    "or write the file with numpy.savez, which does not compress"
                )
            arrays = {}
            for member in members:
                name = member.filename.removesuffix(".npy")
                with errors_naming(f"{name} in {path}", *_DAMAGE):
                    arrays[name] = _member(path, archive, member)
            return arrays


def _member(path: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    where = f"{member.filename} in {path}"
    if member.compress_type != zipfile.ZIP_STORED:
        if member.compress_type == zipfile.ZIP_DEFLATED and member.file_size > MOST_DEFLATED * member.compress_size:
            raise errors.InvalidData(
                f"{where} promises {member.file_size:,} bytes, but its {member.compress_size:,} compressed bytes "
                "cannot hold so many; copy the file again from its source"
            )
        with archive.open(member) as unpacked:
            return _unpacked(where, unpacked, member.file_size)
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        _, name_length, extra_length = _ZIP_HEADER.unpack(file.read(_ZIP_HEADER.size))
        file.seek(name_length + extra_length, os.SEEK_CUR)
        return _mapped(path, file, where)


def _mapped(path: str, file: IO[bytes], where: str) -> np.ndarray:
    """Maps the array that begins at the position of a file."""
    begin = file.tell()
    shape, order, dtype, header = _header(file.read(_MOST_HEADER), where)
    file.seek(0, os.SEEK_END)
    _check_size(shape, dtype, file.tell() - begin - header, where)
    if not all(shape):  # nothing to map
        return np.empty(shape, dtype)
    return _plain(np.memmap(path, dtype, "r", begin + header, shape, order=order))


def _unpacked(where: str, file: IO[bytes], size: int) -> np.ndarray:
    """Reads the array in a decompressed stream of `size` bytes."""
    beginning = file.read(min(size, _MOST_HEADER))
    shape, order, dtype, header = _header(beginning, where)
    _check_size(shape, dtype, size - header, where)
    nbytes = dtype.itemsize * math.prod(shape)
    raw = np.empty(nbytes, np.uint8)  # the system provides the memory when it is written
    there = np.frombuffer(beginning, np.uint8)[header : header + nbytes]
    raw[: len(there)] = there
    done = len(there) + read_into(file, raw[len(there) :])
    if done < nbytes or file.read(1):  # at the end, this also compares the checksum
        raise errors.InvalidData(
            f"{where} promises {nbytes:,} bytes of numbers, but holds {'more' if done == nbytes else f'{done:,}'}; "
            "copy the file again from its source"
        )
    return raw.view(dtype).reshape(shape, order=order)


def _header(beginning: bytes, where: str) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype, int]:
    """Reads the header of an array: its shape, order of elements and dtype, and the header's size in bytes."""
    stream = io.BytesIO(beginning)
    try:
        major, _ = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(stream)
    except Exception as error:  # NumPy reads it as a Python literal, which fails in many ways
        reason = " ".join(str(error).split())
        raise errors.InvalidData(
            f"{where} has no valid header of an array: {reason:.200}; it may be damaged, or of another format: compare "
            "it with its source, or write it again with numpy.save or numpy.savez"
        ) from None
    if dtype.hasobject:
        raise errors.InvalidData(f"{where} contains Python objects, which only pickle reads; save arrays of numbers")
    return shape, "F" if by_columns else "C", dtype, stream.tell()


def _check_size(shape: tuple[int, ...], dtype: np.dtype, held: int, where: str) -> None:
    """Checks, before memory is allocated, that an array has a size, and that its file holds so many bytes."""
    nbytes = dtype.itemsize * math.prod(shape)
    if not dtype.itemsize or min(shape, default=0) < 0 or nbytes > held:
        raise errors.InvalidData(
            f"the header of {where} declares the shape {shape} of {dtype}, {nbytes:,} bytes in all, but the file holds "
            f"{max(0, held):,}; it may be truncated: copy it again from its source"
        )


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns the same memory as an `np.ndarray`, so that its rows are not memmaps."""
    return array.view(np.ndarray)


__all__ = ["Arrays"]
