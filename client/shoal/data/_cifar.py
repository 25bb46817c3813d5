"""CIFAR-10 as its authors publish it for Python, read without running anything that is in the files."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from shoal import errors
from shoal.data._files import blamed
from shoal.data._in_blocks import check_number
from shoal.data._opcodes import Damaged, Reader
from shoal.program import DEFAULT_PREFETCH

_SHAPE = (3, 32, 32)  # of an image within a file: channels, rows, columns
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = ("test_batch",)
_META = "batches.meta"
# A batch of 10,000 images has 31 MB; what is much larger is something else.
_MOST_BYTES = 64 << 20


class Cifar10:
    """The 60,000 images of CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009).

        dataset = Cifar10("cifar-10-batches-py")

    A batch is the tuple (images, labels): uint8 [n, 32, 32, 3] and int64 [n]. The files are read into memory when the
    data set is made, by a reader that knows dicts, lists, numbers, texts and arrays of bytes, and refuses the rest
    (docs/decisions/0027-images.md).

    Args:
        folder: with `batches.meta`, `data_batch_1` to `data_batch_5` and `test_batch`.
        train: the five batches to train on; False: the one to test on.
        prefetch: batches to read ahead; 0: each is taken at its step.

    Attributes:
        classes: their names, by label.

    Raises:
        InvalidData: a file is not there, is damaged or cut short, asks for more than data, or is not what it should be.
    """

    def __init__(self, folder: str | os.PathLike[str], *, train: bool = True, prefetch: int = DEFAULT_PREFETCH) -> None:
        check_number("prefetch", prefetch, least=0)
        self.classes = _classes(Path(folder) / _META)
        parts = [_images(Path(folder) / name, len(self.classes)) for name in (_TRAIN if train else _TEST)]
        self._labels = np.concatenate([labels for _, labels in parts])
        self._images = np.empty((len(self._labels), *_SHAPE[1:], _SHAPE[0]), np.uint8)
        start = 0
        for images, labels in parts:
            self._images[start : start + len(labels)] = images.transpose(0, 2, 3, 1)
            start += len(labels)
        self.prefetch = prefetch

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._images[indices], self._labels[indices]


def _classes(path: Path) -> tuple[str, ...]:
    names = _read(path, "label_names")["label_names"]
    with blamed(str(path), ValueError):
        if not isinstance(names, list) or not names or not all(isinstance(name, bytes | str) for name in names):
            raise ValueError("'label_names' is no list of texts")
        return tuple(name.decode("latin-1") if isinstance(name, bytes) else name for name in names)


def _images(path: Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 3, 32, 32] and labels of one file."""
    held = _read(path, "data", "labels")
    images, labels = held["data"], held["labels"]
    with blamed(str(path), ValueError):
        if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != int(np.prod(_SHAPE)):
            found = images.shape if isinstance(images, np.ndarray) else type(images).__name__
            raise ValueError(f"'data' is {found}, not an array [n, {np.prod(_SHAPE)}]")
        if not isinstance(labels, list) or len(labels) != len(images) or not len(images):
            found = len(labels) if isinstance(labels, list) else type(labels).__name__
            raise ValueError(f"'labels' is {found}, not a list with a label for each of {len(images)} images")
        if not all(type(label) is int and 0 <= label < classes for label in labels):
            raise ValueError(f"'labels' has one that is no whole number from 0 to {classes - 1}")
        return images.reshape(-1, *_SHAPE), np.array(labels, np.int64)


def _read(path: Path, *names: str) -> dict[str, Any]:
    with blamed(str(path), ValueError, Damaged), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes, and a batch of CIFAR-10 about 31,000,000")
        raw = file.read(_MOST_BYTES)
        if not raw:
            raise errors.InvalidData(f"{path} is empty; unpack the archive again")
        held = Reader(raw, str(path)).mapping()
        if missing := [name for name in names if name not in held]:
            raise ValueError(f"it has no {missing[0]!r}, as the Python version of CIFAR-10 does")
        return held


__all__ = ["Cifar10"]
