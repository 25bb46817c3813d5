"""Server of a simulation: lock groups with the real state machine, behind the calls that servers answer."""

from typing import Any

from shoal import errors
from shoal.status import Role
from shoal_server.shards.machine import events
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.pending_cut import NORM_WAIT_S
from simulation import messages
from simulation.disk import ShardFile
from simulation.network import Context
from simulation.nodes.group import Group, answer_in
from simulation.nodes.node import Member, Node, World
from simulation.scheduler import Future, Life


class ServerNode(Node):
    """A server.

    The methods `machine_for`, `group_for` and `fence` are seams: bugs are planted there, and a server with replicas
    sends there what its backup has to know.
    """

    def __init__(self, name: str, world: World, pace: float) -> None:
        super().__init__(name, world, pace)
        self.groups: dict[str, Group] = {}
        self._creating: dict[str, int] = {}  # by job, the creations in progress that were not dropped
        self._saves: dict[str, tuple[int, ShardFile | None]] = {}  # by job, its newest checkpoint; None: not written
        self._registered = False  # whether the process was ever registered
        self._member: Member | None = None
        self._handlers: dict[type, Any] = {
            messages.CreateShards: self._create,
            messages.DropShards: self._drop,
            messages.Restore: self._restore,
            messages.AdmitWorkers: self._admit,
            messages.FenceWorkers: self._fence,
            messages.ReleaseWorkers: self._release,
            messages.HoldCommits: self._hold,
            messages.ResumeCommits: self._resume,
            messages.Save: self._save,
            messages.CollectFiles: self._collect,
            messages.Pull: self._pull,
            messages.Push: self._push,
            messages.Commit: self._commit,
            messages.ShareNorm: self._norm,
        }

    def begin(self, life: Life) -> None:
        self._registered = False
        self._member = Member(self, Role.SERVER, on_incarnation=self._on_incarnation, on_end=self._clear)
        self.scheduler.spawn(life, self._member.run())

    def crashed(self) -> None:
        self._clear()
        self._member = None

    @property
    def incarnation(self) -> int:
        """The incarnation of its process; 0 if there is none."""
        return self._member.incarnation if self._member else 0

    def _on_incarnation(self, _: int) -> None:
        self._registered = True

    async def serve(self, request: Any, context: Context) -> Any:
        if not self._registered:
            raise errors.Unreachable("this server is not registered yet; try again")
        return await self._handlers[type(request)](request, context)

    # Seams.

    def machine_for(self, config: messages.CreateShards) -> GroupState:
        """Returns the state machine of a new lock group."""
        mode = mode_for(config.consistency, shares_norms=bool(config.norms))
        return GroupState(config.job, mode, peers=config.norms)

    def group_for(self, job: str, generation: int) -> Group:
        """Returns a job's group for a call that carries a generation."""
        group = self.group_at_any_generation(job)
        if group.generation != generation:
            raise errors.StaleGeneration(f"{self.name} has generation {group.generation}, not {generation}")
        return group

    def fence(self, group: Group, worker: str, incarnation: int) -> int:
        """Fences a worker, and returns its committed steps."""
        return events.only(group.handle(events.WorkerFenced(worker, incarnation)), events.AnswerFence).committed_steps

    def group_at_any_generation(self, job: str) -> Group:
        """Returns a job's group."""
        if job not in self.groups:
            raise errors.UnknownJob(f"{job} has no shards on {self.name}")
        return self.groups[job]

    # Calls of the coordinator.

    async def _create(self, request: messages.CreateShards, context: Context) -> None:
        _check_awaited(context)
        held = self.groups.get(request.job)
        if held and held.generation > request.generation:
            raise errors.StaleGeneration(f"{self.name} has generation {held.generation}, not {request.generation}")
        if held and held.generation == request.generation:
            return
        self._creating[request.job] = self._creating.get(request.job, 0) + 1
        mine = self._creating[request.job]
        await self.sleep(0.01)  # to allocate them
        if self._creating.get(request.job) != mine:
            raise errors.UnknownJob(f"{request.job} was dropped while its shards were being created")
        group = Group(self.name, request, self.machine_for(request), self.scheduler, self.checker)
        if held:
            held.close()
        self.groups[request.job] = group

    async def _drop(self, request: messages.DropShards, context: Context) -> None:
        _check_awaited(context)
        held = self.groups.pop(request.job, None)
        self._creating.pop(request.job, None)
        self._saves.pop(request.job, None)
        if held:
            held.close()

    async def _restore(self, request: messages.Restore, context: Context) -> None:
        group = self.group_for(request.job, request.generation)
        disk = self.world.disk
        disk.check()
        await self.sleep(0.02)
        if group.closed or not context.active:
            raise errors.Cancelled("the restore has ended")
        disk.check()
        saved = disk.manifests.get(request.number)
        if saved is None:
            raise errors.UnknownCheckpoint(f"there is no checkpoint {request.number}")
        group.restore(saved.pushes, request.version, request.step)

    async def _admit(self, request: messages.AdmitWorkers, context: Context) -> list[int | errors.ShoalError]:
        _check_awaited(context)
        group = self.group_at_any_generation(request.job)
        results: list[int | errors.ShoalError] = []
        for worker, incarnation, rank in request.workers:
            try:
                effects = group.handle(events.WorkerAdmitted(worker, incarnation, rank))
                results.append(events.only(effects, events.AnswerAdmission).step)
            except (errors.Fenced, errors.BadRequest) as error:
                results.append(error)
        return results

    async def _fence(self, request: messages.FenceWorkers, context: Context) -> list[int]:
        _check_awaited(context)
        group = self.group_at_any_generation(request.job)
        committed = []
        for worker, incarnation in request.workers:
            committed.append(self.fence(group, worker, incarnation))
            group.fenced[worker] = max(incarnation, group.fenced.get(worker, 0))
        return committed

    async def _release(self, request: messages.ReleaseWorkers, context: Context) -> None:
        _check_awaited(context)
        group = self.group_at_any_generation(request.job)
        for worker, incarnation, committed in request.workers:
            group.released.setdefault((worker, incarnation), committed)
            self._close_step(group, group.handle(events.WorkerReleased(worker, incarnation, committed)))

    async def _hold(self, request: messages.HoldCommits, context: Context) -> dict[str, events.WorkerProgress]:
        del context
        group = self.group_for(request.job, request.generation)
        await group.hold(request.cut)
        group.check_open()
        return group.machine.progress()

    async def _resume(self, request: messages.ResumeCommits, context: Context) -> None:
        del context
        self.group_at_any_generation(request.job).resume(request.cut)

    async def _save(self, request: messages.Save, context: Context) -> tuple[events.AnswerCut, frozenset[Any]]:
        del context
        group = self.group_for(request.job, request.generation)
        group.take(request.cut)
        pause_s = 0.0
        try:
            answered: Future[events.AnswerCut] = Future()
            group.waiting_cut = answered
            self._close_step(group, group.handle(events.CutRequested(request.progress)))
            self.scheduler.after(NORM_WAIT_S, lambda: answered.fail(errors.Overloaded("norms did not arrive")))
            answer = await answered
            pushes, pause_s = frozenset(group.pushes), request.pause_s
        finally:
            group.waiting_cut = None
            group.taken(pause_s)
        self._saves[request.job] = mine = (request.number, None)
        self.scheduler.spawn(self.process, self._write(request, ShardFile(pushes, answer.version), mine))
        return answer, pushes

    async def _write(self, request: messages.Save, file: ShardFile, mine: tuple[int, ShardFile | None]) -> None:
        await self.sleep(0.05 + 0.2 * self.scheduler.random.random())
        while self.world.disk.away:
            await self.sleep(0.5)
        self.world.disk.files[request.number, request.cut, self.name] = file
        if self._saves.get(request.job) is mine:
            self._saves[request.job] = request.number, file

    async def _collect(self, request: messages.CollectFiles, context: Context) -> ShardFile | None:
        del context
        self.group_at_any_generation(request.job)
        number, file = self._saves.get(request.job, (0, None))
        if request.number != number:
            raise errors.UnknownCheckpoint(f"{self.name} does not write checkpoint {request.number}")
        return file

    # Calls of workers.

    async def _pull(self, request: messages.Pull, context: Context) -> messages.Pulled:
        group = self.group_for(request.stamp.job, request.stamp.generation)
        ticket = group.pull(request.stamp, request.ahead)
        if not ticket.done:
            context.on_cancel = lambda: group.abandon(ticket)
            if not context.active:
                group.abandon(ticket)
        pulled = await ticket
        group.check_open()
        self.checker.answered(group, request.stamp)
        return pulled

    async def _push(self, request: messages.Push, context: Context) -> events.AnswerPush:
        del context
        stamp = request.stamp
        group = self.group_for(stamp.job, stamp.generation)
        group.check_open()
        if known := group.machine.answer_to(stamp.worker, stamp.incarnation, stamp.step):
            group.committed(stamp, known)
            return known
        if request.name:
            await self.sleep(0.002 * self.scheduler.random.random())  # its gradient arrives
        staged = events.PushStaged(
            stamp.worker,
            stamp.incarnation,
            stamp.step,
            request.weight,
            request.version,
            request.name,
            request.cursor,
        )
        answer = answer_in(group.handle(staged))
        group.staged[stamp.worker] = request.name
        return await self._committed(group, stamp) if request.commit else answer

    async def _commit(self, request: messages.Commit, context: Context) -> events.AnswerPush:
        del context
        group = self.group_for(request.stamp.job, request.stamp.generation)
        return await self._committed(group, request.stamp)

    async def _committed(self, group: Group, stamp: messages.Stamp) -> events.AnswerPush:
        await group.enter_gate()
        try:
            effects = group.handle(events.PushCommitted(stamp.worker, stamp.incarnation, stamp.step, defers=True))
            answer = answer_in(effects)
            group.committed(stamp, answer)
            if group.fold(effects):
                await self.sleep(0.001 * self.scheduler.random.random())  # the last gradients are added up
                self._share(group, group.handle(events.FoldsDone()))
            else:
                self._share(group, effects)
            return answer
        finally:
            group.leave_gate()

    def _close_step(self, group: Group, effects: list[events.LockGroupEffect]) -> None:
        """Closes the step that these effects seal, at once."""
        if group.fold(effects):
            effects = group.handle(events.FoldsDone())
        self._share(group, effects)

    # Norms.

    def _share(self, group: Group, effects: list[events.LockGroupEffect]) -> None:
        for effect in effects:
            if isinstance(effect, events.ShareNorm):
                for peer in group.config.norms:
                    self.scheduler.spawn(self.process, self._send_norm(group, peer, effect))

    async def _send_norm(self, group: Group, peer: str, norm: events.ShareNorm) -> None:
        """Sends squares until the other server has them, or a later step has squares."""
        request = messages.ShareNorm(group.config.job, group.generation, self.name, norm.step, norm.squares)
        while not group.closed and group.to_share is norm:
            try:
                await self.call(peer, request)
            except errors.ShoalError:
                await self.sleep(0.1)
            else:
                return

    async def _norm(self, request: messages.ShareNorm, context: Context) -> None:
        del context
        group = self.group_for(request.job, request.generation)
        self._close_step(group, group.handle(events.NormReceived(request.server, request.step, request.squares)))

    def _clear(self) -> None:
        groups, self.groups = self.groups, {}
        self._creating, self._saves = {}, {}
        for group in groups.values():
            group.close()


def _check_awaited(context: Context) -> None:
    if not context.active:
        raise errors.Cancelled("the caller does not wait any more")


__all__ = ["ServerNode"]
