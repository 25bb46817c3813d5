"""Catalogue of the checkpoints in a storage: one folder for each job, with one folder in it for each checkpoint.

A checkpoint's folder is named by its number. The checkpoint exists as long as its manifest does: the manifest is
written last and removed first.
"""

import re
from collections.abc import Collection, Iterable, Iterator

from shoal import errors
from shoal._checkpoint.manifest import FILE, MAX_BYTES, FileEntry, Manifest
from shoal._checkpoint.storage import CheckpointStorage
from shoal._checkpoint.tensor_files import open_tensors

_NUMBER = re.compile(r"[0-9]{8,18}")


def path_of(job: str, number: int) -> tuple[str, str]:
    """Returns the path of a checkpoint's folder."""
    return job, f"{number:08}"


class Catalogue:
    """The checkpoints in a storage.

    Args:
        folder: the checkpoint storage.
    """

    def __init__(self, folder: CheckpointStorage) -> None:
        self.folder = folder

    def jobs(self) -> list[str]:
        """Returns the jobs that have a complete checkpoint."""
        return [name for name in self.folder.names(()) if self.numbers(name)]

    def numbers(self, job: str) -> list[int]:
        """Returns the complete checkpoints of a job, oldest first."""
        return _numbers(self.folder.holding((job,), FILE))

    def incomplete(self, job: str) -> list[int]:
        """Returns the incomplete checkpoints of a job, oldest first: those in progress, and those whose writer died."""
        found = _numbers(self.folder.names((job,)))  # first, so that a checkpoint that is completed now is left out
        complete = {*self.numbers(job)}
        return [number for number in found if number not in complete]

    def next_number(self, job: str) -> int:
        """Returns a number above those of all checkpoints of the job, incomplete ones included."""
        return max(_numbers(self.folder.names((job,))), default=0) + 1

    def unknown(self, name: str) -> errors.UnknownCheckpoint:
        """Returns the error for a checkpoint that does not exist, by the name that the user gave."""
        hint = (
            ", and only a job with checkpoint_best (--checkpoint-best) has a best one" if name.endswith("/best") else ""
        )
        return errors.UnknownCheckpoint(
            f"there is no checkpoint {name} in {self.folder.url}; `shoal checkpoints ls` lists them{hint}",
            checkpoint=name,
        )

    def manifest(self, job: str, number: int) -> Manifest:
        """Reads the manifest of a checkpoint.

        Raises:
            UnknownCheckpoint: the job has no checkpoint of that number.
            CorruptCheckpoint: the manifest is damaged.
            IncompatibleCheckpoint: a later version of Shoal wrote the manifest.
        """
        path = (*path_of(job, number), FILE)
        where = "/".join((self.folder.url, *path))
        with self.folder.open(path) as file:
            if file.nbytes > MAX_BYTES:
                raise errors.CorruptCheckpoint(
                    f"{where} has {file.nbytes} bytes, more than a manifest can have", file=where
                )
            text = bytearray(file.nbytes)
            file.read_into(0, [memoryview(text)])
        manifest = Manifest.from_bytes(bytes(text), where)
        if (manifest.job, manifest.number) != (job, number):
            raise errors.CorruptCheckpoint(
                f"{where} belongs to checkpoint {manifest.number} of {manifest.job}: it was copied or renamed",
                file=where,
            )
        return manifest

    def publish(self, manifest: Manifest) -> None:
        """Completes a checkpoint, whose other files are written, by writing its manifest."""
        self.folder.write((*path_of(manifest.job, manifest.number), FILE), [manifest.to_bytes()])

    def file_bytes(self, job: str, number: int, entry: FileEntry) -> int:
        """Returns the size of a file of a checkpoint; -1 if it does not exist.

        Args:
            job: name of the job.
            number: number of the checkpoint.
            entry: the file's entry in the manifest.
        """
        try:
            with self.folder.open((*path_of(job, number), entry.name)) as file:
                return int(file.nbytes)
        except errors.UnknownCheckpoint:
            return -1

    def verify(self, manifest: Manifest) -> None:
        """Reads all files of a checkpoint and compares them with their checksums.

        Raises:
            CorruptCheckpoint: a file is missing or damaged.
        """
        for entry in manifest.files:
            with open_tensors(self.folder, (*path_of(manifest.job, manifest.number), entry.name), entry) as reader:
                reader.verify()

    def newest(self, job: str) -> Iterator[Manifest | errors.ShoalError]:
        """Yields the manifest of each checkpoint of a job, newest first.

        For a checkpoint that cannot be used, yields the error instead. Its details name the checkpoint.
        """
        return (self.found(job, number) for number in reversed(self.numbers(job)))

    def best(self, job: str) -> Iterator[Manifest | errors.ShoalError]:
        """Yields, as `newest` does, the checkpoints taken at the job's best evaluation, and all unusable ones."""
        return (it for it in self.newest(job) if isinstance(it, errors.ShoalError) or it.evaluation)

    def newest_usable(self, job: str) -> Manifest | None:
        """Returns the manifest of the newest checkpoint of a job that can be read; None if there is none.

        Raises:
            StorageFailed: the storage cannot be read.
        """
        for found in self.newest(job):
            if isinstance(found, Manifest):
                return found
            if isinstance(found, errors.StorageFailed):
                raise found
        return None

    def found(self, job: str, number: int) -> Manifest | errors.ShoalError:
        """Returns the manifest of a checkpoint, or the error if it cannot be used. The error's details name it."""
        try:
            return self.manifest(job, number)
        except errors.ShoalError as error:
            error.details["checkpoint"] = f"{job}/{number}"
            return error

    def remove(self, job: str, number: int) -> None:
        """Removes a complete or incomplete checkpoint. The manifest is removed first."""
        path = path_of(job, number)
        self.folder.remove((*path, FILE))
        self.folder.remove(path)

    def remove_incomplete(self, job: str, *, below: int | None = None) -> list[int]:
        """Removes incomplete checkpoints.

        Args:
            job: name of the job.
            below: removes only smaller numbers, because larger ones may be in progress. None means all.

        Returns:
            The numbers of the removed checkpoints.
        """
        incomplete = [number for number in self.incomplete(job) if below is None or number < below]
        for number in incomplete:
            self.remove(job, number)
        return incomplete


def expired_numbers(numbers: Collection[int], *, keep_last: int, keep_every: int = 0) -> list[int]:
    """Returns the checkpoints that retention removes.

    Args:
        numbers: numbers of the complete checkpoints.
        keep_last: how many of the newest are kept, at least 1.
        keep_every: also keeps those whose number is a multiple of it. 0 means none.

    Returns:
        The numbers, oldest first.
    """
    ordered = sorted(numbers)
    return [number for number in ordered[: -max(1, keep_last)] if not keep_every or number % keep_every]


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


__all__ = ["Catalogue", "expired_numbers", "path_of"]
