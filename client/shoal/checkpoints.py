"""Checkpoints for users: list, read, remove, and convert to and from files of other frameworks.

These calls access the checkpoint storage directly and need no running cluster.
"""

import builtins
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from google.protobuf import json_format

from shoal import errors
from shoal._checkpoint import (
    VALUE,
    Catalogue,
    Manifest,
    SafetensorsFile,
    SavedVariables,
    check_folder,
    imported,
    open_storage,
    read_state,
    saved_state,
    state_pieces,
    value_pieces,
    write_pieces,
)
from shoal._system import check_type
from shoal.checkpoint_policy import JOB_NAME, CheckpointChoice
from shoal.optim import Optimizer, OptimizerState
from shoal.status import Evaluation
from shoal.v1 import job_pb2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint, as its manifest describes it.

    Attributes:
        job: name of the job that took it.
        number: its number within the job, from 1.
        created_at: Unix time in seconds.
        step: the step at which a restored job continues: in synchronous mode the open step, otherwise that of the
            slowest worker.
        version: number of updates that the variables had received.
        nbytes: size of all its files, in bytes.
        variables: shape and dtype of each variable, by name.
        skipped: for JOB and JOB/best, the newer checkpoints that are damaged, each with the reason.
        evaluation: the evaluation that this checkpoint was taken for, because its result was the best so far. None
            means that the checkpoint was not taken for an evaluation.
    """

    job: str
    number: int
    created_at: float
    step: int
    version: int
    nbytes: int
    variables: Mapping[str, tuple[tuple[int, ...], str]]
    skipped: tuple[str, ...] = ()
    evaluation: Evaluation | None = None

    def __str__(self) -> str:
        return f"{self.job}/{self.number}"


class Checkpoints:
    """The checkpoints of a storage: a local folder or an object store.

    The name of a checkpoint is JOB, JOB/NUMBER or JOB/best. JOB means the newest complete checkpoint of the job.
    JOB/best means the newest one that was taken at a best evaluation. JOB and JOB/best skip damaged checkpoints, here
    and in `Job.restore`.

    Args:
        url: a path on this machine, file://PATH, or s3://BUCKET/PREFIX.

    Raises:
        BadRequest: Shoal cannot use this kind of URL.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        check_type("url", url, (str, os.PathLike), "a folder or a URL, such as 's3://bucket/runs'")
        self._catalogue = Catalogue(open_storage(os.fspath(url)))

    @property
    def url(self) -> str:
        """The URL of the storage."""
        return self._catalogue.folder.url

    def list(self, job: str = "") -> builtins.list[Checkpoint | errors.ShoalError]:
        """Returns the checkpoints of a job, newest first, or of all jobs, one job after the other.

        Args:
            job: name of the job. "" means all jobs.

        Returns:
            Each checkpoint, or the error that makes it unusable.

        Raises:
            BadRequest: `job` is not a valid job name.
            StorageFailed: the storage cannot be read, or is a local folder that does not exist.
        """
        check_folder(self.url)
        names = [_job(job)] if job else self._catalogue.jobs()
        every = (found for name in names for found in self._catalogue.newest(name))
        return [found if isinstance(found, errors.ShoalError) else described(found) for found in every]

    def incomplete(self, job: str = "") -> builtins.list[str]:
        """Returns the names of incomplete checkpoints as JOB/NUMBER: in progress, or left behind by a crash.

        Args:
            job: name of the job. "" means all jobs.

        Raises:
            BadRequest: `job` is not a valid job name.
            StorageFailed: the storage cannot be read, or is a local folder that does not exist.
        """
        check_folder(self.url)
        names = [_job(job)] if job else self._catalogue.folder.names(())
        return [f"{name}/{number}" for name in names for number in self._catalogue.incomplete(name)]

    def show(self, name: str) -> Checkpoint:
        """Returns one checkpoint.

        Args:
            name: JOB, JOB/NUMBER or JOB/best.

        Raises:
            BadRequest: `name` has another form.
            UnknownCheckpoint: there is no such checkpoint.
            CorruptCheckpoint: the checkpoint is damaged. For JOB and JOB/best, every checkpoint that the name can mean
                is damaged.
            IncompatibleCheckpoint: it was written by a later version of Shoal.
        """
        return self._used(name, lambda _: None)[1]

    def verify(self, name: str) -> Checkpoint:
        """Reads all files of a checkpoint and compares their checksums.

        Args:
            name: JOB, JOB/NUMBER or JOB/best.

        Returns:
            The checkpoint.

        Raises:
            CorruptCheckpoint: it is damaged. The message says where.
            BadRequest, UnknownCheckpoint, IncompatibleCheckpoint: see `show`.
        """
        return self._used(name, self._catalogue.verify)[1]

    def remove(self, name: str) -> None:
        """Removes one checkpoint, which may be damaged or incomplete.

        Args:
            name: JOB/NUMBER.

        Raises:
            BadRequest: `name` has no number.
            UnknownCheckpoint: there is no such checkpoint.
        """
        choice = _parsed(name)
        if not choice.number:
            raise errors.BadRequest(
                f"{name!r} does not name one checkpoint to remove; give {choice.job}/NUMBER, or remove all with "
                "`shoal checkpoints rm --all` or `remove_all`"
            )
        if choice.number not in self._there(choice.job):
            raise self._catalogue.unknown(name)
        self._catalogue.remove(choice.job, choice.number)

    def remove_all(self, job: str) -> tuple[str, ...]:
        """Removes all checkpoints of a job, including damaged and incomplete ones.

        Args:
            job: name of the job.

        Returns:
            The names of the removed checkpoints, as JOB/NUMBER.

        Raises:
            BadRequest: `job` is not a valid job name.
            UnknownCheckpoint: the job has no checkpoints.
        """
        numbers = self._there(_job(job))
        if not numbers:
            raise self._catalogue.unknown(job)
        for number in numbers:
            self._catalogue.remove(job, number)
        return tuple(f"{job}/{number}" for number in numbers)

    def read(self, name: str) -> dict[str, np.ndarray]:
        """Returns the values of all variables. Warns of each damaged checkpoint that was skipped.

        Args:
            name: JOB, JOB/NUMBER or JOB/best.

        Returns:
            Arrays by name. float16 and bfloat16 variables are float32, as servers keep them.

        Raises:
            BadRequest, UnknownCheckpoint, CorruptCheckpoint, IncompatibleCheckpoint: see `show`.
        """
        arrays, found = self._used(name, self._values)
        for problem in found.skipped:
            warnings.warn(f"{found} is read in place of {problem}", stacklevel=2)
        return arrays

    def export(self, name: str, file: str | os.PathLike[str] | BinaryIO) -> Checkpoint:
        """Writes the values of all variables to one safetensors file, which any framework reads.

        Args:
            name: JOB, JOB/NUMBER or JOB/best.
            file: path of the file, written atomically, or an open binary file. float16 and bfloat16 variables are
                float32 in it.

        Returns:
            The checkpoint.

        Raises:
            BadRequest, UnknownCheckpoint, CorruptCheckpoint, IncompatibleCheckpoint: see `show`.
            StorageFailed: the file cannot be written.
        """
        if isinstance(file, str | os.PathLike):
            return self._used(name, lambda manifest: self._export(manifest, Path(file)))[1]
        found = self.verify(name)  # because what is written to an open file cannot be taken back
        self._used(str(found), lambda manifest: self._export(manifest, file))
        return found

    def optimizer_state(self, name: str) -> OptimizerState:
        """Returns the slots of the optimizer, and the number of updates, of a checkpoint.

        Args:
            name: JOB, JOB/NUMBER or JOB/best.

        Returns:
            Arrays by slot and variable, as servers keep them.

        Raises:
            BadRequest, UnknownCheckpoint, CorruptCheckpoint, IncompatibleCheckpoint: see `show`.
        """
        return self._used(name, self._state)[0]

    def export_state(self, name: str, file: str | os.PathLike[str]) -> Checkpoint:
        """Writes the slots of the optimizer, and the number of updates, to a safetensors file for `import_file`.

        Args:
            name: JOB, JOB/NUMBER or JOB/best.
            file: path of the file, written atomically. Its tensors are named SLOT/VARIABLE.

        Returns:
            The checkpoint.

        Raises:
            BadRequest, UnknownCheckpoint, CorruptCheckpoint, IncompatibleCheckpoint: see `show`.
            StorageFailed: the file cannot be written.
        """
        return self._used(name, lambda it: write_pieces(Path(file), state_pieces(self._state(it))))[1]

    def import_file(
        self,
        file: str | os.PathLike[str],
        job: str,
        *,
        skip: Collection[str] = (),
        optimizer: Optimizer | None = None,
        optimizer_state: OptimizerState | str | os.PathLike[str] | None = None,
    ) -> Checkpoint:
        """Converts a safetensors file to a checkpoint that a job can start from.

        Args:
            file: path of a safetensors file. Its tensors are float32, float64, float16, bfloat16 or int64.
            job: job name of the new checkpoint. No running job may have it.
            skip: names of tensors to leave out.
            optimizer: the optimizer of `optimizer_state`, which the job that restores the checkpoint has to have.
            optimizer_state: slots and number of updates of the optimizer; or the path of a file of `export_state`.

        Returns:
            The checkpoint.

        Raises:
            BadRequest: `job` is not a valid job name, a name in `skip` is not in the file, or `optimizer` is given
                without a state or a state without it.
            InvalidOptimizer: the state does not fit the optimizer or the tensors.
            StorageFailed: the file cannot be read, or the checkpoint cannot be written.
            CorruptCheckpoint: the file is not a safetensors file, or is damaged.
            IncompatibleCheckpoint: a tensor has a dtype that Shoal does not support.
            JobExists: a running job of that name took checkpoints at the same time and removed or overwrote the
                imported files.
        """
        _job(job)
        if (optimizer is None) != (optimizer_state is None):
            raise errors.BadRequest("optimizer and optimizer_state belong together; give both, or neither")
        state = read_state(Path(optimizer_state)) if isinstance(optimizer_state, str | os.PathLike) else optimizer_state
        with SafetensorsFile(Path(file), [skip] if isinstance(skip, str) else skip) as source:
            return described(imported(self._catalogue, job, source, optimizer, state))

    def _used(self, name: str, use: Callable[[Manifest], T]) -> tuple[T, Checkpoint]:
        """Calls `use` with the newest usable checkpoint of a name. Returns its result and the checkpoint."""
        choice = _parsed(name)
        skipped: list[str] = []
        for found in self._candidates(choice):
            try:
                if isinstance(found, errors.ShoalError):
                    raise found
                return use(found), described(found, tuple(skipped))
            except errors.UnknownCheckpoint:  # without a number, another process has just removed it: try the next
                if choice.number:
                    raise self._catalogue.unknown(name) from None
            except errors.CorruptCheckpoint as error:
                if choice.number:
                    raise
                which = f"{found.job}/{found.number}" if isinstance(found, Manifest) else error.details["checkpoint"]
                skipped.append(f"{which}: {error.message}")
        if skipped:
            raise errors.CorruptCheckpoint(
                f"no checkpoint of {name} can be used: {'; '.join(skipped)}", checkpoint=name
            )
        raise self._catalogue.unknown(name)

    def _candidates(self, choice: CheckpointChoice) -> Iterator[Manifest | errors.ShoalError]:
        """Returns the checkpoints that a choice stands for, in order of preference."""
        if choice.number:
            return iter([self._catalogue.found(choice.job, choice.number)])
        return self._catalogue.best(choice.job) if choice.best else self._catalogue.newest(choice.job)

    def _there(self, job: str) -> tuple[int, ...]:
        """Returns the numbers of a job's checkpoints, oldest first: complete, damaged and incomplete ones."""
        return tuple(sorted({*self._catalogue.incomplete(job), *self._catalogue.numbers(job)}))

    def _values(self, manifest: Manifest) -> dict[str, np.ndarray]:
        with SavedVariables(self._catalogue.folder, manifest) as saved:
            return saved.arrays(VALUE)

    def _state(self, manifest: Manifest) -> OptimizerState:
        with SavedVariables(self._catalogue.folder, manifest) as saved:
            return saved_state(saved, manifest.version)

    def _export(self, manifest: Manifest, file: Path | BinaryIO) -> None:
        with SavedVariables(self._catalogue.folder, manifest) as saved:
            write_pieces(file, value_pieces(saved, f"{manifest.job}/{manifest.number}", manifest.step))


def _parsed(name: str) -> CheckpointChoice:
    check_type("name", name, str, "the name of a checkpoint, such as 'digits', 'digits/3' or 'digits/best'")
    try:
        return CheckpointChoice.parse(name)
    except errors.InvalidJob as error:
        raise errors.BadRequest(error.message) from None


def _job(name: object) -> str:
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name):
        raise errors.BadRequest(
            f"{name!r} is not a job name; give JOB only: 1 to 63 characters of a-z, 0-9 and -, starting with a letter"
        )
    return name


def described(manifest: Manifest, skipped: tuple[str, ...] = ()) -> Checkpoint:
    """Returns the checkpoint that a manifest lists, with the checkpoints that were skipped for it."""
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
        skipped,
        _evaluation(manifest),
    )


def _evaluation(manifest: Manifest) -> Evaluation | None:
    if not manifest.evaluation:
        return None
    message = json_format.ParseDict(dict(manifest.evaluation), job_pb2.Evaluation(), ignore_unknown_fields=True)
    return Evaluation.from_proto(message)


__all__ = ["Checkpoint", "Checkpoints"]
