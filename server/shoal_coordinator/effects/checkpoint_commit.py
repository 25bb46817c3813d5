"""Making a checkpoint whole: its number, its files once servers have written them, the manifest; and which ones go."""

from collections.abc import Callable, Collection, Iterable
from importlib.metadata import version
from typing import Any

import structlog
from google.protobuf import json_format

from shoal import errors
from shoal._checkpoint import Catalogue, FileEntry, Manifest, expired_numbers, path_of
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.status import SavedCheckpoint
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.effects import checkpoint_cut
from shoal_coordinator.effects.server_calls import ServerCalls
from shoal_coordinator.messages import (
    CheckpointCommitted,
    CheckpointsScanned,
    CommitCheckpoint,
    ScanCheckpoints,
    ServerRef,
    servers_of,
)

_log = structlog.get_logger(__name__)

# Files are asked for again and again, for at most so long.
_COLLECT_WITHIN_S, _COLLECT_TIMEOUT_S, _WRITE_FOR_S = 5.0, 15.0, 3600.0


def count(effect: ScanCheckpoints, catalogue: Catalogue) -> CheckpointsScanned:
    """Looks which numbers there are: those of earlier jobs of the name, imports, and what is torn.

    Raises:
        StorageFailed: the folder does not answer. So there is no cut either, and nothing is held back for it.
    """
    largest = catalogue.next_number(effect.job.name) - 1
    return CheckpointsScanned(effect.job, largest, effect=effect.number)


def write(effect: CommitCheckpoint, calls: ServerCalls, catalogue: Catalogue) -> CheckpointCommitted:
    """Waits until all files of a cut are written, writes the manifest, and removes what it makes superfluous.

    Raises:
        ShoalError: there is no such checkpoint; what is there of it is removed, sooner or later.
    """
    job, cut = effect.job.name, effect.cut
    manifest = _published(effect, catalogue)
    if manifest is None:
        try:
            servers = servers_of(effect.placement)
            files = [file for server in servers for file in _collected(server, job, cut.number, calls)]
            manifest = _manifest(effect, files)
            _check_files(catalogue, manifest)
            _published(effect, catalogue)  # it took a while: nothing is ever written over
            catalogue.publish(manifest)
        except errors.ShoalError:
            checkpoint_cut.let_pass(servers_of(effect.placement), cut, calls)
            _tidy(lambda: _withdraw(effect, catalogue))
            raise
    saved = SavedCheckpoint(cut.number, cut.step, manifest.nbytes, cut.time)
    policy = effect.spec.checkpoints or CheckpointPolicy()
    removed = _tidy(lambda: _retain(catalogue, job, cut.number, policy, lambda: _best(effect, catalogue))) or ()
    best = effect.best.number if effect.best else 0
    return CheckpointCommitted(effect.job, saved, removed, best, last=bool(cut.held_by), effect=effect.number)


def _published(effect: CommitCheckpoint, catalogue: Catalogue) -> Manifest | None:
    """The manifest, should a coordinator that died have written it already; its servers may be gone by now.

    Raises:
        StorageFailed: one is there that is not of this cut.
    """
    job, cut = effect.job.name, effect.cut
    try:
        manifest = catalogue.manifest(job, cut.number)
    except (errors.UnknownCheckpoint, errors.CorruptCheckpoint):
        return None
    if manifest.created_at != cut.time:
        raise errors.StorageFailed(
            f"{catalogue.folder.url} has a {job}/{cut.number} by somebody else, an import perhaps, made while this one "
            "was taken; the next one gets another number"
        )
    return manifest


def _withdraw(effect: CommitCheckpoint, catalogue: Catalogue) -> None:
    """Removes what there is of a checkpoint that failed, unless somebody else's has its number."""
    _published(effect, catalogue)
    catalogue.remove(effect.job.name, effect.cut.number)


def _collected(server: ServerRef, job: str, number: int, calls: ServerCalls) -> list[FileEntry]:
    request = pb.CollectFilesRequest(job=job, number=number, within_s=_COLLECT_WITHIN_S)
    for _ in range(round(_WRITE_FOR_S / _COLLECT_WITHIN_S)):
        calls.check_wanted(server)
        reply = calls.call(server, "CollectFiles", request, timeout_s=_COLLECT_TIMEOUT_S)
        if reply.done:
            return [FileEntry(file.name, file.bytes, tuple(file.sums)) for file in reply.files]
    raise errors.StorageFailed(f"server {server.member} has not written its files within {_WRITE_FOR_S:g} s")


def _manifest(effect: CommitCheckpoint, files: Iterable[FileEntry]) -> Manifest:
    cut, variables = effect.cut, effect.placement.variables
    return Manifest(
        job=effect.job.name,
        number=cut.number,
        created_at=cut.time,
        step=cut.step,
        version=cut.version,
        spec=json_format.MessageToDict(effect.spec.to_proto()),
        variables=tuple(json_format.MessageToDict(it.to_proto(name)) for name, it in variables.items()),
        files=tuple(sorted(files, key=lambda entry: entry.name)),
        data=json_format.MessageToDict(cut.data) if cut.data else {},
        progress=json_format.MessageToDict(cut.progress_totals),
        writer=version("shoal"),
        evaluation=json_format.MessageToDict(effect.best.to_proto()) if effect.best else {},
    )


def _check_files(catalogue: Catalogue, manifest: Manifest) -> None:
    """Looks whether the coordinator finds what the servers have written, before it says that there is a checkpoint.

    Raises:
        StorageFailed: it does not.
    """
    for entry in manifest.files:
        path = (*path_of(manifest.job, manifest.number), entry.name)
        try:
            with catalogue.folder.open(path) as file:
                found = file.nbytes
        except errors.UnknownCheckpoint:
            found = -1
        if found != entry.nbytes:
            what = "is not there" if found < 0 else f"has {found} bytes instead of {entry.nbytes}"
            raise errors.StorageFailed(
                f"{'/'.join((catalogue.folder.url, *path))}, which a server has written, {what}: the coordinator and "
                "all servers must be given the same folder of checkpoints, one that they all see"
            )


def _retain(
    catalogue: Catalogue, job: str, newest: int, policy: CheckpointPolicy, best: Callable[[], Collection[int]]
) -> tuple[int, ...]:
    """Removes the checkpoints that are to go, and what older torn ones have left; the numbers."""
    gone = expired_numbers(catalogue.numbers(job), keep_last=policy.keep_last, keep_every=policy.keep_every)
    kept = best() if gone else ()
    gone = [number for number in gone if number not in kept]
    for number in gone:
        catalogue.remove(job, number)
    catalogue.sweep(job, below=newest)
    return tuple(gone)


def _best(effect: CommitCheckpoint, catalogue: Catalogue) -> Collection[int]:
    """Those that stay, being of a best evaluation: this job's, or else the newest of an earlier job of its name.

    Raises:
        StorageFailed: which that is cannot be read.
    """
    if effect.best:
        return ()  # this one takes the place of the last
    if effect.keep:
        return effect.keep
    for found in catalogue.best(effect.job.name):
        if isinstance(found, Manifest):
            return (found.number,)
        if isinstance(found, errors.StorageFailed):  # it may be the one: nothing goes this time
            raise found
    return ()


def _tidy(clean: Callable[[], Any]) -> Any:
    """Tidies up, as far as that goes: what is left is tidied up another time, and the checkpoint is what it is."""
    try:
        return clean()
    except errors.ShoalError as error:
        _log.warning("checkpoints could not be tidied up", reason=error.message)
        return None
