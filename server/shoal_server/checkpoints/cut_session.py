"""A checkpoint as its server sees it: the two halves of a cut, what was written, and the way back."""

from collections.abc import Iterable

from shoal import errors
from shoal._checkpoint import Catalogue, CheckpointStorage, SavedVariables, mismatches
from shoal._wire import Cursor, storage_dtype
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.checkpoints.writer import CheckpointWriter, load
from shoal_server.shards import MAX_PAUSE_S, Cut, JobShardConfig, ShardStore, WorkerProgress

_MAX_WITHIN_S = 10.0
_MAX_COMPLAINTS = 50


def hold(store: ShardStore, saver: CheckpointWriter, request: pb.HoldCommitsRequest) -> pb.HoldCommitsReply:
    """The first half of a cut: no commit begins any more; how far each worker has come."""
    saver.folder  # noqa: B018 - or the second half cannot follow, and training would wait for nothing
    store.terms(request.job, request.generation)
    store.gate(request.job).hold(request.cut)
    furthest: dict[str, WorkerProgress] = {}
    for shard in store.all_shards(request.job):
        for worker, progress in shard.progress().items():
            furthest[worker] = furthest.get(worker, progress).joined(progress)
    return pb.HoldCommitsReply(
        workers=[
            pb.WorkerProgress(worker=worker, incarnation=it.incarnation, committed=it.committed, finished=it.finished)
            for worker, it in furthest.items()
        ]
    )


def save(store: ShardStore, saver: CheckpointWriter, request: pb.SaveRequest) -> pb.SaveReply:
    """The second: all shards as they are with what is committed anywhere. Writing has begun when this returns."""
    saver.folder  # noqa: B018 - or there is nothing to begin
    if not 0 <= request.hold_s <= MAX_PAUSE_S:
        raise errors.BadRequest(f"commits wait from 0 to {MAX_PAUSE_S:g} s after a cut, not {request.hold_s:g}")
    terms = store.terms(request.job, request.generation)
    progress = {it.worker: WorkerProgress(it.incarnation, it.committed, it.finished) for it in request.workers}
    with store.gate(request.job).held(request.cut, request.hold_s):
        cuts = {shard: shard.cut(progress) for shard in store.all_shards(request.job)}
    snapshots = [cut.snapshot for cut in cuts.values()]
    saver.begin(request.job, request.number, request.cut, terms.variables, snapshots)
    return pb.SaveReply(shards=[_saved(shard.layout.shard, cut) for shard, cut in cuts.items()])


def give_up(store: ShardStore, request: pb.ResumeCommitsRequest) -> None:
    """Instead of the second, or of what is to follow one that holds on: commits go on."""
    store.gate(request.job).give_up(request.cut)


def collect(store: ShardStore, saver: CheckpointWriter, request: pb.CollectFilesRequest) -> pb.CollectFilesReply:
    """The files of a checkpoint, if they are written."""
    store.all_shards(request.job)  # or they are lost, and not the files alone
    if not 0 <= request.within_s <= _MAX_WITHIN_S:
        raise errors.BadRequest(f"files are waited for from 0 to {_MAX_WITHIN_S:g} s, not {request.within_s:g}")
    files = saver.collect(request.job, request.number, within_s=request.within_s)
    if files is None:
        return pb.CollectFilesReply()
    named = [pb.SavedFile(name=file.name, bytes=file.nbytes, sums=file.sums) for file in files]
    return pb.CollectFilesReply(done=True, files=named)


def restore(store: ShardStore, folder: CheckpointStorage, request: pb.RestoreRequest) -> None:
    """Overwrites a job's shards here with what a checkpoint holds of them.

    Raises:
        IncompatibleCheckpoint: its variables are others; the message names them. Nothing was changed.
        CorruptCheckpoint: it is damaged. The shards are gone, for they may be overwritten in part.
        BadRequest: training has begun.
    """
    terms = store.terms(request.job, request.generation)
    manifest = Catalogue(folder).manifest(request.from_job, request.number)
    slots = not request.partial
    with SavedVariables(folder, manifest) as saved:
        _check(terms, saved, partial=request.partial)
        for shard in store.all_shards(request.job):
            shard.restore(request.version, request.step, lambda arena: load(saved, arena, terms.variables, slots=slots))


def _check(terms: JobShardConfig, saved: SavedVariables, *, partial: bool) -> None:
    wanted = {name: (it.shape, storage_dtype(it.dtype)) for name, it in terms.variables.items()}
    there = saved.variables
    if partial:
        both = wanted.keys() & there.keys()
        wanted = {name: wanted[name] for name in both}
        there = {name: there[name] for name in both}
    complaints = [*mismatches(wanted, there)]
    if complaints:
        listed = "; ".join(complaints[:_MAX_COMPLAINTS])
        advice = (
            "to begin anew with one that has changed, give it another name in the program"
            if partial
            else "what only one of them has may be left out by a partial restore"
        )
        raise errors.IncompatibleCheckpoint(
            f"the checkpoint does not fit job {terms.name}: {listed}; {advice}", job=terms.name
        )


def _saved(shard: int, cut: Cut) -> pb.SavedShard:
    answer = cut.answer
    return pb.SavedShard(
        shard=shard, version=answer.version, step=answer.step, cursors=_cursors(answer.cursors.items())
    )


def _cursors(cursors: Iterable[tuple[str, Cursor]]) -> list[pb.WorkerCursor]:
    return [pb.WorkerCursor(worker=worker, cursor=cursor.to_proto()) for worker, cursor in cursors]


__all__ = ["collect", "give_up", "hold", "restore", "save"]
