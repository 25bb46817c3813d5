"""Effects of the coordinator's machine as calls to simulated servers, with the retries of `EffectRunner`.

`copy_effects` and `checkpoints` have the effects about copies and checkpoints.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal import errors
from shoal._rpc import Backoff
from shoal.checkpoint_policy import CheckpointChoice
from shoal_coordinator.effects.effect_queues import queue_of, take_batch
from shoal_coordinator.effects.failures import failure_of, loses_shards
from shoal_coordinator.messages import (
    AddBackup,
    AdmitWorker,
    CommitCheckpoint,
    CreateShards,
    DropBackup,
    DropCopy,
    DropShards,
    Effect,
    ProbeServer,
    Promote,
    RemoveWorker,
    RestoredCheckpoint,
    ScanCheckpoints,
    ServerRef,
    SetLearningRate,
    SplitGroup,
    TakeCut,
    events,
    servers_of,
)
from simulation import messages
from simulation.nodes import checkpoints, copy_effects
from simulation.scheduler import Future, all_of

if TYPE_CHECKING:
    from simulation.nodes.coordinator import CoordinatorNode

_RETRY_FOR_S, _CREATE_TIMEOUT_S, _RESTORE_TIMEOUT_S = 20.0, 120.0, 600.0
_PAUSE_S = 20.0
Outcome = events.EffectOutcome | Exception


class EffectTasks:
    """The effects of one process of a coordinator, in the queues of the product.

    Attributes:
        node: the coordinator.
        disk: the checkpoint storage.
    """

    def __init__(self, node: "CoordinatorNode") -> None:
        self.node, self.disk = node, node.world.disk
        self._queues: dict[tuple[str, str], deque[Effect]] = {}

    def submit(self, effects: Sequence[Effect]) -> None:
        """Appends effects to the queues of their jobs."""
        for effect in effects:
            key = queue_of(effect)
            if key not in self._queues:
                self._queues[key] = deque()
                self.node.scheduler.spawn(self.node.process, self._drain(key))
            self._queues[key].append(effect)

    async def _drain(self, key: tuple[str, str]) -> None:
        queue = self._queues[key]
        while queue:
            batch = take_batch(queue)
            self.node.scheduler.tell("effects", *batch)
            outcomes = await self._outcomes(batch)
            self.node.scheduler.tell("outcomes", *outcomes)
            if len(outcomes) == 1:
                await self.node.decide(outcomes[0])
            else:
                await self.node.decide(events.OutcomesReceived(tuple(outcomes)))
            if isinstance(outcomes[0], events.ShardsCreated):
                self._created(batch[0])
        del self._queues[key]

    def _created(self, effect: Any) -> None:
        node, generation = self.node, effect.placement.generation
        groups = []
        for server, incarnation in node.machine.members.live_servers.items():
            found = node.world.nodes[server.member]
            if found.incarnation == incarnation and node.network.connected(node.name, found.name):
                groups += found.hosted.held(effect.job.name).values()
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
                await self.call_all(effect, effect.servers, lambda _: drop, keep_errors=True)
            case ScanCheckpoints():
                return events.CheckpointsScanned(effect.job, self.disk.largest(), effect=effect.number)
            case TakeCut():
                return await checkpoints.take_cut(self, effect)
            case CommitCheckpoint():
                return await checkpoints.commit(self, effect)
            case AddBackup():
                return await copy_effects.add_backup(self, effect)
            case SplitGroup():
                return await copy_effects.split(self, effect)
            case DropBackup() | Promote():
                return await copy_effects.tell(self, effect)
            case DropCopy():
                await copy_effects.drop_copy(self, effect)
            case ProbeServer():
                return await copy_effects.probe(self, effect)
            case SetLearningRate():
                raise AssertionError("no run sets a learning rate")
        return events.EffectDone(effect=effect.number)

    # Calls.

    async def call(self, effect: Any, request: Any, timeout_s: float = 5.0) -> Any:
        """Calls the only server of an effect."""
        [reply] = await self.call_all(effect, effect.servers, partial(_same, request), timeout_s=timeout_s)
        return reply

    async def call_all(
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
        process, scheduler = self.node.process, self.node.scheduler
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
        node, failed_at = self.node, None
        backoff = Backoff(node.scheduler.random.random)
        while True:
            self.check_wanted(effect, server)
            try:
                return await self._wanted(effect, server, node.call(server.member, request, timeout_s))
            except (errors.Unreachable, errors.DeadlineExceeded):
                now = node.clock.monotonic()
                failed_at = now if failed_at is None else failed_at
                self.check_wanted(effect, server)
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
            self.node.scheduler.after(1.0, lambda either=either: either.set(None))  # type: ignore[misc]
            await either
            if not self.node.wanted(effect.number, server):  # which has no effect on a call that has ended
                call.fail(errors.Cancelled(f"server {server.member} is gone, or its job has ended"))
        return call.result()

    def check_wanted(self, effect: Effect, server: ServerRef) -> None:
        """Raises Cancelled if a server is gone, or an effect is not wanted any more."""
        if not self.node.wanted(effect.number, server):
            raise errors.Cancelled(f"server {server.member} is gone, or its job has ended")

    # Shards and workers.

    async def _create(self, effect: CreateShards) -> events.ShardsCreated:
        servers, placement = servers_of(effect.placement), effect.placement
        peers = [it.member for it in servers] if effect.spec.optimizer.clip_norm else []
        parts = {shards[0].server: tuple(it.layout.shard for it in shards) for shards in placement.by_group().values()}

        async def create() -> None:
            await self.call_all(
                effect,
                servers,
                lambda server: messages.CreateShards(
                    placement.job,
                    placement.generation,
                    effect.spec.consistency,
                    tuple(peer for peer in peers if peer != server.member),
                    parts[server.member],
                ),
                timeout_s=_CREATE_TIMEOUT_S,
            )

        if not effect.sources:
            await create()
            self.node.checker.restarts(placement.generation, frozenset())
            return events.ShardsCreated(effect.job, effect=effect.number)
        for source in effect.sources:
            self.disk.check()
            number = source.number or max(self.disk.numbers(), default=0)
            saved = self.disk.manifests.get(number)
            if saved is None:
                continue
            await create()
            restore = messages.Restore(placement.job, placement.generation, number, saved.version, saved.step)
            await self.call_all(effect, servers, partial(_same, restore), timeout_s=_RESTORE_TIMEOUT_S, retry_for_s=0.0)
            self.node.checker.restarts(placement.generation, saved.pushes)
            chosen = CheckpointChoice(source.job, number)
            restored = RestoredCheckpoint(
                chosen, saved.step, frozenset(placement.variables), saved.data, saved.progress_totals, effect.spec.seed
            )
            return events.ShardsCreated(effect.job, restored, effect=effect.number)
        raise errors.CorruptCheckpoint("no checkpoint can be restored")

    async def _admit(self, batch: Sequence[AdmitWorker]) -> list[Outcome]:
        first = batch[0]
        request = messages.AdmitWorkers(first.job.name, tuple((it.worker, it.incarnation, it.rank) for it in batch))
        replies = await self.call_all(first, first.servers, lambda _: request)
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
            replies = await self.call_all(first, first.servers, lambda _: fence)
            most = {it.number: max(column) for it, column in zip(unknown, zip(*replies, strict=True), strict=True)}
            batch = [replace(it, committed_steps=most.get(it.number, it.committed_steps)) for it in batch]
            known = tuple(events.WorkerFenced(it.number, it.committed_steps or 0) for it in batch)
            await self.node.decide(known[0] if len(known) == 1 else events.OutcomesReceived(known))
        release = messages.ReleaseWorkers(
            first.job.name, tuple((it.worker, it.incarnation, it.committed_steps or 0) for it in batch)
        )
        await self.call_all(first, first.servers, lambda _: release)


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
    return events.EffectFailed(effect.job, text, loses_shards(effect, error), effect=effect.number)


def _same(request: Any, _: ServerRef) -> Any:
    return request


__all__ = ["EffectTasks"]
