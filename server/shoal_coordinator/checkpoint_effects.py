"""Checkpoints, as the coordinator has them made and read: the cut, the manifest, and the way back to shards.

How a cut is consistent, and what the servers do for it, is in docs/decisions/0021.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import Any

import structlog
from google.protobuf import json_format

from shoal import errors
from shoal._checkpoint.catalogue import Catalogue, path_of, superfluous
from shoal._checkpoint.manifest import FileEntry, Manifest
from shoal._cursor import Cursor
from shoal.checkpoint_policy import CheckpointChoice, CheckpointPolicy
from shoal.status import SavedCheckpoint
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import state_pb2
from shoal_coordinator.events import (
    CheckpointWritten,
    CreateShards,
    CutMade,
    Held,
    Restored,
    ServerRef,
    TakeCut,
    WriteCheckpoint,
    servers_of,
)
from shoal_coordinator.ledger import Ledger
from shoal_coordinator.server_calls import ServerCalls

_log = structlog.get_logger(__name__)

# Servers wait up to 2 s for commits that have begun. Files are asked for again and again, for at most so long.
_HOLD_TIMEOUT_S, _COLLECT_WITHIN_S, _COLLECT_TIMEOUT_S, _WRITE_FOR_S = 5.0, 5.0, 15.0, 3600.0
# Reading many GB takes a while.
_RESTORE_TIMEOUT_S = 600.0


def take_cut(effect: TakeCut, calls: ServerCalls, catalogue: Catalogue, held: Callable[[], Held]) -> CutMade:
    """Has all servers save at one moment.

    Args:
        effect: what to do.
        calls: the way to servers.
        catalogue: of the cluster's checkpoints.
        held: gives the coordinator's own part, as it is when it is called.

    Raises:
        ShoalError: there is no cut; training goes on.
    """
    job, now = effect.job.name, time.time()
    number = max(catalogue.next_number(job), effect.above + 1)
    with calls.at_once(effect.servers) as servers:
        hold = pb.HoldRequest(job=job, epoch=effect.epoch, cut=effect.number)
        replies = servers.call("Hold", hold, timeout_s=_HOLD_TIMEOUT_S)
        # No commit passes now. Data that is marked as done was committed before, and nothing else will be in the cut.
        ours = held()
        save = pb.SaveRequest(job=job, epoch=effect.epoch, cut=effect.number, number=number)
        save.workers.extend(furthest(worker for reply in replies for worker in reply.workers))
        shards = [shard for reply in servers.call("Save", save) for shard in reply.shards]
    return CutMade(
        effect.job,
        number=number,
        step=max((shard.step for shard in shards), default=0),
        version=max((shard.version for shard in shards), default=0),
        time=now,
        data=Ledger.from_proto(ours.ledger).settled(cursors(shards), ours.ranks) if ours.ledger else None,
        tally=ours.tally,
        effect=effect.number,
    )


def furthest(workers: Iterable[pb.WorkerProgress]) -> list[pb.WorkerProgress]:
    """Of each worker's latest life, how far it has come where it has come furthest: what is committed anywhere."""
    most: dict[str, pb.WorkerProgress] = {}
    for worker in workers:
        known = most.get(worker.worker)
        if known is None or known.incarnation < worker.incarnation:
            most[worker.worker] = worker
        elif known.incarnation == worker.incarnation:
            most[worker.worker] = pb.WorkerProgress(
                worker=worker.worker,
                incarnation=worker.incarnation,
                committed=max(known.committed, worker.committed),
                finished=max(known.finished, worker.finished),
            )
    return list(most.values())


def cursors(shards: Iterable[pb.SavedShard]) -> dict[str, Cursor]:
    """By worker, how far its data had come, on the shard that says the most.

    Shards differ where backup workers let each close its own steps: what counts on one is trained on.
    """
    most: dict[str, Cursor] = {}
    for shard in shards:
        for it in shard.cursors:
            cursor = Cursor.from_proto(it.cursor)
            most[it.worker] = max(cursor, most.get(it.worker, cursor))
    return most


def write(effect: WriteCheckpoint, calls: ServerCalls, catalogue: Catalogue) -> CheckpointWritten:
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
            catalogue.publish(manifest)
        except errors.ShoalError:
            _tidy(lambda: catalogue.remove(job, cut.number))
            raise
    saved = SavedCheckpoint(cut.number, cut.step, manifest.nbytes, cut.time)
    policy = effect.spec.checkpoints or CheckpointPolicy()
    removed = _tidy(lambda: _retain(catalogue, job, cut.number, policy)) or ()
    return CheckpointWritten(effect.job, saved, removed, effect=effect.number)


def restore(effect: CreateShards, create: Callable[[], None], calls: ServerCalls, catalogue: Catalogue) -> Restored:
    """Creates a job's shards and fills them with the newest of its sources that can be read.

    Args:
        effect: what to do; it has sources.
        create: creates them on all servers, with initial values.
        calls: the way to servers.
        catalogue: of the cluster's checkpoints.

    Raises:
        CorruptCheckpoint, UnknownCheckpoint: none can be read; the message says why of each.
        IncompatibleCheckpoint: the first that can be read is of other variables.
        StorageFailed: the storage cannot be read for now, by the coordinator or by a server; some shards may be filled.
        ShoalError: what servers answer.
    """
    passed_by: list[str] = []
    for choice in _candidates(effect.sources, catalogue, passed_by):
        try:
            return _restored(effect, choice, create, calls, catalogue, passed_by)
        except (errors.CorruptCheckpoint, errors.UnknownCheckpoint) as error:
            _log.warning("checkpoint passed by", job=effect.job.name, checkpoint=str(choice), reason=error.message)
            passed_by.append(f"{choice}: {error.message}")
            # What was read in part is neither one thing nor the other.
            for server in servers_of(effect.placement):
                calls.call(server, "DropShards", pb.DropShardsRequest(job=effect.job.name))
    why = "; ".join(passed_by) or "there is none"
    raise errors.CorruptCheckpoint(f"no checkpoint to go on from: {why}", job=effect.job.name)


def _candidates(
    sources: Iterable[CheckpointChoice], catalogue: Catalogue, passed_by: list[str]
) -> Iterator[CheckpointChoice]:
    for source in sources:
        if source.number:
            yield source
            continue
        numbers = catalogue.numbers(source.job)
        if not numbers:
            passed_by.append(f"{source.job}: it has no whole checkpoint in {catalogue.folder.url}")
        for number in reversed(numbers):
            yield CheckpointChoice(source.job, number, source.partial)


def _restored(
    effect: CreateShards,
    choice: CheckpointChoice,
    create: Callable[[], None],
    calls: ServerCalls,
    catalogue: Catalogue,
    passed_by: list[str],
) -> Restored:
    manifest = catalogue.manifest(choice.job, choice.number)
    _check_optimizer(effect, choice, manifest)
    create()
    step, updates = (0, 0) if choice.partial else (manifest.step, manifest.version)
    request = pb.RestoreRequest(
        job=effect.job.name,
        epoch=effect.placement.epoch,
        from_job=choice.job,
        number=choice.number,
        version=updates,
        step=step,
        partial=choice.partial,
    )
    with calls.at_once(servers_of(effect.placement)) as servers:
        servers.call("Restore", request, timeout_s=_RESTORE_TIMEOUT_S)
    goes_on = not choice.partial
    return Restored(
        choice,
        step,
        variables=frozenset(str(variable.get("name", "")) for variable in manifest.variables),
        data=_parsed(manifest.data, state_pb2.LedgerRecord(), manifest) if manifest.data and goes_on else None,
        tally=_parsed(manifest.progress if goes_on else {}, state_pb2.TallyRecord(), manifest),
        seed=int(manifest.spec.get("seed", 0)) if manifest.spec else None,
        passed_by=tuple(passed_by),
    )


def _check_optimizer(effect: CreateShards, choice: CheckpointChoice, manifest: Manifest) -> None:
    saved = manifest.spec.get("optimizer", {}).get("name", "")
    if saved and saved != effect.spec.optimizer.name and not choice.partial:
        raise errors.IncompatibleCheckpoint(
            f"{choice} was trained with {saved}, and {effect.job.name} asks for {effect.spec.optimizer.name}, whose "
            "slots are others: ask for the same, or for a partial restore, which takes values alone"
        )


def _published(effect: WriteCheckpoint, catalogue: Catalogue) -> Manifest | None:
    """The manifest, should a coordinator that died have written it already; its servers may be gone by now."""
    try:
        manifest = catalogue.manifest(effect.job.name, effect.cut.number)
    except (errors.UnknownCheckpoint, errors.CorruptCheckpoint):
        return None
    return manifest if manifest.created_at == effect.cut.time else None


def _collected(server: ServerRef, job: str, number: int, calls: ServerCalls) -> list[FileEntry]:
    request = pb.CollectFilesRequest(job=job, number=number, within_s=_COLLECT_WITHIN_S)
    for _ in range(round(_WRITE_FOR_S / _COLLECT_WITHIN_S)):
        calls.check_wanted(server)
        reply = calls.call(server, "CollectFiles", request, timeout_s=_COLLECT_TIMEOUT_S)
        if reply.done:
            return [FileEntry(file.name, file.bytes, tuple(file.sums)) for file in reply.files]
    raise errors.StorageFailed(f"server {server.member} has not written its files within {_WRITE_FOR_S:g} s")


def _manifest(effect: WriteCheckpoint, files: Iterable[FileEntry]) -> Manifest:
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
        progress=json_format.MessageToDict(cut.tally),
        writer=version("shoal"),
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


def _retain(catalogue: Catalogue, job: str, newest: int, policy: CheckpointPolicy) -> tuple[int, ...]:
    """Removes the checkpoints that are to go, and what older torn ones have left; the numbers."""
    gone = superfluous(catalogue.numbers(job), keep_last=policy.keep_last, keep_every=policy.keep_every)
    for number in gone:
        catalogue.remove(job, number)
    catalogue.sweep(job, below=newest)
    return tuple(gone)


def _tidy(clean: Callable[[], Any]) -> Any:
    """Tidies up, as far as that goes: what is left is tidied up another time, and the checkpoint is what it is."""
    try:
        return clean()
    except errors.ShoalError as error:
        _log.warning("checkpoints could not be tidied up", reason=error.message)
        return None


def _parsed(record: Any, message: Any, manifest: Manifest) -> Any:
    try:
        return json_format.ParseDict(record, message)
    except json_format.ParseError as error:
        raise errors.CorruptCheckpoint(
            f"the manifest of {manifest.job}/{manifest.number} says what no job's records do: {error}"
        ) from None
