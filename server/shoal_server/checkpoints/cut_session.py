"""Checkpoint session of a server: hold commits, save the shards, collect the files, and restore."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from shoal import errors
from shoal._checkpoint import Catalogue, CheckpointStorage, SavedVariables, restore_problem
from shoal._wire import Cursor, storage_dtype
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.checkpoints.interruptible import InterruptibleStorage
from shoal_server.checkpoints.writer import CheckpointWriter, load
from shoal_server.shards import MAX_PAUSE_S, Cut, JobShardConfig, LockGroup, ShardStore, WorkerProgress

_MAX_WITHIN_S = 10.0


def check_storage(writer: CheckpointWriter) -> None:
    """Raises StorageFailed if this server has no checkpoint storage: `save` would fail while training waits."""
    writer.storage  # noqa: B018 - raises it


def hold(groups: Iterable[LockGroup], cut: int) -> dict[str, WorkerProgress]:
    """Holds back a job's commits: the first half of a cut.

    Args:
        groups: the lock groups of the job here.
        cut: number of the cut.

    Returns:
        The progress of each worker on the shards here. It may be told when the backups have what it depends on.

    Raises:
        Overloaded: running commits did not end in time.
    """
    progress: dict[str, WorkerProgress] = {}
    for group in groups:
        group.commit_gate.hold(cut)
        for worker, it in group.progress().items():
            progress[worker] = progress[worker].joined(it) if worker in progress else it
    return progress


def progress_reply(progress: Mapping[str, WorkerProgress]) -> pb.HoldCommitsReply:
    """Returns the reply that tells the progress of workers."""
    return pb.HoldCommitsReply(
        workers=[
            pb.WorkerProgress(worker=worker, incarnation=it.incarnation, committed=it.committed, finished=it.finished)
            for worker, it in progress.items()
        ]
    )


def save(store: ShardStore, writer: CheckpointWriter, request: pb.SaveRequest) -> pb.SaveReply:
    """Takes the snapshots of all shards of a job and starts to write them: the second half of a cut.

    Every push that any server has committed is part of the snapshots.

    Args:
        store: the shards.
        writer: writes them in the background; writing has started when this function returns.
        request: names the job, the checkpoint and the cut, and carries the workers' progress.

    Returns:
        Version and step of each shard, with the cursors and the counts of its workers.

    Raises:
        StorageFailed: this server has no checkpoint storage.
        BadRequest: the pause after the cut is out of range.
        StaleGeneration, UnknownJob: this server does not host the job at that generation.
        Cancelled: the cut no longer holds the commits.
    """
    check_storage(writer)
    if not 0 <= request.hold_s <= MAX_PAUSE_S:
        raise errors.BadRequest(f"hold_s is {request.hold_s:g}; it must be from 0 to {MAX_PAUSE_S:g} s")
    groups = store.hosted.groups_of(request.job, request.generation)
    progress = {it.worker: WorkerProgress(it.incarnation, it.committed, it.finished) for it in request.workers}
    with ExitStack() as undo:
        cuts = []
        for group in groups:
            with group.commit_gate.held(request.cut, request.hold_s):
                cut = group.cut(progress)
            cuts.append(cut)
            undo.callback(_end_all, cut)
        undo.pop_all()
    snapshots = [snapshot for cut in cuts for snapshot in cut.snapshots]
    writer.begin(request.job, request.number, request.cut, groups[0].config.variables, snapshots)
    return pb.SaveReply(shards=[_saved(snapshot.layout.shard, cut) for cut in cuts for snapshot in cut.snapshots])


def resume_commits(store: ShardStore, request: pb.ResumeCommitsRequest) -> None:
    """Ends a cut that was not saved, or the pause after one: commits continue."""
    for group in store.hosted.groups_of(request.job):
        group.commit_gate.resume(request.cut)


def collect(store: ShardStore, writer: CheckpointWriter, request: pb.CollectFilesRequest) -> pb.CollectFilesReply:
    """Returns the files of a checkpoint if they are written.

    Args:
        store: the shards; the job must still be hosted here.
        writer: writes the files.
        request: names the job and the checkpoint, and the seconds to wait.

    Returns:
        The files; an empty reply if they are not written yet.

    Raises:
        BadRequest: the time to wait is out of range.
        UnknownJob: this server does not host the job.
        StorageFailed: the files could not be written.
        UnknownCheckpoint: this server does not write that checkpoint.
    """
    store.hosted.groups_of(request.job)  # raises if the shards are lost
    if not 0 <= request.within_s <= _MAX_WITHIN_S:
        raise errors.BadRequest(f"the wait is {request.within_s:g} s; it must be from 0 to {_MAX_WITHIN_S:g} s")
    files = writer.collect(request.job, request.number, within_s=request.within_s)
    if files is None:
        return pb.CollectFilesReply()
    named = [pb.SavedFile(name=it.name, bytes=it.nbytes, sums=it.sums, tensors=it.tensors) for it in files]
    return pb.CollectFilesReply(done=True, files=named)


def restore(
    store: ShardStore, storage: CheckpointStorage, request: pb.RestoreRequest, is_wanted: Callable[[], bool]
) -> None:
    """Overwrites a job's shards on this server with a checkpoint's values and slots.

    The storage may hang, so this holds no lock while it reads. It ends before the next block if the caller is gone or
    the shards are dropped.

    Args:
        store: the shards.
        storage: the checkpoint storage.
        request: names the job, the checkpoint, and the version and step to continue with.
        is_wanted: returns whether the caller still waits.

    Raises:
        Cancelled: the caller or the shards are gone. The restore may be repeated if the shards still exist.
        StorageFailed: the storage failed, or an earlier restore of the job still waits for it.
        IncompatibleCheckpoint: the variables differ; the message names them. Nothing was changed.
        CorruptCheckpoint: the checkpoint is damaged. The shards are closed, because they may be partly overwritten.
        BadRequest: training has begun.
    """
    group = store.hosted.group(request.job, request.generation)
    config = group.config

    def check() -> None:
        if group.closed or not is_wanted():
            raise errors.Cancelled(f"the restore of {config.name} has ended: its caller or its shards are gone")

    storage = InterruptibleStorage(storage, check)
    manifest = Catalogue(storage).manifest(request.from_job, request.number)
    slots = not request.partial
    with SavedVariables(storage, manifest, lazily=True) as saved:
        _check(config, saved, partial=request.partial)
        group.restore(request.version, request.step, lambda arena: load(saved, arena, config.variables, slots=slots))


def _check(config: JobShardConfig, saved: SavedVariables, *, partial: bool) -> None:
    wanted = {name: (it.shape, storage_dtype(it.dtype)) for name, it in config.variables.items()}
    if why := restore_problem(wanted, saved.variables, partial=partial):
        raise errors.IncompatibleCheckpoint(f"the checkpoint does not fit job {config.name}: {why}", job=config.name)


def _end_all(cut: Cut) -> None:
    for snapshot in cut.snapshots:
        snapshot.end_saving()


def _saved(shard: int, cut: Cut) -> pb.SavedShard:
    answer = cut.answer
    return pb.SavedShard(
        shard=shard,
        version=answer.version,
        step=answer.step,
        cursors=_cursors(answer.cursors.items()),
        pushes=[
            pb.WorkerPushes(worker=worker, incarnation=it.incarnation, pushes=it.pushes, samples=it.samples)
            for worker, it in answer.pushes.items()
        ],
    )


def _cursors(cursors: Iterable[tuple[str, Cursor]]) -> list[pb.WorkerCursor]:
    return [pb.WorkerCursor(worker=worker, cursor=cursor.to_proto()) for worker, cursor in cursors]


__all__ = ["check_storage", "collect", "hold", "progress_reply", "restore", "resume_commits", "save"]
