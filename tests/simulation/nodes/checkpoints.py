"""Checkpoints of a simulated coordinator: the calls of a cut, and the manifests of what the servers have written."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from shoal import errors
from shoal._wire import Cursor, PushCounts
from shoal.status import SavedCheckpoint
from shoal_coordinator.effects.checkpoint_cut import progress_totals
from shoal_coordinator.job import Ledger
from shoal_coordinator.messages import CommitCheckpoint, ServerRef, TakeCut, events, servers_of
from simulation import messages
from simulation.disk import SavedState, ShardFile
from simulation.invariants import joined
from simulation.scheduler import all_of

if TYPE_CHECKING:
    from simulation.nodes.effects import EffectTasks

_PAUSE_S = 20.0


async def take_cut(tasks: "EffectTasks", effect: TakeCut) -> events.CutTaken:
    """Makes all servers save their shards as of one moment, as `checkpoint_cut` does."""
    node, job, time = tasks.node, effect.job.name, tasks.node.clock.wall()
    names = [server.member for server in effect.servers]
    for server in effect.servers:
        tasks.check_wanted(effect, server)
    try:
        hold = messages.HoldCommits(job, effect.generation, effect.number)
        progress = joined(await all_of([node.call(name, hold) for name in names]))
        ours = await node.decide(events.CutHeld(effect.job))
        save = messages.Save(
            job, effect.generation, effect.number, effect.checkpoint, progress, _PAUSE_S if effect.last else 0.0
        )
        saved = await all_of([node.call(name, save) for name in names])
    except errors.ShoalError:
        await _resume(tasks, names, job, effect.number)
        raise
    answers = [answer for of_server in saved for answer, _ in of_server]
    cursors: dict[str, Cursor] = {}
    pushes: dict[str, PushCounts] = {}
    for answer in answers:
        for worker, cursor in answer.cursors.items():
            cursors[worker] = max(cursor, cursors.get(worker, cursor))
        for worker, counts in answer.pushes.items():
            pushes[worker] = max(counts, pushes.get(worker, counts))
    data = Ledger.from_proto(ours.ledger).settled(cursors, ours.ranks) if ours.ledger else None
    files = [found for of_server in saved for _, found in of_server]
    if node.machine.find_effect(effect.number):  # otherwise the job has restarted, and nobody uses this cut
        node.checker.cut(effect.generation, files, data)
    return events.CutTaken(
        effect.job,
        number=effect.checkpoint,
        step=max(answer.step for answer in answers),
        version=max(answer.version for answer in answers),
        time=time,
        data=data,
        progress_totals=progress_totals(ours, pushes),
        held_by=effect.number if effect.last else 0,
        effect=effect.number,
    )


async def _resume(tasks: "EffectTasks", names: Sequence[str], job: str, cut: int) -> None:
    for call in [tasks.node.call(name, messages.ResumeCommits(job, cut), 1.0) for name in names]:
        with suppress(errors.ShoalError):
            await call


async def commit(tasks: "EffectTasks", effect: CommitCheckpoint) -> events.CheckpointCommitted:
    """Completes a checkpoint, as `checkpoint_commit` does."""
    node, cut, disk = tasks.node, effect.cut, tasks.disk
    servers = servers_of(effect.placement)
    try:
        disk.check()
        if cut.number not in disk.manifests:
            files = await _collect(tasks, effect, servers)
            disk.check()
            found = [pushes for file in files for pushes in file.groups]
            node.checker.published(cut.number, found)
            disk.manifests[cut.number] = SavedState(
                cut.time, cut.step, cut.version, cut.data, cut.progress_totals, found[0]
            )
    except errors.ShoalError:
        if cut.held_by:
            await _resume(tasks, [server.member for server in servers], effect.job.name, cut.held_by)
        raise
    saved = SavedCheckpoint(cut.number, cut.step, 100, cut.time)
    removed: tuple[int, ...] = ()
    published = events.CheckpointPublished(effect.number, effect.job, saved, 0)
    if await node.decide(published) and not disk.away:
        keep = effect.spec.checkpoints.keep_last if effect.spec.checkpoints else 1
        removed = tuple(disk.numbers()[:-keep])
        for number in removed:
            disk.remove(number)
    return events.CheckpointCommitted(effect.job, saved, removed, last=bool(cut.held_by), effect=effect.number)


async def _collect(tasks: "EffectTasks", effect: CommitCheckpoint, servers: Sequence[ServerRef]) -> list[ShardFile]:
    request = messages.CollectFiles(effect.job.name, effect.cut.number)
    files = []
    for server in servers:
        for _ in range(50):
            tasks.check_wanted(effect, server)
            [file] = await tasks.call_all(effect, [server], lambda _: request)
            if file:
                files.append(file)
                break
            await tasks.node.sleep(0.1)
        else:
            raise errors.StorageFailed(f"server {server.member} did not write its files")
    return files


__all__ = ["commit", "take_cut"]
