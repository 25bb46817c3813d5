"""The CIFAR-10 data set, in the binary version of its authors: the archive, or the folder of its files."""

import gzip
import os
import tarfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from shoal import errors
from shoal._system import check_type
from shoal.data._block_reader import check_number
from shoal.data._files import errors_naming
from shoal.program import DEFAULT_PREFETCH

_SHAPE = (3, 32, 32)  # channels, rows and columns of an image in a file
_RECORD_BYTES = 1 + 3 * 32 * 32  # a label, then the image
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = ("test_batch.bin",)
_META = "batches.meta.txt"
# The file of the Python version that replaces them.
_PYTHON_META = "batches.meta"
# A file of 10,000 images has 31 MB; a much larger one is something else.
_MOST_BYTES = 64 << 20
_MOST_META_BYTES = 1 << 16
# The archive has 184 MB when it is decompressed. A much larger one is something else.
_MOST_UNPACKED = 512 << 20
_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


class Cifar10:
    """The 60,000 images of CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009).

        dataset = Cifar10("cifar-10-binary.tar.gz")

    A batch is the tuple (images, labels): uint8 [n, 32, 32, 3] and int64 [n]. The constructor reads the files into
    memory. They must be those of the binary version: 3,073 bytes per image, label first
    (docs/decisions/0027-images.md).

    Args:
        folder: the archive as it is downloaded, `cifar-10-binary.tar.gz`, or the folder with its files:
            `batches.meta.txt`, `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`.
        train: whether to read the 50,000 training images. False means the 10,000 test images.
        prefetch: number of batches to read ahead. 0 means that each batch is read at its step.

    Attributes:
        classes: names of the classes, by label.

    Raises:
        InvalidData: it is the Python version of CIFAR-10, or a file is missing, truncated or not a CIFAR-10 file.
    """

    def __init__(self, folder: str | os.PathLike[str], *, train: bool = True, prefetch: int = DEFAULT_PREFETCH) -> None:
        check_number("prefetch", prefetch, least=0)
        check_type("folder", folder, (str, os.PathLike), "a folder or an archive, such as 'cifar-10-binary.tar.gz'")
        names = _TRAIN if train else _TEST
        files = (_UnpackedFiles if os.path.isdir(folder) else _ArchivedFiles)(Path(folder), (_META, *names))
        self.classes = files.classes()
        batches = [files.records(name, len(self.classes)) for name in names]
        counts = [len(batch) for batch in batches]
        for name, count in zip(names, counts, strict=True):
            if count < max(counts):
                raise errors.InvalidData(
                    f"{files.where(name)} has {count:,} images, and another batch has {max(counts):,}: it is cut "
                    f"short; {files.again}"
                )
        self._images = np.empty((sum(counts), *_SHAPE[1:], _SHAPE[0]), np.uint8)
        self._labels = np.empty(sum(counts), np.int64)
        start = 0
        for count in counts:
            batch = batches.pop(0)  # its memory is free for the images
            self._labels[start : start + count] = batch[:, 0]
            self._images[start : start + count] = batch[:, 1:].reshape(-1, *_SHAPE).transpose(0, 2, 3, 1)
            start += count
        self.prefetch = prefetch

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._images[indices], self._labels[indices]


class _UnpackedFiles:
    """The unpacked files.

    Args:
        path: the folder.
        names: the files to read.
    """

    again = "unpack the archive again"

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self._path, self._names = path, names

    def where(self, name: str) -> str:
        """Returns a file's name, for messages."""
        return str(self._path / name)

    def classes(self) -> tuple[str, ...]:
        """Reads the names of the classes, one per line."""
        with errors_naming(self.where(_META), ValueError):
            names = self._read(_META)[:_MOST_META_BYTES].decode("ascii").split("\n")
            found = tuple(name.strip() for name in names if name.strip())
            if not found or not all(name.isprintable() for name in found):
                raise ValueError("it has no names of classes, one on each line")
            return found

    def records(self, name: str, classes: int) -> np.ndarray:
        """Reads the labels and images of a file: uint8 [count, 3073]."""
        with errors_naming(self.where(name), ValueError):
            content = self._read(name)
        if not content:
            raise errors.InvalidData(f"{self.where(name)} is empty; {self.again}")
        if len(content) % _RECORD_BYTES:
            raise errors.InvalidData(
                f"{self.where(name)} has {len(content):,} bytes, and an image of CIFAR-10 has {_RECORD_BYTES:,} with "
                f"its label: it is cut short after {len(content) // _RECORD_BYTES:,} images, or is another file; "
                f"{self.again}"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD_BYTES)
        wrong = np.flatnonzero(records[:, 0] >= classes)
        if len(wrong):
            first = int(wrong[0])
            raise errors.InvalidData(
                f"{self.where(name)} has the label {records[first, 0]} for image {first}, at byte "
                f"{first * _RECORD_BYTES:,}, and labels are from 0 to {classes - 1}; it is damaged, or is another "
                f"file: {self.again}"
            )
        return records

    def _read(self, name: str) -> bytes:
        path = self._path / name
        if not path.exists():
            if (self._path / _PYTHON_META).exists() and not (self._path / _META).exists():
                raise _python_version(self._path)
            raise errors.InvalidData(
                f"{path.absolute()} does not exist; it is a file of CIFAR-10's binary version: download {_SOURCE}, and "
                f"give its path, or unpack it and give its folder, cifar-10-batches-bin"
            )
        with path.open("rb") as file:
            return _bounded(file, path.stat().st_size)


class _ArchivedFiles(_UnpackedFiles):
    """The archive, which is read once, from its beginning to its end."""

    again = "download the archive again"

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        super().__init__(path, names)
        if not path.exists():
            raise errors.InvalidData(
                f"there is no file or folder at {path.absolute()}; download {_SOURCE} and save it there, or give the "
                "path where it is"
            )
        with errors_naming(str(path), ValueError, tarfile.TarError, zlib.error):
            self._contents = self._unpacked()

    def where(self, name: str) -> str:
        return f"{name} in {self._path}"

    def _unpacked(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        with gzip.open(self._path) as stream:
            limited: Any = _Limited(stream)  # it has what tarfile uses of a stream
            with tarfile.open(fileobj=limited, mode="r|") as archive:
                for member in archive:
                    name = Path(member.name).name
                    if name == _PYTHON_META:
                        raise _python_version(self._path)
                    if name in self._names and (file := archive.extractfile(member)) is not None:
                        found[name] = _bounded(file, member.size)
        return found

    def _read(self, name: str) -> bytes:
        if name not in self._contents:
            raise errors.InvalidData(
                f"{self._path} has no file {name}, so it is not the archive of CIFAR-10's binary version; download "
                f"{_SOURCE}"
            )
        return self._contents.pop(name)


class _Limited:
    """A stream that ends with an error at `_MOST_UNPACKED` bytes."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile) -> None:
        self._stream, self._room = stream, _MOST_UNPACKED

    def read(self, size: int) -> bytes:
        """Reads the next bytes."""
        piece = self._stream.read(min(size, self._room + 1))
        self._room -= len(piece)
        if self._room < 0:
            raise ValueError(f"it has more than {_MOST_UNPACKED:,} bytes when it is decompressed, which is too many")
        return piece


def _bounded(file: IO[bytes], size: int) -> bytes:
    if size > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes, and a batch of CIFAR-10 has 30,730,000")
    return file.read(size)


def _python_version(path: Path) -> errors.InvalidData:
    return errors.InvalidData(
        f"{path} has the Python version of CIFAR-10 ({_PYTHON_META}), whose files are serialized Python objects, which "
        f"Shoal does not load; download the binary version, {_SOURCE}, and give its path"
    )


__all__ = ["Cifar10"]
