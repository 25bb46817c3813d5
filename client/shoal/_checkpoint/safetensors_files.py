"""Safetensors files of other frameworks: import of tensors as variables, and export of variables."""

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shoal import errors
from shoal._checkpoint.slices import VALUE, SavedVariables
from shoal._checkpoint.tensors import LENGTH_BYTES, Contents, Tensor, decode_header, encode_header, header_bytes
from shoal._numerics import SUPPORTED_DTYPES, storage_dtype
from shoal._system import atomic_write
from shoal.variables import Variable

# Bytes that are read or written at a time.
PIECE_BYTES = 16 << 20
# First bytes of files that people take for safetensors files.
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive, such as the .npz file of `shoal pull`, or a file of torch.save",
    b"\x93NUMPY": "a .npy file",
    b"\x89HDF": "an HDF5 file",
    b"\x80": "a pickle",
}


class SafetensorsFile:
    """A safetensors file of any writer.

    Args:
        path: the file.
        skip: names of tensors to leave out.

    Raises:
        StorageFailed: the file cannot be read.
        CorruptCheckpoint: on entry, if the file is not a safetensors file, or is damaged.

    Attributes:
        metadata: texts by name. Known on entry.
    """

    metadata: Mapping[str, str]

    def __init__(self, path: Path, skip: Collection[str] = ()) -> None:
        self._path, self._skip = path, frozenset(skip)
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise errors.StorageFailed(f"{path} cannot be read: {error.strerror}", file=str(path)) from None

    def __enter__(self) -> "SafetensorsFile":
        try:
            nbytes = os.fstat(self._file.fileno()).st_size
            beginning = self._file.read(LENGTH_BYTES)
            _check_format(beginning, self._file.peek(1)[:1], str(self._path))
            header = beginning + self._file.read(header_bytes(beginning, nbytes, str(self._path)) - LENGTH_BYTES)
            contents = decode_header(header, nbytes, str(self._path))
            self._tensors, self.metadata = self._wanted(contents), contents.metadata
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def variables(self) -> dict[str, Variable]:
        """Returns a variable for each tensor.

        Raises:
            IncompatibleCheckpoint: a tensor has a dtype that variables do not support.
        """
        found = {}
        for name, tensor in self._tensors.items():
            if tensor.dtype not in SUPPORTED_DTYPES:
                kinds = ", ".join(map(str, SUPPORTED_DTYPES))
                raise errors.IncompatibleCheckpoint(
                    f"{self._path}: tensor {name!r} is {tensor.dtype}, but variables are {kinds}; leave it out (--skip "
                    f"{name}) or convert it",
                    tensor=name,
                )
            counts = tensor.dtype == np.int64  # integers are not trained
            found[name] = Variable(
                tensor.shape,
                dtype=tensor.dtype.name,
                trainable=not counts,
                aggregation="last" if counts else None,
            )
        return found

    def arrays(self) -> dict[str, np.ndarray]:
        """Reads all tensors."""
        found = {}
        for name, tensor in self._tensors.items():
            self._file.seek(tensor.start)
            found[name] = np.frombuffer(self._file.read(tensor.stop - tensor.start), tensor.dtype).reshape(tensor.shape)
        return found

    def data(self) -> Iterator[memoryview]:
        """Yields the bytes of the tensors in the dtypes that servers store."""
        for tensor in self._tensors.values():
            kept = storage_dtype(tensor.dtype)
            step = PIECE_BYTES // tensor.dtype.itemsize * tensor.dtype.itemsize
            for start in range(tensor.start, tensor.stop, step):
                self._file.seek(start)
                piece = np.frombuffer(self._file.read(min(step, tensor.stop - start)), tensor.dtype)
                yield piece.astype(kept, copy=False).view(np.uint8).data

    def _wanted(self, contents: Contents) -> dict[str, Tensor]:
        if unknown := self._skip - contents.tensors.keys():
            raise errors.BadRequest(f"{self._path} has no tensor {min(unknown)!r}, which --skip names")
        return {name: tensor for name, tensor in contents.tensors.items() if name not in self._skip}


def _check_format(length: bytes, header: bytes, where: str) -> None:
    """Checks that a file begins like a safetensors file: with the length of a header, and a header that opens with {.

    Args:
        length: the first `LENGTH_BYTES` bytes of the file.
        header: the byte after them.
        where: the file's name, for messages.

    Raises:
        CorruptCheckpoint: the file is of another format. The message names the format, if it is a known one.
    """
    if header == b"{":
        return
    found = next((name for magic, name in _OTHER_FORMATS.items() if length.startswith(magic)), "")
    seems = f" (it looks like {found})" if found else ""
    raise errors.CorruptCheckpoint(
        f"{where} is not a safetensors file{seems}; name the output of `shoal export`, or save the tensors with "
        "save_file of the package safetensors",
        file=where,
    )


def rows(saved: SavedVariables, variable: str, dtype: np.dtype, shape: tuple[int, ...]) -> Iterator[memoryview]:
    """Yields the bytes of a saved variable in the layout of a safetensors file.

    Args:
        saved: the variables of a checkpoint.
        variable: the variable's name.
        dtype: its saved dtype.
        shape: its shape.

    Raises:
        CorruptCheckpoint: the checkpoint is damaged.
    """
    width = max(1, math.prod(shape[1:]))
    count = math.prod(shape) // width
    step = max(1, PIECE_BYTES // (width * dtype.itemsize))
    for start in range(0, count, step):
        piece = np.empty(min(step, count - start) * width, dtype)
        saved.read((VALUE, variable, start, piece))
        yield piece.view(np.uint8).data


def value_pieces(saved: SavedVariables, checkpoint: str, step: int) -> Iterator[Any]:
    """Yields the bytes of a safetensors file with the values of all variables.

    Args:
        saved: the variables of a checkpoint.
        checkpoint: its name, JOB/NUMBER, for the metadata.
        step: its step, for the metadata.
    """
    tensors = [(variable, dtype, shape) for variable, (shape, dtype) in sorted(saved.variables.items())]
    yield encode_header(tensors, {"format": "pt", "shoal": checkpoint, "step": str(step)})
    for variable, dtype, shape in tensors:
        yield from rows(saved, variable, dtype, shape)


def write_pieces(file: Path | BinaryIO, pieces: Iterable[Any]) -> None:
    """Writes a file. A file at a path is written atomically. An open file may keep a part if writing fails.

    Raises:
        StorageFailed: the file cannot be written.
    """
    try:
        if isinstance(file, Path):
            with atomic_write(file) as unfinished, unfinished.open("xb") as out:
                out.writelines(pieces)
                out.flush()
                os.fsync(out.fileno())
        else:
            file.writelines(pieces)
            file.flush()
    except OSError as error:
        where = file if isinstance(file, Path) else getattr(file, "name", "the file")
        raise errors.StorageFailed(f"{where} cannot be written: {error.strerror or error}", file=str(where)) from None


__all__ = ["SafetensorsFile", "rows", "value_pieces", "write_pieces"]
