"""Slices of variables in the files of a checkpoint, and reads of any rows of a variable.

A tensor in a shard's file is a slice of one variable or of one of its optimizer slots: the rows from `row_start`. Its
name consists of kind, row and variable: "value/0/dense/kernel" or "exp_avg/512/dense/kernel".
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from shoal import errors
from shoal._checkpoint.catalogue import path_of
from shoal._checkpoint.manifest import FileEntry, Manifest
from shoal._checkpoint.storage import CheckpointStorage
from shoal._checkpoint.tensor_files import Piece, TensorReader, open_tensors
from shoal._checkpoint.tensors import decode_entry, entry_of
from shoal._system import listed

VALUE = "value"
_ROW_DIGITS = 20  # rows fit 64 bits
# Rows to read: the kind (VALUE or a slot's name), the variable, the first row, and the memory to fill. The memory is
# flat, has the saved dtype and holds a whole number of existing rows. An unknown kind or variable is a KeyError.
Rows = tuple[str, str, int, np.ndarray]


def tensor_name(kind: str, row_start: int, variable: str) -> str:
    """Returns the name of a slice in a file.

    Args:
        kind: VALUE, or the optimizer slot's name.
        row_start: the first row.
        variable: the variable's name.
    """
    return f"{kind}/{row_start}/{variable}"


@dataclass(frozen=True, slots=True)
class _Saved:
    """A slice in a file."""

    row_start: int
    rows: int
    shape: tuple[int, ...]
    dtype: np.dtype
    name: str
    file: FileEntry


class SavedVariables:
    """The variables and slots of a checkpoint. `with` closes its files.

    The constructor opens all files, so that damage is found early. If `lazily` is set, a file is opened only when rows
    are read from it. Manifests of earlier versions do not say what is in a file, so then all files are opened at once.

    Args:
        folder: the checkpoint storage.
        manifest: the manifest of the checkpoint.
        lazily: whether to open only the files that rows are read from.

    Raises:
        CorruptCheckpoint: a file is missing or damaged, or the slices do not fit together.
        StorageFailed: a file cannot be read.
    """

    def __init__(self, folder: CheckpointStorage, manifest: Manifest, *, lazily: bool = False) -> None:
        self._folder, self._path = folder, path_of(manifest.job, manifest.number)
        self._where = "/".join((folder.url, *self._path))
        self._slices: dict[tuple[str, str], list[_Saved]] = {}
        self._readers: dict[str, TensorReader] = {}  # the open files, by name
        self._opened = ExitStack()
        try:
            for entry in manifest.files:
                if not lazily:
                    self._reader(entry)
                self._index(entry)
            for saved in self._slices.values():
                saved.sort(key=lambda it: it.row_start)
            self._check()
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> "SavedVariables":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def kinds(self, variable: str) -> list[str]:
        """Returns VALUE and the saved slots of a variable, or an empty list if the variable was not saved."""
        return [kind for kind, name in self._slices if name == variable]

    @property
    def slots(self) -> list[str]:
        """Names of the saved slots."""
        return sorted({kind for kind, _ in self._slices} - {VALUE})

    @property
    def variables(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of the values of each variable."""
        return self._shapes(VALUE)

    def arrays(self, kind: str) -> dict[str, np.ndarray]:
        """Returns the values of all variables, or one of their slots, by variable.

        Args:
            kind: VALUE, or the slot's name.

        Raises:
            CorruptCheckpoint: a file is damaged.
        """
        found = {variable: np.empty(shape, dtype) for variable, (shape, dtype) in self._shapes(kind).items()}
        self.read(*((kind, variable, 0, array.reshape(-1)) for variable, array in found.items()))
        return found

    def _shapes(self, wanted: str) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        found = {}
        for (kind, variable), saved in self._slices.items():
            if kind == wanted:
                first = saved[0]
                rows = sum(it.rows for it in saved)
                found[variable] = ((rows, *first.shape[1:]) if first.shape else (), first.dtype)
        return found

    def read(self, *wanted: Rows) -> None:
        """Reads rows of variables from all slices that have them, file by file.

        Raises:
            CorruptCheckpoint: a file is damaged.
        """
        pieces: dict[TensorReader, list[Piece]] = {}
        for rows in wanted:
            for reader, piece in self._places(*rows):
                pieces.setdefault(reader, []).append(piece)
        for reader, those in pieces.items():
            reader.fill(those)

    def _places(
        self, kind: str, variable: str, row_start: int, target: np.ndarray
    ) -> Iterator[tuple[TensorReader, Piece]]:
        saved = self._slices[kind, variable]
        width = math.prod(saved[0].shape[1:])
        rows = target.size // width if width else 0
        index = bisect_right([it.row_start for it in saved], row_start) - 1
        done = 0
        while done < rows:
            it = saved[index]
            first = row_start + done - it.row_start
            count = min(rows - done, it.rows - first)
            reader = self._reader(it.file)
            yield reader, reader.place(it.name, target[done * width : (done + count) * width], first * width)
            done, index = done + count, index + 1

    def _index(self, entry: FileEntry) -> None:
        if entry.tensors:
            tensors = [decode_entry(it, self._where) for it in entry.tensors]
        else:
            found = self._reader(entry).contents.tensors
            tensors = [(name, tensor.dtype, tensor.shape) for name, tensor in found.items()]
        for name, dtype, shape in tensors:
            kind, row, variable = self._parsed(name)
            if 0 in shape:
                raise self._corrupt(f"tensor {name!r} has the shape {shape}, but variables are not empty")
            rows = shape[0] if shape else 1
            saved = _Saved(row, rows, shape, dtype, name, entry)
            self._slices.setdefault((kind, variable), []).append(saved)

    def _reader(self, entry: FileEntry) -> TensorReader:
        """Opens a file, once."""
        if entry.name not in self._readers:
            path = (*self._path, entry.name)
            reader = self._opened.enter_context(open_tensors(self._folder, path, entry))
            found = [entry_of(name, it.dtype, it.shape) for name, it in reader.contents.tensors.items()]
            if entry.tensors and sorted(found) != sorted(entry.tensors):
                raise self._corrupt(f"{entry.name} does not have the tensors that the manifest lists")
            self._readers[entry.name] = reader
        return self._readers[entry.name]

    def _parsed(self, name: str) -> tuple[str, int, str]:
        kind, slash, rest = name.partition("/")
        row, another, variable = rest.partition("/")
        if not (slash and another and row.isascii() and row.isdecimal() and len(row) < _ROW_DIGITS):
            raise self._corrupt(f"tensor {name!r} is not named as a slice of a variable")
        return kind, int(row), variable

    def _check(self) -> None:
        for (kind, variable), saved in self._slices.items():
            end = 0
            for it in saved:
                if it.row_start != end:
                    raise self._corrupt(f"rows of {variable!r} ({kind}) are missing or duplicate at row {end}")
                if it.shape[1:] != saved[0].shape[1:] or it.dtype != saved[0].dtype:
                    raise self._corrupt(f"the slices of {variable!r} ({kind}) do not fit together")
                end += it.rows

    def _corrupt(self, what: str) -> errors.CorruptCheckpoint:
        return errors.CorruptCheckpoint(f"{self._where} is damaged: {what}", checkpoint=self._where)


def restore_problem(
    wanted: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    saved: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    *,
    partial: bool,
    optimizer: str = "",
) -> str:
    """Returns why a job cannot start from a checkpoint, and what to do; "" if it can.

    Args:
        wanted: shape and stored dtype of each variable of the job.
        saved: shape and dtype of each saved variable.
        partial: whether only the variables that both have are restored.
        optimizer: how the optimizers differ; "" means that they do not.
    """
    both = [name for name in wanted if name in saved]
    changed = [
        f"{name!r} was saved as {saved[name][1]}{list(saved[name][0])}, but is {wanted[name][1]}{list(wanted[name][0])}"
        for name in both
        if wanted[name] != saved[name]
    ]
    missing = [f"{name!r} was not saved" for name in wanted if name not in saved]
    extra = [f"{name!r} was saved, but the job has no such variable" for name in saved if name not in wanted]
    one_sided = [] if partial else missing + extra
    if not (optimizer or changed or one_sided):
        return ""
    if partial:
        advice = "to initialize a changed variable again, give it another name in the program"
    elif changed:
        advice = (
            "submit the job with the settings of the checkpoint's job, or give the changed variables other names in "
            "the program and use a partial restore"
        )
    elif one_sided:
        advice = "to leave out variables that only one side has, use a partial restore"
    else:
        advice = "use the same optimizer, or a partial restore, which reads only values"
    reasons = [*filter(None, [optimizer]), *changed, *one_sided]
    return f"{listed(reasons)}; {advice}"


__all__ = ["VALUE", "Rows", "SavedVariables", "restore_problem", "tensor_name"]
