"""Effects of the coordinator's machine as calls to simulated servers, with the retries of `EffectRunner`."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal import errors
from shoal._rpc import Backoff
from shoal._wire import Cursor, PushCounts
from shoal.checkpoint_policy import CheckpointChoice
from shoal.status import SavedCheckpoint
from shoal_coordinator.effects.checkpoint_cut import progress_totals
from shoal_coordinator.effects.copy_effects import FIRST_POLL_S, MAX_POLL_S, PROBE_S
from shoal_coordinator.effects.effect_queues import queue_of, take_batch
from shoal_coordinator.effects.failures import AWAY, failure_of
from shoal_coordinator.job import Ledger
from shoal_coordinator.messages import (
    AddBackup,
    AdmitWorker,
    BackupFailed,
    BackupMade,
    CommitCheckpoint,
    CreateShards,
    DropBackup,
    DropCopy,
    DropShards,
    Effect,
    GroupTold,
    ProbeServer,
    Promote,
    RemoveWorker,
    RestoredCheckpoint,
    ScanCheckpoints,
    ServerProbed,
    ServerRef,
    SetLearningRate,
    SplitGroup,
    TakeCut,
    events,
    servers_of,
)
from simulation import messages
from simulation.disk import SavedState, ShardFile
from simulation.invariants import joined
from simulation.scheduler import Future, all_of

if TYPE_CHECKING:
    from simulation.nodes.coordinator import CoordinatorNode

_RETRY_FOR_S, _CREATE_TIMEOUT_S, _RESTORE_TIMEOUT_S = 20.0, 120.0, 600.0
_PAUSE_S = 20.0
Outcome = events.EffectOutcome | Exception


class EffectTasks:
    """The effects of one process of a coordinator, in the queues of the product."""

    def __init__(self, node: "CoordinatorNode") -> None:
        self._node, self._disk = node, node.world.disk
        self._queues: dict[tuple[str, str], deque[Effect]] = {}

    def submit(self, effects: Sequence[Effect]) -> None:
        """Appends effects to the queues of their jobs."""
        for effect in effects:
            key = queue_of(effect)
            if key not in self._queues:
                self._queues[key] = deque()
                self._node.scheduler.spawn(self._node.process, self._drain(key))
            self._queues[key].append(effect)

    async def _drain(self, key: tuple[str, str]) -> None:
        queue = self._queues[key]
        while queue:
            batch = take_batch(queue)
            self._node.scheduler.tell("effects", *batch)
            outcomes = await self._outcomes(batch)
            self._node.scheduler.tell("outcomes", *outcomes)
            if len(outcomes) == 1:
                await self._node.decide(outcomes[0])
            else:
                await self._node.decide(events.OutcomesReceived(tuple(outcomes)))
            if isinstance(outcomes[0], events.ShardsCreated):
                self._created(batch[0])
        del self._queues[key]

    def _created(self, effect: Any) -> None:
        node, generation = self._node, effect.placement.generation
        groups = []
        for server, incarnation in node.machine.members.live_servers.items():
            found = node.world.nodes[server.member]
            if found.incarnation == incarnation and node.network.connected(node.name, found.name):
                groups += found.groups.get(effect.job.name, {}).values()
        job = node.job
        if job and job.placement and job.placement.generation == generation:
            node.checker.begins(generation, groups)

    async def _outcomes(self, batch: list[Effect]) -> list[Any]:
        first = batch[0]
        results: Sequence[Outcome]
        try:
            if isinstance(first, AdmitWorker):
                results = await self._admit([it for it in batch if isinstance(it, AdmitWorker)])
            elif isinstance(first, RemoveWorker):
                await self._remove([it for it in batch if isinstance(it, RemoveWorker)])
                results = [events.EffectDone(effect=it.number) for it in batch]
            else:
                results = [await self._outcome(first)]
        except errors.ShoalError as error:
            results = [error] * len(batch)
        return [
            _failure(effect, result) if isinstance(result, Exception) else result
            for effect, result in zip(batch, results, strict=True)
        ]

    async def _outcome(self, effect: Effect) -> events.EffectOutcome:
        match effect:
            case CreateShards():
                return await self._create(effect)
            case DropShards():
                drop = messages.DropShards(effect.job.name)
                await self._call_all(effect, effect.servers, lambda _: drop, keep_errors=True)
            case ScanCheckpoints():
                return events.CheckpointsScanned(effect.job, self._disk.largest(), effect=effect.number)
            case TakeCut():
                return await self._take_cut(effect)
            case CommitCheckpoint():
                return await self._commit(effect)
            case AddBackup():
                return await self._add_backup(effect)
            case DropBackup() | Promote():
                kind = messages.Promote if isinstance(effect, Promote) else messages.DropBackup
                about = kind(effect.job.name, effect.generation, effect.group, effect.term)
                await self._call_all(effect, effect.servers, lambda _: about)
                return GroupTold(effect.job, effect.group, effect.term, effect=effect.number)
            case DropCopy():
                copy = messages.DropCopy(effect.job.name, effect.generation, effect.group, effect.term)
                await self._call_all(effect, effect.servers, lambda _: copy)
            case ProbeServer():
                return await self._probe(effect)
            case SetLearningRate() | SplitGroup():
                raise AssertionError("no run sets a learning rate, or has shards that are large enough to move")
        return events.EffectDone(effect=effect.number)

    # Calls.

    async def _call_all(
        self,
        effect: Effect,
        servers: Sequence[ServerRef],
        request_for: Callable[[ServerRef], Any],
        *,
        timeout_s: float = 5.0,
        retry_for_s: float = _RETRY_FOR_S,
        keep_errors: bool = False,
    ) -> list[Any]:
        """Calls servers in parallel, and repeats each call while its server cannot be reached."""
        process, scheduler = self._node.process, self._node.scheduler
        calls = [
            scheduler.spawn(process, self._repeated(effect, server, request_for(server), timeout_s, retry_for_s))
            for server in servers
        ]
        if keep_errors:
            for call in calls:
                settled: Future[None] = Future()
                call.result.then(lambda settled=settled: settled.set(None))  # type: ignore[misc]
                await settled
            return []
        return await all_of(call.result for call in calls)

    async def _repeated(
        self, effect: Effect, server: ServerRef, request: Any, timeout_s: float, retry_for_s: float
    ) -> Any:
        node, failed_at = self._node, None
        backoff = Backoff(node.scheduler.random.random)
        while True:
            self._check_wanted(effect, server)
            try:
                return await self._wanted(effect, server, node.call(server.member, request, timeout_s))
            except (errors.Unreachable, errors.DeadlineExceeded):
                now = node.clock.monotonic()
                failed_at = now if failed_at is None else failed_at
                self._check_wanted(effect, server)
                if not retry_for_s:
                    raise
                if now - failed_at + backoff.at_most > retry_for_s:
                    raise errors.Unreachable(f"server {server.member} did not answer") from None
                await node.sleep(backoff.next())

    async def _wanted(self, effect: Effect, server: ServerRef, call: Future[Any]) -> Any:
        """Waits for a call, and checks each second whether it is still wanted."""
        while not call.done:
            either: Future[None] = Future()
            call.then(lambda either=either: either.set(None))  # type: ignore[misc]
            self._node.scheduler.after(1.0, lambda either=either: either.set(None))  # type: ignore[misc]
            await either
            if not self._node.wanted(effect.number, server):  # which has no effect on a call that has ended
                call.fail(errors.Cancelled(f"server {server.member} is gone, or its job has ended"))
        return call.result()

    def _check_wanted(self, effect: Effect, server: ServerRef) -> None:
        if not self._node.wanted(effect.number, server):
            raise errors.Cancelled(f"server {server.member} is gone, or its job has ended")

    # Shards and workers.

    async def _create(self, effect: CreateShards) -> events.ShardsCreated:
        servers, placement = servers_of(effect.placement), effect.placement
        peers = [it.member for it in servers] if effect.spec.optimizer.clip_norm else []
        numbers = {shards[0].server: number for number, shards in placement.by_group().items()}

        async def create() -> None:
            await self._call_all(
                effect,
                servers,
                lambda server: messages.CreateShards(
                    placement.job,
                    placement.generation,
                    effect.spec.consistency,
                    tuple(peer for peer in peers if peer != server.member),
                    numbers[server.member],
                ),
                timeout_s=_CREATE_TIMEOUT_S,
            )

        if not effect.sources:
            await create()
            self._node.checker.restarts(placement.generation, frozenset())
            return events.ShardsCreated(effect.job, effect=effect.number)
        for source in effect.sources:
            self._disk.check()
            number = source.number or max(self._disk.numbers(), default=0)
            saved = self._disk.manifests.get(number)
            if saved is None:
                continue
            await create()
            restore = messages.Restore(placement.job, placement.generation, number, saved.version, saved.step)
            await self._call_all(
                effect, servers, partial(_same, restore), timeout_s=_RESTORE_TIMEOUT_S, retry_for_s=0.0
            )
            self._node.checker.restarts(placement.generation, saved.pushes)
            chosen = CheckpointChoice(source.job, number)
            restored = RestoredCheckpoint(
                chosen, saved.step, frozenset(placement.variables), saved.data, saved.progress_totals, effect.spec.seed
            )
            return events.ShardsCreated(effect.job, restored, effect=effect.number)
        raise errors.CorruptCheckpoint("no checkpoint can be restored")

    async def _admit(self, batch: Sequence[AdmitWorker]) -> list[Outcome]:
        first = batch[0]
        request = messages.AdmitWorkers(first.job.name, tuple((it.worker, it.incarnation, it.rank) for it in batch))
        replies = await self._call_all(first, first.servers, lambda _: request)
        results: list[Outcome] = []
        for effect, column in zip(batch, zip(*replies, strict=True), strict=True):
            refused = [it for it in column if isinstance(it, Exception)]
            step = max((it for it in column if isinstance(it, int)), default=0)
            admitted = events.WorkerAdmitted(effect.job, effect.assignment, step, effect=effect.number)
            results.append(refused[0] if refused else admitted)
        return results

    async def _remove(self, batch: Sequence[RemoveWorker]) -> None:
        first = batch[0]
        if unknown := [it for it in batch if it.committed_steps is None]:
            fence = messages.FenceWorkers(first.job.name, tuple((it.worker, it.incarnation) for it in unknown))
            replies = await self._call_all(first, first.servers, lambda _: fence)
            most = {it.number: max(column) for it, column in zip(unknown, zip(*replies, strict=True), strict=True)}
            batch = [replace(it, committed_steps=most.get(it.number, it.committed_steps)) for it in batch]
            known = tuple(events.WorkerFenced(it.number, it.committed_steps or 0) for it in batch)
            await self._node.decide(known[0] if len(known) == 1 else events.OutcomesReceived(known))
        release = messages.ReleaseWorkers(
            first.job.name, tuple((it.worker, it.incarnation, it.committed_steps or 0) for it in batch)
        )
        await self._call_all(first, first.servers, lambda _: release)

    # Copies.

    async def _add_backup(self, effect: AddBackup) -> BackupMade | BackupFailed:
        """Makes the primary of a group copy it, and waits until the copy is complete, as `add_backup` does."""
        about = effect.job.name, effect.generation, effect.group, effect.term
        request, poll_s = messages.AddBackup(*about, effect.backup.member), FIRST_POLL_S
        while True:
            self._check_wanted(effect, effect.server)
            try:
                [complete] = await self._call_all(effect, effect.servers, lambda _: request)
            except errors.Cancelled:
                raise
            except errors.ShoalError as error:
                return BackupFailed(effect.job, effect.group, effect.term, error.message, effect=effect.number)
            if complete:
                return BackupMade(effect.job, effect.group, effect.term, effect=effect.number)
            await self._node.sleep(poll_s)
            poll_s = min(2 * poll_s, MAX_POLL_S)

    async def _probe(self, effect: ProbeServer) -> ServerProbed:
        silence, request = "", messages.ResumeCommits(effect.job.name, 0)
        try:
            await self._call_all(effect, effect.servers, lambda _: request, timeout_s=PROBE_S, retry_for_s=0.0)
        except (errors.Unreachable, errors.DeadlineExceeded, *errors.SHARDS_LOST) as error:
            silence = error.message
        except errors.ShoalError:
            pass  # it answered
        return ServerProbed(effect.server, effect.incarnation, effect.asked_at, silence, effect=effect.number)

    # Checkpoints.

    async def _take_cut(self, effect: TakeCut) -> events.CutTaken:
        node, job, time = self._node, effect.job.name, self._node.clock.wall()
        names = [server.member for server in effect.servers]
        for server in effect.servers:
            self._check_wanted(effect, server)
        try:
            hold = messages.HoldCommits(job, effect.generation, effect.number)
            progress = joined(await all_of([node.call(name, hold) for name in names]))
            ours = await node.decide(events.CutHeld(effect.job))
            save = messages.Save(
                job, effect.generation, effect.number, effect.checkpoint, progress, _PAUSE_S if effect.last else 0.0
            )
            saved = await all_of([node.call(name, save) for name in names])
        except errors.ShoalError:
            await self._resume(names, job, effect.number)
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

    async def _resume(self, names: Sequence[str], job: str, cut: int) -> None:
        for call in [self._node.call(name, messages.ResumeCommits(job, cut), 1.0) for name in names]:
            with suppress(errors.ShoalError):
                await call

    async def _commit(self, effect: CommitCheckpoint) -> events.CheckpointCommitted:
        node, cut, disk = self._node, effect.cut, self._disk
        servers = servers_of(effect.placement)
        try:
            disk.check()
            if cut.number not in disk.manifests:
                files = await self._collect(effect, servers)
                disk.check()
                found = [pushes for file in files for pushes in file.groups]
                node.checker.published(cut.number, found)
                disk.manifests[cut.number] = SavedState(
                    cut.time, cut.step, cut.version, cut.data, cut.progress_totals, found[0]
                )
        except errors.ShoalError:
            if cut.held_by:
                await self._resume([server.member for server in servers], effect.job.name, cut.held_by)
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

    async def _collect(self, effect: CommitCheckpoint, servers: Sequence[ServerRef]) -> list[ShardFile]:
        request = messages.CollectFiles(effect.job.name, effect.cut.number)
        files = []
        for server in servers:
            for _ in range(50):
                self._check_wanted(effect, server)
                [file] = await self._call_all(effect, [server], lambda _: request)
                if file:
                    files.append(file)
                    break
                await self._node.sleep(0.1)
            else:
                raise errors.StorageFailed(f"server {server.member} did not write its files")
        return files


def _failure(effect: Effect, error: Exception) -> events.EffectOutcome:
    """Returns the outcome of an effect that has failed, as `EffectRunner` does."""
    text = f"{failure_of(effect, error).what}: {error}"
    match effect:
        case DropShards() | DropCopy():
            return events.EffectDone(effect=effect.number)
        case ScanCheckpoints() | TakeCut() | CommitCheckpoint():
            shards_lost = isinstance(error, errors.SHARDS_LOST)
            return events.CheckpointFailed(effect.job, text, shards_lost, effect=effect.number)
        case CreateShards() if isinstance(error, errors.StorageFailed):
            return events.RestoreDeferred(effect.job, text, effect=effect.number)
    return events.EffectFailed(effect.job, text, isinstance(error, AWAY), effect=effect.number)


def _same(request: Any, _: ServerRef) -> Any:
    return request


__all__ = ["EffectTasks"]
