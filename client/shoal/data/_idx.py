"""The data set of idx files, the format of MNIST and Fashion-MNIST, plain or gzip."""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from shoal import errors
from shoal._system import check_type
from shoal.data._block_reader import check_number
from shoal.data._files import MOST_DEFLATED, errors_naming, read_into
from shoal.program import DEFAULT_PREFETCH

# Types by the third byte of the file (http://yann.lecun.com/exdb/mnist); numbers are big-endian.
_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

_GZIP = b"\x1f\x8b"


class Idx:
    """Images and their labels in two idx files, as in MNIST and Fashion-MNIST.

        dataset = Idx("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")

    A batch is the tuple (images, labels): images [n, height, width, channels] of the file's dtype, with one channel if
    the file has no channels, and labels int64 [n]. Plain files are mapped into memory: a batch reads the memory pages
    of its samples. The constructor decompresses gzip files into memory.

    Args:
        images: path of a file with three or four dimensions.
        labels: path of a file with one dimension, of whole numbers.
        max_bytes: largest decompressed size of a gzip file. A larger file is refused before it is decompressed.
        prefetch: number of batches to read ahead. 0 means that each batch is read at its step.

    Raises:
        InvalidData: a file is missing, not an idx file, damaged, truncated, longer than its header says, or has other
            dimensions; or the number of images is 0 or differs from the number of labels.
    """

    def __init__(
        self,
        images: str | os.PathLike[str],
        labels: str | os.PathLike[str],
        *,
        max_bytes: int = 1 << 32,
        prefetch: int = DEFAULT_PREFETCH,
    ) -> None:
        check_number("max_bytes", max_bytes, least=1)
        check_number("prefetch", prefetch, least=0)
        for name, file in {"images": images, "labels": labels}.items():
            check_type(name, file, (str, os.PathLike), "the path of a file, such as 'train-images-idx3-ubyte.gz'")
        pictures, numbers = read_idx(images, max_bytes), read_idx(labels, max_bytes)
        if pictures.ndim not in {3, 4}:
            raise errors.InvalidData(
                f"{os.fspath(images)} has the dimensions {pictures.shape}; images are [n, height, width] or [n, "
                "height, width, channels]; give the file of the images first, then that of the labels"
            )
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise errors.InvalidData(
                f"{os.fspath(labels)} has the dimensions {numbers.shape} and type {numbers.dtype}; labels are whole "
                "numbers in one dimension"
            )
        if len(pictures) != len(numbers):
            raise errors.InvalidData(
                f"{os.fspath(images)} has {len(pictures)} images, but {os.fspath(labels)} has {len(numbers)} labels; "
                "give two files that belong together"
            )
        self._images = pictures if pictures.ndim == 4 else pictures[..., np.newaxis]
        self._labels = numbers.astype(np.int64)
        self.prefetch = prefetch

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images = self._images[indices]
        return images.astype(images.dtype.newbyteorder("="), copy=False), self._labels[indices]


def read_idx(path: str | os.PathLike[str], max_bytes: int) -> np.ndarray:
    """Returns the array of an idx file, in the file's byte order. A mapped array is read-only.

    Args:
        path: path of the file.
        max_bytes: see `Idx`.

    Raises:
        InvalidData: see `Idx`.
    """
    name = os.fspath(path)
    if "://" in name:
        raise errors.InvalidData(f"{name} cannot be mapped into memory; copy it to a disk of the worker first")
    with errors_naming(name, ValueError, zlib.error), open(name, "rb") as file:
        size = Path(name).stat().st_size
        if not size:
            raise errors.InvalidData(f"{name} is empty; copy it again from its source")
        packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        if packed:
            with gzip.GzipFile(fileobj=file) as unpacked:
                return _unpacked(name, unpacked, min(max_bytes, MOST_DEFLATED * size), max_bytes)
        dtype, shape = _header(name, file)
        held = size - file.tell()
        if held != _bytes(dtype, shape):
            raise _wrong_size(name, dtype, shape, f"the file holds {held:,}; ")
        return np.memmap(name, dtype, "r", file.tell(), shape).view(np.ndarray)


def _header(name: str, file: IO[bytes] | gzip.GzipFile) -> tuple[np.dtype, tuple[int, ...]]:
    """Reads the type and the dimensions, up to the start of the numbers."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES or not magic[3]:
        raise errors.InvalidData(
            f"{name} begins with the bytes {magic.hex(' ')} and is not an idx file (00 00, a type from 08 to 0e, the "
            "number of dimensions); give an idx file, plain or gzip, or copy it again"
        )
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise errors.InvalidData(f"{name} ends within its header; it is truncated: copy it again from its source")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    if not all(shape):
        raise errors.InvalidData(f"{name} has the dimensions {shape}, so it contains no samples; give at least one")
    return np.dtype(_TYPES[magic[2]]), shape


def _unpacked(name: str, file: gzip.GzipFile, most: int, max_bytes: int) -> np.ndarray:
    dtype, shape = _header(name, file)
    size = _bytes(dtype, shape)
    if size > most:
        reason = (
            f"max_bytes is {max_bytes:,}; raise it, or "
            if size > max_bytes
            else "a gzip file of this size cannot hold so many; "
        )
        raise _wrong_size(name, dtype, shape, reason)
    raw = np.empty(size, np.uint8)  # the system provides the memory when it is written
    done = read_into(file, raw)
    if done < size:
        raise _wrong_size(name, dtype, shape, f"the file holds {done:,}; ")
    if file.read(1):  # at the end, this also compares the checksum
        raise _wrong_size(name, dtype, shape, "the file holds more; ")
    return raw.view(dtype).reshape(shape)


def _bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _wrong_size(name: str, dtype: np.dtype, shape: tuple[int, ...], reason: str) -> errors.InvalidData:
    return errors.InvalidData(
        f"the header of {name} declares {' x '.join(map(str, shape))} numbers of {dtype.itemsize} bytes, "
        f"{_bytes(dtype, shape):,} bytes in all, but {reason}copy it again from its source"
    )


__all__ = ["Idx", "read_idx"]
