"""Commit of checkpoints: their numbers, the files that servers write, the manifest, and removal of old checkpoints."""

from collections.abc import Callable, Collection, Iterable
from importlib.metadata import version
from typing import Any

import structlog
from google.protobuf import json_format

from shoal import errors
from shoal._checkpoint import Catalogue, FileEntry, Manifest, expired_numbers, path_of
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.status import SavedCheckpoint
from shoal.v1 import job_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.effects import checkpoint_cut
from shoal_coordinator.effects.server_calls import ServerCalls
from shoal_coordinator.messages import (
    CheckpointCommitted,
    CheckpointPublished,
    CheckpointsScanned,
    CommitCheckpoint,
    ScanCheckpoints,
    ServerRef,
    servers_of,
)

_log = structlog.get_logger(__name__)

# Seconds that a server waits for its files in one call, the timeout of that call, and the time for all calls together.
_COLLECT_WITHIN_S, _COLLECT_TIMEOUT_S, _WRITE_FOR_S = 5.0, 15.0, 3600.0


def scan(effect: ScanCheckpoints, catalogue: Catalogue) -> CheckpointsScanned:
    """Finds the largest checkpoint number of a job's name, including earlier jobs, imports and incomplete checkpoints.

    Raises:
        StorageFailed: The storage does not answer. The job then takes no cut, so no commits are held back for one.
    """
    largest = catalogue.next_number(effect.job.name) - 1
    return CheckpointsScanned(effect.job, largest, effect=effect.number)


def commit(
    effect: CommitCheckpoint,
    calls: ServerCalls,
    catalogue: Catalogue,
    published: Callable[[CheckpointPublished], bool],
) -> CheckpointCommitted:
    """Waits until all files of a cut are written, writes the manifest, and removes expired checkpoints.

    Nothing is removed before the coordinator durably knows the new checkpoint. Otherwise a job that loses its shards at
    that moment would restart from a checkpoint that is being removed.

    Args:
        effect: The checkpoint to commit.
        calls: The calls to servers.
        catalogue: The cluster's checkpoints.
        published: Makes the new checkpoint durable in the job's record. Returns whether older ones may be removed.

    Returns:
        The outcome, with the numbers of the checkpoints that were removed.

    Raises:
        ShoalError: The checkpoint has failed. Its files are removed now or by a later commit.
    """
    job, cut = effect.job.name, effect.cut
    try:
        manifest = _published(effect, catalogue)
        if manifest is None:
            servers = servers_of(effect.placement)
            files = [file for server in servers for file in _collected(server, job, cut.number, calls)]
            manifest = _manifest(effect, files)
            _check_files(catalogue, manifest)
            _published(effect, catalogue)  # collecting takes a while; never overwrite a manifest
            catalogue.publish(manifest)
    except errors.ShoalError:
        checkpoint_cut.resume_commits(servers_of(effect.placement), cut, calls)
        _tidy(lambda: _withdraw(effect, catalogue))
        raise
    saved = SavedCheckpoint(cut.number, cut.step, manifest.nbytes, cut.time)
    policy = effect.spec.checkpoints or CheckpointPolicy()
    best = effect.best.number if effect.best else 0
    removed: tuple[int, ...] = ()
    if published(CheckpointPublished(effect.number, effect.job, saved, best)):
        removed = _tidy(lambda: _retain(effect, catalogue, policy)) or ()
    return CheckpointCommitted(effect.job, saved, removed, best, last=bool(cut.held_by), effect=effect.number)


def _published(effect: CommitCheckpoint, catalogue: Catalogue) -> Manifest | None:
    """Returns the manifest of this cut if an earlier coordinator has written it; its servers may be gone by now.

    Raises:
        StorageFailed: The manifest there belongs to another checkpoint.
    """
    job, cut = effect.job.name, effect.cut
    try:
        manifest = catalogue.manifest(job, cut.number)
    except (errors.UnknownCheckpoint, errors.CorruptCheckpoint):
        return None
    if manifest.created_at != cut.time:
        raise errors.StorageFailed(
            f"{catalogue.folder.url} already has another {job}/{cut.number}, perhaps from an import while this "
            "checkpoint was taken; the next checkpoint gets another number"
        )
    return manifest


def _withdraw(effect: CommitCheckpoint, catalogue: Catalogue) -> None:
    """Removes the files of a failed checkpoint, unless another checkpoint has its number."""
    _published(effect, catalogue)
    catalogue.remove(effect.job.name, effect.cut.number)


def _collected(server: ServerRef, job: str, number: int, calls: ServerCalls) -> list[FileEntry]:
    request = pb.CollectFilesRequest(job=job, number=number, within_s=_COLLECT_WITHIN_S)
    for _ in range(round(_WRITE_FOR_S / _COLLECT_WITHIN_S)):
        calls.check_wanted(server)
        reply = calls.call(server, "CollectFiles", request, timeout_s=_COLLECT_TIMEOUT_S)
        if reply.done:
            return [FileEntry(it.name, it.bytes, tuple(it.sums), tuple(it.tensors)) for it in reply.files]
    raise errors.StorageFailed(f"server {server.member} did not write its files within {_WRITE_FOR_S:g} s")


def _spec(effect: CommitCheckpoint) -> job_pb2.JobSpec:
    spec = effect.spec.to_proto()
    if effect.learning_rate:
        spec.learning_rate_set.CopyFrom(effect.learning_rate.to_proto())
    if effect.plateau:
        spec.plateau_state.CopyFrom(effect.plateau.to_proto())
    return spec


def _manifest(effect: CommitCheckpoint, files: Iterable[FileEntry]) -> Manifest:
    cut, variables = effect.cut, effect.placement.variables
    return Manifest(
        job=effect.job.name,
        number=cut.number,
        created_at=cut.time,
        step=cut.step,
        version=cut.version,
        spec=json_format.MessageToDict(_spec(effect)),
        variables=tuple(json_format.MessageToDict(it.to_proto(name)) for name, it in variables.items()),
        files=tuple(sorted(files, key=lambda entry: entry.name)),
        data=json_format.MessageToDict(cut.data) if cut.data else {},
        progress=json_format.MessageToDict(cut.progress_totals),
        writer=version("shoal"),
        evaluation=json_format.MessageToDict(effect.best.to_proto()) if effect.best else {},
        submitter=effect.submitter,
    )


def _check_files(catalogue: Catalogue, manifest: Manifest) -> None:
    """Checks that the coordinator finds the files that the servers have written.

    Raises:
        StorageFailed: A file is missing or has another size.
    """
    for entry in manifest.files:
        found = catalogue.file_bytes(manifest.job, manifest.number, entry)
        if found != entry.nbytes:
            where = "/".join((catalogue.folder.url, *path_of(manifest.job, manifest.number), entry.name))
            what = "does not exist" if found < 0 else f"has {found} bytes instead of {entry.nbytes}"
            raise errors.StorageFailed(
                f"{where} {what}, although a server has written it: give the "
                "coordinator and all servers the same checkpoint storage, which all of them can reach"
            )


def _retain(effect: CommitCheckpoint, catalogue: Catalogue, policy: CheckpointPolicy) -> tuple[int, ...]:
    """Removes expired checkpoints and files of older incomplete ones, and returns the numbers of the expired ones."""
    job = effect.job.name
    gone = expired_numbers(catalogue.numbers(job), keep_last=policy.keep_last, keep_every=policy.keep_every)
    kept = _best(effect, catalogue) if gone else ()
    gone = [number for number in gone if number not in kept and not _is_anothers(effect, number, catalogue)]
    for number in gone:
        catalogue.remove(job, number)
    catalogue.remove_incomplete(job, below=effect.cut.number)
    return tuple(gone)


def _is_anothers(effect: CommitCheckpoint, number: int, catalogue: Catalogue) -> bool:
    """Returns whether a checkpoint is another submitter's, as an earlier job of this name can leave it.

    The coordinator refuses the names of such jobs, but not while the storage is away, or a last commit still runs.
    """
    if not effect.keeps_others:
        return False
    found = catalogue.found(effect.job.name, number)
    if isinstance(found, Manifest):
        return found.belongs_to_another(effect.submitter)
    return not isinstance(found, errors.CorruptCheckpoint | errors.UnknownCheckpoint)


def _best(effect: CommitCheckpoint, catalogue: Catalogue) -> Collection[int]:
    """Returns the checkpoints to keep for a best evaluation: this job's, or the newest of an earlier job of its name.

    Raises:
        StorageFailed: The storage cannot be read.
    """
    if effect.best:
        return ()  # this checkpoint replaces the last best one
    if effect.keep:
        return effect.keep
    for found in catalogue.best(effect.job.name):
        if isinstance(found, Manifest):
            return (found.number,)
        if isinstance(found, errors.StorageFailed):  # the unreadable checkpoint may be the best one: remove nothing now
            raise found
    return ()


def _tidy(clean: Callable[[], Any]) -> Any:
    """Runs a clean-up, and logs its failure: the next commit cleans up the rest, and this checkpoint stays complete."""
    try:
        return clean()
    except errors.ShoalError as error:
        _log.warning("cannot remove expired checkpoints", reason=error.message)
        return None
