"""The cut of a checkpoint: the calls by which all servers of a job save their shards as of one moment.

docs/decisions/0021 explains why the cut is consistent, and what servers do. Training waits for the cut, so nothing here
waits for checkpoint storage.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal import errors
from shoal._wire import Cursor, PushCounts
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import state_pb2
from shoal_coordinator.effects.server_calls import ConcurrentCalls, ServerCalls
from shoal_coordinator.job import Ledger
from shoal_coordinator.messages import CutTaken, HoldResult, ServerRef, TakeCut

# Servers wait up to 2 s for commits that have begun. ResumeCommits needs no long timeout, because servers also resume
# commits by themselves.
_HOLD_TIMEOUT_S, _RESUME_TIMEOUT_S = 5.0, 1.0
# Seconds that commits wait after the final cut of a job's shards, from which the job restarts. Workers retry for 30 s.
# If writing takes longer than this, training resumes, and the work done after that is repeated.
_PAUSE_S = 20.0


def take_cut(effect: TakeCut, calls: ServerCalls, held: Callable[[], HoldResult]) -> CutTaken:
    """Makes all servers save their shards as of one moment.

    Args:
        effect: The cut to take.
        calls: The calls to servers.
        held: Returns the coordinator's own part of the cut, as of the moment of the call.

    Returns:
        The cut with the ledger and the progress as of the same moment.

    Raises:
        ShoalError: There is no cut; training continues.
    """
    now = time.time()
    with calls.concurrently(effect.servers) as servers:
        try:
            ours, shards = _cut(effect, servers, held)
        except errors.ShoalError:
            # Servers that have replied to HoldCommits would hold back commits for 2 s more.
            _send_resume(servers, effect.job.name, effect.number)
            raise
    return CutTaken(
        effect.job,
        number=effect.checkpoint,
        step=max((shard.step for shard in shards), default=0),
        version=max((shard.version for shard in shards), default=0),
        time=now,
        data=Ledger.from_proto(ours.ledger).settled(cursors(shards), ours.ranks) if ours.ledger else None,
        progress_totals=progress_totals(ours, pushes(shards)),
        held_by=effect.number if effect.last else 0,
        effect=effect.number,
    )


def resume_commits(servers: Sequence[ServerRef], cut: CutTaken, calls: ServerCalls) -> None:
    """Makes servers resume the commits that a final cut holds back, if the checkpoint has failed.

    Args:
        servers: The servers of the job.
        cut: The cut. If it holds back nothing, there are no calls.
        calls: The calls to servers.
    """
    if cut.held_by:
        with calls.concurrently(servers) as channels:
            _send_resume(channels, cut.job.name, cut.held_by)


def _send_resume(servers: ConcurrentCalls, job: str, cut: int) -> None:
    servers.send("ResumeCommits", pb.ResumeCommitsRequest(job=job, cut=cut), timeout_s=_RESUME_TIMEOUT_S)


def _cut(
    effect: TakeCut, servers: ConcurrentCalls, held: Callable[[], HoldResult]
) -> tuple[HoldResult, list[pb.SavedShard]]:
    job = effect.job.name
    hold = pb.HoldCommitsRequest(job=job, generation=effect.generation, cut=effect.number)
    replies = servers.call("HoldCommits", hold, timeout_s=_HOLD_TIMEOUT_S)
    # Servers now hold back commits. Data that the ledger marks as done was committed before, so the cut contains it.
    ours = held()
    save = pb.SaveRequest(job=job, generation=effect.generation, cut=effect.number, number=effect.checkpoint)
    save.hold_s = _PAUSE_S if effect.last else 0.0
    save.workers.extend(latest_progress(worker for reply in replies for worker in reply.workers))
    return ours, [shard for reply in servers.call("Save", save) for shard in reply.shards]


def latest_progress(workers: Iterable[pb.WorkerProgress]) -> list[pb.WorkerProgress]:
    """Returns, for the newest incarnation of each worker, the largest steps on any server."""
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
    """Returns each worker's largest cursor over all shards.

    With backup workers each server closes its own steps, so cursors may differ. A sample that counts on one server
    counts as trained on.
    """
    most: dict[str, Cursor] = {}
    for shard in shards:
        for it in shard.cursors:
            cursor = Cursor.from_proto(it.cursor)
            most[it.worker] = max(cursor, most.get(it.worker, cursor))
    return most


def pushes(shards: Iterable[pb.SavedShard]) -> dict[str, PushCounts]:
    """Returns each worker's largest counts over all shards, of its newest incarnation."""
    most: dict[str, PushCounts] = {}
    for shard in shards:
        for it in shard.pushes:
            counts = PushCounts(it.incarnation, it.pushes, it.samples)
            most[it.worker] = max(counts, most.get(it.worker, counts))
    return most


def progress_totals(ours: HoldResult, applied: Mapping[str, PushCounts]) -> state_pb2.ProgressRecord:
    """Returns the progress at the cut: the reports of live workers are replaced with what the servers have applied.

    A report can be half a second old. In synchronous mode it can also count pushes of a step that the cut lacks.

    Args:
        ours: The coordinator's part of the cut.
        applied: By worker, the applied pushes.

    Returns:
        The totals, with the reports of all workers that the servers do not know.
    """
    record = state_pb2.ProgressRecord()
    record.CopyFrom(ours.progress_totals)
    totals = record.totals
    for worker, reported in ours.reported.items():
        counts = applied.get(worker)
        if counts and counts.incarnation == reported.incarnation:
            totals.accepted = max(0, totals.accepted + counts.pushes - reported.pushes)
            if ours.has_samples:
                totals.samples = max(0, totals.samples + counts.samples - reported.samples)
    return record
