"""Checkpoints as users see them: what is in a folder of them, and the way to and from files of other frameworks.

It reads and writes files alone: no cluster has to be there.
"""

import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from google.protobuf import json_format

from shoal import errors
from shoal._checkpoint import (
    VALUE,
    Catalogue,
    Manifest,
    Named,
    SafetensorsFile,
    SavedVariables,
    encode_header,
    open_storage,
    path_of,
    rows,
    tensor_name,
    write_tensors,
)
from shoal._numerics import storage_dtype
from shoal._system import atomic_write
from shoal.checkpoint_policy import JOB_NAME, CheckpointChoice
from shoal.status import Evaluation
from shoal.v1 import job_pb2

T = TypeVar("T")


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
        passed_by: where JOB or JOB/best was asked for: newer ones that are damaged, each with what is wrong.
        evaluation: the job's best so far, which its variables were taken at; None: they were taken at another time.
    """

    job: str
    number: int
    created_at: float
    step: int
    version: int
    nbytes: int
    variables: Mapping[str, tuple[tuple[int, ...], str]]
    passed_by: tuple[str, ...] = ()
    evaluation: Evaluation | None = None

    def __str__(self) -> str:
        return f"{self.job}/{self.number}"


class Checkpoints:
    """A folder of checkpoints.

    A checkpoint is named as JOB, JOB/NUMBER or JOB/best. JOB is the newest whole one, JOB/best the newest that was
    taken at the job's best evaluation; damaged ones are passed by, as by a job that begins with it.

    Args:
        url: of the folder: a path of this machine, file://PATH, or of an object store: s3://BUCKET/PREFIX.

    Raises:
        BadRequest: the folder is none that Shoal can use.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self._catalogue = Catalogue(open_storage(os.fspath(url)))

    @property
    def url(self) -> str:
        """The folder."""
        return self._catalogue.folder.url

    def list(self, job: str = "") -> Iterator[Checkpoint | errors.ShoalError]:
        """The checkpoints of a job, or of all, newest first; of one that cannot be used, why.

        Raises:
            BadRequest: that is no job's name.
            StorageFailed: the folder cannot be read.
        """
        for name in [_job(job)] if job else self._catalogue.jobs():
            for found in self._catalogue.newest(name):
                yield found if isinstance(found, errors.ShoalError) else described(found)

    def torn(self, job: str = "") -> Iterator[str]:
        """What is there in part, of a job or of all, as JOB/NUMBER: being written, or left by a writer that died.

        Raises:
            BadRequest, StorageFailed: as for `list`.
        """
        for name in [_job(job)] if job else self._catalogue.folder.names(()):
            for number in self._catalogue.torn(name):
                yield f"{name}/{number}"

    def show(self, name: str) -> Checkpoint:
        """One checkpoint.

        Raises:
            UnknownCheckpoint: there is none.
            CorruptCheckpoint, IncompatibleCheckpoint: it cannot be used; of JOB and JOB/best: none can.
        """
        return self._used(name, lambda _: None)[1]

    def verify(self, name: str) -> Checkpoint:
        """Reads all of a checkpoint.

        Raises:
            CorruptCheckpoint: it is damaged; the message says where.
            UnknownCheckpoint, IncompatibleCheckpoint: as for `show`.
        """
        return self._used(name, self._catalogue.verify)[1]

    def remove(self, name: str) -> None:
        """Removes a checkpoint, which is named with its number; a damaged or torn one, too.

        Raises:
            UnknownCheckpoint: there is none.
        """
        choice = _parsed(name)
        if not choice.number:
            raise errors.BadRequest(
                f"{name!r} names no checkpoint to remove: say which, as {choice.job}/NUMBER, or that all are to go: "
                "`shoal checkpoints rm --all`, or `remove_all`"
            )
        if choice.number not in self._there(choice.job):
            raise self._catalogue.unknown(name)
        self._catalogue.remove(choice.job, choice.number)

    def remove_all(self, job: str) -> tuple[str, ...]:
        """Removes all checkpoints of a job, damaged and torn ones, too; gives their names.

        Raises:
            UnknownCheckpoint: it has none.
        """
        numbers = self._there(_job(job))
        if not numbers:
            raise self._catalogue.unknown(job)
        for number in numbers:
            self._catalogue.remove(job, number)
        return tuple(f"{job}/{number}" for number in numbers)

    def read(self, name: str) -> dict[str, np.ndarray]:
        """The values of all variables, by name; halves as the float32 that servers keep.

        Of damaged ones that were passed by there is a warning.

        Raises:
            UnknownCheckpoint, CorruptCheckpoint, IncompatibleCheckpoint: as for `show`.
        """
        arrays, found = self._used(name, self._values)
        for problem in found.passed_by:
            warnings.warn(f"{found} is read in place of {problem}", stacklevel=2)
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
        return self._used(name, lambda manifest: self._export(manifest, Path(file)))[1]

    def import_file(self, file: str | os.PathLike[str], job: str, *, skip: Collection[str] = ()) -> Checkpoint:
        """Makes a checkpoint of a safetensors file, to begin a job with.

        Args:
            file: of any framework; its tensors are float32, float64, float16, bfloat16 or int64.
            job: the name that the checkpoint is to be found by: one that a job may have, and none has that is running.
            skip: names of tensors to leave out.

        Raises:
            BadRequest: no job may have that name, or no tensor has a name that is to be left out.
            StorageFailed: the file cannot be read, or the checkpoint not be written.
            CorruptCheckpoint: it is no safetensors file.
            IncompatibleCheckpoint: a tensor is of a type that Shoal has no variables of.
            JobExists: a job of that name took checkpoints meanwhile, and the one that was made is lost.
        """
        number = self._catalogue.next_number(_job(job))
        with SafetensorsFile(Path(file), skip) as foreign:
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
        self._check_kept(manifest)
        return described(manifest)

    def _used(self, name: str, use: Callable[[Manifest], T]) -> tuple[T, Checkpoint]:
        """What is made of a checkpoint, and which it was: of JOB and JOB/best the newest that can be used."""
        choice = _parsed(name)
        passed_by: list[str] = []
        for found in self._candidates(choice):
            try:
                if isinstance(found, errors.ShoalError):
                    raise found
                return use(found), described(found, tuple(passed_by))
            except errors.UnknownCheckpoint:  # or, without a number, it was removed meanwhile
                if choice.number:
                    raise self._catalogue.unknown(name) from None
            except errors.CorruptCheckpoint as error:
                if choice.number:
                    raise
                which = f"{found.job}/{found.number}" if isinstance(found, Manifest) else error.details["checkpoint"]
                passed_by.append(f"{which}: {error.message}")
        if passed_by:
            raise errors.CorruptCheckpoint(
                f"no checkpoint of {name} can be used: {'; '.join(passed_by)}", checkpoint=name
            )
        raise self._catalogue.unknown(name)

    def _candidates(self, choice: CheckpointChoice) -> Iterator[Manifest | errors.ShoalError]:
        """What a user may mean, the most wanted first."""
        if choice.number:
            return iter([self._catalogue.found(choice.job, choice.number)])
        return self._catalogue.best(choice.job) if choice.best else self._catalogue.newest(choice.job)

    def _there(self, job: str) -> tuple[int, ...]:
        """All that can be removed, oldest first: whole, damaged and torn."""
        return tuple(sorted({*self._catalogue.torn(job), *self._catalogue.numbers(job)}))

    def _values(self, manifest: Manifest) -> dict[str, np.ndarray]:
        with SavedVariables(self._catalogue.folder, manifest) as saved:
            arrays = {variable: np.empty(shape, dtype) for variable, (shape, dtype) in saved.variables.items()}
            saved.read(*((VALUE, variable, 0, array.reshape(-1)) for variable, array in arrays.items()))
            return arrays

    def _export(self, manifest: Manifest, file: Path) -> None:
        with SavedVariables(self._catalogue.folder, manifest) as saved:
            tensors = [(variable, dtype, shape) for variable, (shape, dtype) in sorted(saved.variables.items())]
            metadata = {"format": "pt", "shoal": f"{manifest.job}/{manifest.number}", "step": str(manifest.step)}

            def pieces() -> Iterator[Any]:
                yield encode_header(tensors, metadata)
                for variable, dtype, shape in tensors:
                    yield from rows(saved, variable, dtype, shape)

            _write(file, pieces())

    def _check_kept(self, manifest: Manifest) -> None:
        """Looks at an import again: until it was published, a job of its name took it for a torn one of its own.

        Raises:
            JobExists: the job has swept its files, or written others there. A manifest without files is taken back.
        """
        job, number = manifest.job, manifest.number
        try:
            if self._catalogue.manifest(job, number) == manifest:
                with SavedVariables(self._catalogue.folder, manifest):
                    return
        except errors.UnknownCheckpoint:
            pass
        except errors.CorruptCheckpoint:
            self._catalogue.remove(job, number)
        raise errors.JobExists(
            f"{job}/{number} is not imported: a job {job} takes checkpoints, and cleared it away meanwhile; choose "
            "another name, or wait for the job's end",
            job=job,
        )


def _write(file: Path, pieces: Iterator[Any]) -> None:
    try:
        with atomic_write(file) as unfinished, unfinished.open("xb") as out:
            for piece in pieces:
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise errors.StorageFailed(f"{file} cannot be written: {error.strerror or error}", file=str(file)) from None


def _parsed(name: str) -> CheckpointChoice:
    try:
        return CheckpointChoice.parse(name)
    except errors.InvalidJob as error:  # which it is where a job is submitted
        raise errors.BadRequest(error.message) from None


def _job(name: str) -> str:
    if not JOB_NAME.fullmatch(name):
        raise errors.BadRequest(
            f"{name!r} is no job's name: give JOB alone, 1 to 63 characters of a-z, 0-9 and -, starting with a letter"
        )
    return name


def described(manifest: Manifest, passed_by: tuple[str, ...] = ()) -> Checkpoint:
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
        passed_by,
        _evaluation(manifest),
    )


def _evaluation(manifest: Manifest) -> Evaluation | None:
    if not manifest.evaluation:
        return None
    message = json_format.ParseDict(dict(manifest.evaluation), job_pb2.Evaluation(), ignore_unknown_fields=True)
    return Evaluation.from_proto(message)


__all__ = ["Checkpoint", "Checkpoints"]
