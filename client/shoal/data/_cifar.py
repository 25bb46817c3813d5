"""The CIFAR-10 data set, in the binary version of its authors."""

import os
from pathlib import Path

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
_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


class Cifar10:
    """The 60,000 images of CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009).

        dataset = Cifar10("cifar-10-batches-bin")

    A batch is the tuple (images, labels): uint8 [n, 32, 32, 3] and int64 [n]. The constructor reads the files into
    memory. They must be those of the binary version: 3,073 bytes per image, label first
    (docs/decisions/0027-images.md).

    Args:
        folder: folder with `batches.meta.txt`, `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`.
        train: whether to read the 50,000 training images. False means the 10,000 test images.
        prefetch: number of batches to read ahead. 0 means that each batch is read at its step.

    Attributes:
        classes: names of the classes, by label.

    Raises:
        InvalidData: the folder has the Python version of CIFAR-10, or a file is missing, truncated or not a CIFAR-10
            file.
    """

    def __init__(self, folder: str | os.PathLike[str], *, train: bool = True, prefetch: int = DEFAULT_PREFETCH) -> None:
        check_number("prefetch", prefetch, least=0)
        check_type("folder", folder, (str, os.PathLike), "a folder, such as 'cifar-10-batches-bin'")
        _refuse_python_version(Path(folder))
        self.classes = _classes(Path(folder) / _META)
        paths = [Path(folder) / name for name in (_TRAIN if train else _TEST)]
        counts = [_count(path) for path in paths]
        for path, count in zip(paths, counts, strict=True):
            if count < max(counts):
                raise errors.InvalidData(
                    f"{path} has {count:,} images, and another batch has {max(counts):,}: it is cut short; unpack the "
                    "archive again"
                )
        self._images = np.empty((sum(counts), *_SHAPE[1:], _SHAPE[0]), np.uint8)
        self._labels = np.empty(sum(counts), np.int64)
        start = 0
        for path, count in zip(paths, counts, strict=True):
            records = _records(path, count, len(self.classes))
            self._labels[start : start + count] = records[:, 0]
            self._images[start : start + count] = records[:, 1:].reshape(-1, *_SHAPE).transpose(0, 2, 3, 1)
            start += count
        self.prefetch = prefetch

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._images[indices], self._labels[indices]


def _refuse_python_version(folder: Path) -> None:
    if not (folder / _META).exists() and (folder / _PYTHON_META).exists():
        raise errors.InvalidData(
            f"{folder} has the Python version of CIFAR-10 ({_PYTHON_META}), whose files are serialized Python objects, "
            f"which Shoal does not load; download the binary version, {_SOURCE}, and give its folder, "
            "cifar-10-batches-bin"
        )


def _classes(path: Path) -> tuple[str, ...]:
    """Reads the names of the classes, one per line."""
    with errors_naming(str(path), ValueError), path.open("rb") as file:
        names = file.read(_MOST_META_BYTES).decode("ascii").split("\n")
        found = tuple(name.strip() for name in names if name.strip())
        if not found or not all(name.isprintable() for name in found):
            raise ValueError("it has no names of classes, one on each line")
        return found


def _count(path: Path) -> int:
    """Returns the number of images of a file, by its size."""
    with errors_naming(str(path), ValueError):
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes, and a batch of CIFAR-10 has 30,730,000")
    if not size:
        raise errors.InvalidData(f"{path} is empty; unpack the archive again")
    if size % _RECORD_BYTES:
        raise errors.InvalidData(
            f"{path} has {size:,} bytes, and an image of CIFAR-10 has {_RECORD_BYTES:,} with its label: it is cut "
            f"short after {size // _RECORD_BYTES:,} images, or is another file; unpack the archive again"
        )
    return size // _RECORD_BYTES


def _records(path: Path, count: int, classes: int) -> np.ndarray:
    """Reads the labels and images of a file: uint8 [count, 3073]."""
    with errors_naming(str(path), ValueError):
        raw = np.fromfile(path, np.uint8, count * _RECORD_BYTES)
        if len(raw) != count * _RECORD_BYTES:
            raise ValueError(f"it has changed: it now ends at byte {len(raw):,}, not {count * _RECORD_BYTES:,}")
    records = raw.reshape(count, _RECORD_BYTES)
    wrong = np.flatnonzero(records[:, 0] >= classes)
    if len(wrong):
        first = int(wrong[0])
        raise errors.InvalidData(
            f"{path} has the label {records[first, 0]} for image {first}, at byte {first * _RECORD_BYTES:,}, and "
            f"labels are from 0 to {classes - 1}; it is damaged, or is another file: unpack the archive again"
        )
    return records


__all__ = ["Cifar10"]
