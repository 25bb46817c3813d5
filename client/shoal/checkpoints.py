"""Checkpoints as users see them: what is in a folder of them, and the way to and from files of other frameworks.

It reads and writes files alone: no cluster has to be there.
"""

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format

from shoal import errors
from shoal._checkpoint.catalogue import Catalogue, path_of
from shoal._checkpoint.files import Named, write_tensors
from shoal._checkpoint.folders import open_folder
from shoal._checkpoint.manifest import Manifest
from shoal._checkpoint.slices import VALUE, SavedVariables, tensor_name
from shoal._checkpoint.tensors import LENGTH_BYTES, Contents, decode_header, encode_header, header_bytes
from shoal._elements import SUPPORTED_DTYPES, storage_dtype
from shoal._whole_file import written_whole
from shoal.variables import Variable

# Read and written at a time.
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is whole, by its manifest.

    Attributes:
        job: whose it is.
        number: counts a job's checkpoints, from 1.
        created_at: seconds of Unix time.
        step: the one to go on with.
        version: updates that the variables had seen.
        nbytes: of all files.
        variables: shape and dtype, by name.
    """

    job: str
    number: int
    created_at: float
    step: int
    version: int
    nbytes: int
    variables: Mapping[str, tuple[tuple[int, ...], str]]

    def __str__(self) -> str:
        return f"{self.job}/{self.number}"


class Checkpoints:
    """A folder of checkpoints.

    A checkpoint is named as JOB (the newest whole one) or JOB/NUMBER.

    Args:
        url: of the folder: a path of this machine, file://PATH, or of an object store: s3://BUCKET/PREFIX.

    Raises:
        BadRequest: the folder is none that Shoal can use.
    """

    def __init__(self, url: str) -> None:
        self._catalogue = Catalogue(open_folder(url))

    def list(self, job: str = "") -> Iterator[Checkpoint | errors.ShoalError]:
        """The checkpoints of a job, or of all, newest first; of one that cannot be used, why.

        Raises:
            StorageFailed: the folder cannot be read.
        """
        for name in [job] if job else self._catalogue.jobs():
            for found in self._catalogue.newest(name):
                yield found if isinstance(found, errors.ShoalError) else _described(found)

    def show(self, name: str) -> Checkpoint:
        """One checkpoint.

        Raises:
            UnknownCheckpoint: there is none.
            CorruptCheckpoint, IncompatibleCheckpoint: it cannot be used.
        """
        return _described(self._manifest(name))

    def verify(self, name: str) -> Checkpoint:
        """Reads all of a checkpoint.

        Raises:
            CorruptCheckpoint: it is damaged; the message says where.
            UnknownCheckpoint, IncompatibleCheckpoint: as for `show`.
        """
        manifest = self._manifest(name)
        self._catalogue.verify(manifest)
        return _described(manifest)

    def remove(self, name: str) -> None:
        """Removes a checkpoint, which is named with its number; a damaged one, too.

        Raises:
            UnknownCheckpoint: there is none.
        """
        job, number = _parsed(name)
        if number is None:
            raise errors.BadRequest(f"{name!r} names no checkpoint to remove: say which, as {job}/NUMBER")
        if number not in self._catalogue.numbers(job):
            raise self._unknown(name)
        self._catalogue.remove(job, number)

    def read(self, name: str) -> dict[str, np.ndarray]:
        """The values of all variables, by name; halves as the float32 that servers keep.

        Raises:
            UnknownCheckpoint, CorruptCheckpoint, IncompatibleCheckpoint: as for `show`.
        """
        with SavedVariables(self._catalogue.folder, self._manifest(name)) as saved:
            arrays = {variable: np.empty(shape, dtype) for variable, (shape, dtype) in saved.variables.items()}
            saved.read(*((VALUE, variable, 0, array.reshape(-1)) for variable, array in arrays.items()))
            return arrays

    def export(self, name: str, file: str | os.PathLike[str]) -> Checkpoint:
        """Writes the values of all variables to one safetensors file, which any framework reads.

        Args:
            name: of the checkpoint.
            file: written whole or not at all; halves are the float32 that servers keep.

        Raises:
            UnknownCheckpoint, CorruptCheckpoint, IncompatibleCheckpoint: as for `show`.
            StorageFailed: the file cannot be written.
        """
        manifest = self._manifest(name)
        with SavedVariables(self._catalogue.folder, manifest) as saved:
            tensors = [(variable, dtype, shape) for variable, (shape, dtype) in sorted(saved.variables.items())]
            metadata = {"format": "pt", "shoal": f"{manifest.job}/{manifest.number}", "step": str(manifest.step)}

            def pieces() -> Iterator[Any]:
                yield encode_header(tensors, metadata)
                for variable, dtype, shape in tensors:
                    yield from _rows(saved, variable, dtype, shape)

            _write(Path(file), pieces())
        return _described(manifest)

    def import_file(self, file: str | os.PathLike[str], job: str) -> Checkpoint:
        """Makes a checkpoint of a safetensors file, to begin a job with.

        Args:
            file: of any framework; its tensors are float32, float64, float16, bfloat16 or int64.
            job: the name that the checkpoint is to be found by.

        Raises:
            StorageFailed: the file cannot be read, or the checkpoint not be written.
            CorruptCheckpoint: it is no safetensors file.
            IncompatibleCheckpoint: a tensor is of a type that Shoal has no variables of.
        """
        number = self._catalogue.next_number(job)
        with _Foreign(Path(file)) as foreign:
            variables = foreign.variables()
            path = (*path_of(job, number), "shard-00000.safetensors")
            tensors: list[Named] = [
                (tensor_name(VALUE, 0, name), storage_dtype(variable.dtype), variable.shape)
                for name, variable in variables.items()
            ]
            entry = write_tensors(self._catalogue.folder, path, tensors, foreign.data(), {"job": job})
        manifest = Manifest(
            job=job,
            number=number,
            created_at=time.time(),
            step=0,
            version=0,
            spec={},
            variables=tuple(json_format.MessageToDict(it.to_proto(name)) for name, it in variables.items()),
            files=(entry,),
            writer=version("shoal"),
        )
        self._catalogue.publish(manifest)
        return _described(manifest)

    def _manifest(self, name: str) -> Manifest:
        job, number = _parsed(name)
        if number is not None:
            return self._catalogue.manifest(job, number)
        found = next(self._catalogue.newest(job), None)
        if found is None:
            raise self._unknown(name)
        if isinstance(found, errors.ShoalError):
            raise found
        return found

    def _unknown(self, name: str) -> errors.UnknownCheckpoint:
        return errors.UnknownCheckpoint(
            f"there is no checkpoint {name} in {self._catalogue.folder.url}; `shoal checkpoints ls` lists them",
            checkpoint=name,
        )


class _Foreign:
    """A safetensors file that somebody else has written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise errors.StorageFailed(f"{path} cannot be read: {error.strerror}", file=str(path)) from None

    def __enter__(self) -> "_Foreign":
        try:
            nbytes = os.fstat(self._file.fileno()).st_size
            beginning = self._file.read(LENGTH_BYTES)
            header = beginning + self._file.read(header_bytes(beginning, nbytes, str(self._path)) - LENGTH_BYTES)
            self._contents: Contents = decode_header(header, nbytes, str(self._path))
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def variables(self) -> dict[str, Variable]:
        """What Shoal makes of the tensors."""
        found = {}
        for name, tensor in self._contents.tensors.items():
            if tensor.dtype not in SUPPORTED_DTYPES:
                kinds = ", ".join(map(str, SUPPORTED_DTYPES))
                raise errors.IncompatibleCheckpoint(
                    f"{self._path}: tensor {name!r} is {tensor.dtype}; variables are {kinds}", tensor=name
                )
            counts = tensor.dtype == np.int64  # such are not trained
            found[name] = Variable(
                tensor.shape,
                dtype=tensor.dtype.name,
                trainable=not counts,
                aggregation="last" if counts else None,
            )
        return found

    def data(self) -> Iterator[memoryview]:
        """The tensors' bytes, as servers keep them."""
        for tensor in self._contents.tensors.values():
            kept = storage_dtype(tensor.dtype)
            step = _PIECE_BYTES // tensor.dtype.itemsize * tensor.dtype.itemsize
            for start in range(tensor.start, tensor.stop, step):
                self._file.seek(start)
                piece = np.frombuffer(self._file.read(min(step, tensor.stop - start)), tensor.dtype)
                yield piece.astype(kept, copy=False).view(np.uint8).data


def _rows(saved: SavedVariables, variable: str, dtype: np.dtype, shape: tuple[int, ...]) -> Iterator[memoryview]:
    width = max(1, math.prod(shape[1:]))
    rows = math.prod(shape) // width
    step = max(1, _PIECE_BYTES // (width * dtype.itemsize))
    for start in range(0, rows, step):
        piece = np.empty(min(step, rows - start) * width, dtype)
        saved.read((VALUE, variable, start, piece))
        yield piece.view(np.uint8).data


def _write(file: Path, pieces: Iterator[Any]) -> None:
    try:
        with written_whole(file) as unfinished, unfinished.open("xb") as out:
            for piece in pieces:
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise errors.StorageFailed(f"{file} cannot be written: {error.strerror or error}", file=str(file)) from None


def _parsed(name: str) -> tuple[str, int | None]:
    job, slash, number = name.partition("/")
    if slash and not (number.isascii() and number.isdecimal()):
        raise errors.BadRequest(f"{name!r} names no checkpoint: JOB is its newest one, JOB/NUMBER another")
    return job, int(number) if slash else None


def _described(manifest: Manifest) -> Checkpoint:
    variables = {}
    for it in manifest.variables:
        shape = tuple(int(size) for size in it.get("shape", ()))
        variables[str(it.get("name", ""))] = (shape, str(it.get("dtype", "")).lower())
    return Checkpoint(
        manifest.job,
        manifest.number,
        manifest.created_at,
        manifest.step,
        manifest.version,
        manifest.nbytes,
        variables,
    )


__all__ = ["Checkpoint", "Checkpoints"]
