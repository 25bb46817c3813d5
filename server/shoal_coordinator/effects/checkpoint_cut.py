"""The cut: all servers of a job begin to save their shards as they are at one moment.

How it is consistent, and what the servers do for it, is in docs/decisions/0021. Nothing here waits for a storage, since
what trains waits for this.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from shoal import errors
from shoal._wire import Cursor
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.effects.server_calls import ConcurrentCalls, ServerCalls
from shoal_coordinator.job import Ledger
from shoal_coordinator.messages import CutTaken, HoldResult, ServerRef, TakeCut

# Servers wait up to 2 s for commits that have begun. To give up is worth no wait: they let commits pass by themselves.
_HOLD_TIMEOUT_S, _GIVE_UP_TIMEOUT_S = 5.0, 1.0
# How long commits wait after the last cut of a job's shards, which the job then goes back to. Workers repeat for 30 s
# what is not answered. While what takes longer than this is written, training goes on, and that is done again.
_PAUSE_S = 20.0


def take_cut(effect: TakeCut, calls: ServerCalls, held: Callable[[], HoldResult]) -> CutTaken:
    """Has all servers save at one moment.

    Args:
        effect: what to do.
        calls: the way to servers.
        held: gives the coordinator's own part, as it is when it is called.

    Raises:
        ShoalError: there is no cut; training goes on.
    """
    now = time.time()
    with calls.at_once(effect.servers) as servers:
        try:
            ours, shards = _cut(effect, servers, held)
        except errors.ShoalError:
            # Those that answered `Hold` hold back commits, and would for 2 s.
            _give_up(servers, effect.job.name, effect.number)
            raise
    return CutTaken(
        effect.job,
        number=effect.checkpoint,
        step=max((shard.step for shard in shards), default=0),
        version=max((shard.version for shard in shards), default=0),
        time=now,
        data=Ledger.from_proto(ours.ledger).settled(cursors(shards), ours.ranks) if ours.ledger else None,
        progress_totals=ours.progress_totals,
        held_by=effect.number if effect.last else 0,
        effect=effect.number,
    )


def let_pass(servers: Sequence[ServerRef], cut: CutTaken, calls: ServerCalls) -> None:
    """Has commits go on that a cut holds back, to which the job will not go back."""
    if cut.held_by:
        with calls.at_once(servers) as together:
            _give_up(together, cut.job.name, cut.held_by)


def _give_up(servers: ConcurrentCalls, job: str, cut: int) -> None:
    servers.tell("ResumeCommits", pb.ResumeCommitsRequest(job=job, cut=cut), timeout_s=_GIVE_UP_TIMEOUT_S)


def _cut(
    effect: TakeCut, servers: ConcurrentCalls, held: Callable[[], HoldResult]
) -> tuple[HoldResult, list[pb.SavedShard]]:
    job = effect.job.name
    hold = pb.HoldCommitsRequest(job=job, generation=effect.generation, cut=effect.number)
    replies = servers.call("HoldCommits", hold, timeout_s=_HOLD_TIMEOUT_S)
    # No commit passes now. Data that is marked as done was committed before, and nothing else will be in the cut.
    ours = held()
    save = pb.SaveRequest(job=job, generation=effect.generation, cut=effect.number, number=effect.checkpoint)
    save.hold_s = _PAUSE_S if effect.last else 0.0
    save.workers.extend(furthest(worker for reply in replies for worker in reply.workers))
    return ours, [shard for reply in servers.call("Save", save) for shard in reply.shards]


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
