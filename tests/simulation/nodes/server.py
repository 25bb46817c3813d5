"""Server of a simulation: lock groups with the real state machine, behind the calls that servers answer."""

from collections.abc import Callable, Sequence
from typing import Any

from shoal import errors
from shoal.status import Role, ServerLoad
from shoal_coordinator.messages import HeartbeatResult
from shoal_server.shards.group.input_log import InputLog, InputSender
from shoal_server.shards.group.pending_cut import NORM_WAIT_S
from shoal_server.shards.machine import events
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.mode import Mode
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.machine.worker_progress import WorkerProgress
from simulation import messages
from simulation.disk import ShardFile
from simulation.invariants import joined
from simulation.network import Context
from simulation.nodes.copies import Copies
from simulation.nodes.draining import GRACE_S, Draining
from simulation.nodes.group import Group, answer_in
from simulation.nodes.hosted import Hosted, check_whole
from simulation.nodes.node import Member, Node, World
from simulation.nodes.replica import Replica
from simulation.scheduler import Future, Life


class ServerNode(Node):
    """A server.

    `replica_class` and the methods `machine_for`, `log_for`, `group_for` and `fence` are seams: bugs are planted there.

    Attributes:
        hosted: the lock groups, with the backups.
        copies: the connections between primaries and backups.
        draining: the end of its process.
    """

    replica_class: type[Replica] = Replica

    def __init__(self, name: str, world: World, pace: float) -> None:
        super().__init__(name, world, pace)
        self.hosted = Hosted(name)
        self.copies, self.draining = Copies(self), Draining(self)
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
            messages.AddBackup: self._copy_call(Copies.add),
            messages.DropBackup: self._copy_call(Copies.drop),
            messages.Promote: self._copy_call(Copies.promote),
            messages.DropCopy: self._copy_call(Copies.drop_copy, awaited=False),
            messages.SplitGroup: self._split,
            messages.ReplicaHello: self._copy_call(Copies.accept, awaited=False),
        }

    def begin(self, life: Life) -> None:
        self._registered = False
        self.draining.new_process()
        self.copies = Copies(self)
        self._member = Member(
            self,
            Role.SERVER,
            on_reply=self._on_heartbeat,
            on_incarnation=self._on_incarnation,
            on_end=self._clear,
            load=self._load,
        )
        self.scheduler.spawn(life, self._member.run())

    def crashed(self) -> None:
        self._clear()
        self.draining.new_process()
        self._member = None

    @property
    def incarnation(self) -> int:
        """The incarnation of its process; 0 if there is none."""
        return self._member.incarnation if self._member else 0

    async def leave_cluster(self) -> None:
        """Leaves the cluster."""
        assert self._member
        await self._member.leave()

    def _on_heartbeat(self, reply: HeartbeatResult) -> None:
        if reply.leave:
            self.draining.begin(GRACE_S, None)

    def _on_incarnation(self, _: int) -> None:
        self._registered = True

    def _load(self) -> ServerLoad:
        return ServerLoad(broken_replicas=tuple(it for group in self.hosted.all for it in group.broken_replicas))

    def wake(self) -> None:
        """Sends the next heartbeat immediately."""
        if self._member:
            self._member.wake()

    async def serve(self, request: Any, context: Context) -> Any:
        if not self._registered:
            raise errors.Unreachable("this server is not registered yet; try again")
        return await self._handlers[type(request)](request, context)

    # Seams.

    def machine_for(self, config: messages.CreateShards) -> GroupState:
        """Returns the state machine of a new lock group."""
        return GroupState(config.job, self.mode_for(config), peers=config.norms)

    def log_for(self, group: Replica, request: messages.AddBackup, sender: InputSender) -> InputLog:
        """Returns the log that decides when the answers of a group may leave."""
        return InputLog(request.job, request.term, request.backup, sender)

    def group_for(self, job: str, generation: int, shards: Sequence[int]) -> Replica:
        """Returns the lock group that a worker's call names."""
        group = self.hosted.group(job, generation, shards)
        check_whole(group, shards)
        return group

    def fence(self, group: Group, worker: str, incarnation: int) -> int:
        """Fences a worker, and returns its committed steps."""
        return events.only(group.handle(events.WorkerFenced(worker, incarnation)), events.AnswerFence).committed_steps

    # Groups.

    @staticmethod
    def mode_for(config: messages.CreateShards) -> Mode:
        """Returns the mode of a new lock group."""
        return mode_for(config.consistency, shares_norms=bool(config.norms))

    def new_group(self, config: messages.CreateShards, follows: int | None = None) -> Replica:
        """Returns a new lock group."""
        return self.replica_class(self.name, config, self.machine_for(config), self.scheduler, self.checker, follows)

    # Calls of the coordinator.

    async def _create(self, request: messages.CreateShards, context: Context) -> None:
        _check_awaited(context)
        held = self.hosted.held(request.job)
        if any(group.generation > request.generation for group in held.values()):
            raise errors.StaleGeneration(f"{self.name} has a later generation than {request.generation}")
        if any(group.generation == request.generation for group in held.values()):
            return
        self._creating[request.job] = self._creating.get(request.job, 0) + 1
        mine = self._creating[request.job]
        await self.sleep(0.01)  # to allocate them
        if self._creating.get(request.job) != mine:
            raise errors.UnknownJob(f"{request.job} was dropped while its shards were being created")
        held = self.hosted.held(request.job)
        group = self.new_group(request)
        self.hosted.by_job[request.job] = {group.number: group}
        for earlier in held.values():
            earlier.close()

    async def _drop(self, request: messages.DropShards, context: Context) -> None:
        _check_awaited(context)
        held = self.hosted.by_job.pop(request.job, {})
        self._creating.pop(request.job, None)
        self._saves.pop(request.job, None)
        for group in held.values():
            group.close()
        self.copies.forget(request.job)

    async def _restore(self, request: messages.Restore, context: Context) -> None:
        [group] = self.hosted.groups_of(request.job, request.generation)
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

        async def admit_all(groups: list[Replica]) -> list[int | errors.ShoalError]:
            results: list[int | errors.ShoalError] = []
            for worker, incarnation, rank in request.workers:
                try:
                    steps = []
                    for group in groups:
                        effects = group.handle(events.WorkerAdmitted(worker, incarnation, rank))
                        await group.confirm()
                        steps.append(events.only(effects, events.AnswerAdmission).step)
                    results.append(max(steps))
                except (errors.Fenced, errors.BadRequest) as error:
                    results.append(error)
            return results

        return await self.hosted.on_groups(request.job, admit_all)

    async def _fence(self, request: messages.FenceWorkers, context: Context) -> list[int]:
        _check_awaited(context)

        async def fence_all(groups: list[Replica]) -> list[int]:
            committed = []
            for worker, incarnation in request.workers:
                found = []
                for group in groups:
                    found.append(self.fence(group, worker, incarnation))
                    group.fenced[worker] = max(incarnation, group.fenced.get(worker, 0))
                    await group.confirm()
                committed.append(max(found))
            return committed

        return await self.hosted.on_groups(request.job, fence_all)

    async def _release(self, request: messages.ReleaseWorkers, context: Context) -> None:
        _check_awaited(context)

        async def release_all(groups: list[Replica]) -> None:
            for worker, incarnation, committed in request.workers:
                for group in groups:
                    group.check_open()
                    group.released.setdefault((worker, incarnation), committed)
                    self._close_step(group, group.handle(events.WorkerReleased(worker, incarnation, committed)))
                    await group.confirm()

        await self.hosted.on_groups(request.job, release_all)

    async def _hold(self, request: messages.HoldCommits, context: Context) -> dict[str, WorkerProgress]:
        del context

        async def hold_all(groups: list[Replica]) -> dict[str, WorkerProgress]:
            found = []
            for group in groups:
                await group.hold(request.cut)
                group.check_open()
                progress = group.machine.progress()
                await group.confirm()
                found.append(progress)
            return joined(found)

        return await self.hosted.on_groups(request.job, hold_all, request.generation)

    async def _resume(self, request: messages.ResumeCommits, context: Context) -> None:
        del context
        for group in self.hosted.groups_of(request.job):
            group.resume(request.cut)

    async def _save(self, request: messages.Save, context: Context) -> list[messages.Saved]:
        del context
        groups = self.hosted.groups_of(request.job, request.generation)
        saved = [await self._cut(group, request) for group in groups]
        self._saves[request.job] = mine = (request.number, None)
        file = ShardFile(tuple(pushes for _, pushes in saved), saved[0][0].version)
        self.scheduler.spawn(self.process, self._write(request, file, mine))
        return saved

    async def _cut(self, group: Replica, request: messages.Save) -> messages.Saved:
        group.take(request.cut)
        pause_s = 0.0
        try:
            answered: Future[messages.Saved] = Future()
            group.waiting_cut = answered
            self._close_step(group, group.handle(events.CutRequested(request.progress)))
            if not answered.done:
                self.scheduler.after(NORM_WAIT_S, lambda: answered.fail(errors.Overloaded("norms did not arrive")))
            saved = await answered
            await group.confirm()
            pause_s = request.pause_s
        finally:
            group.waiting_cut = None
            group.taken(pause_s)
        return saved

    async def _write(self, request: messages.Save, file: ShardFile, mine: tuple[int, ShardFile | None]) -> None:
        await self.sleep(0.05 + 0.2 * self.scheduler.random.random())
        while self.world.disk.away:
            await self.sleep(0.5)
        self.world.disk.files[request.number, request.cut, self.name] = file
        if self._saves.get(request.job) is mine:
            self._saves[request.job] = request.number, file

    async def _collect(self, request: messages.CollectFiles, context: Context) -> ShardFile | None:
        del context
        self.hosted.groups_of(request.job)
        number, file = self._saves.get(request.job, (0, None))
        if request.number != number:
            raise errors.UnknownCheckpoint(f"{self.name} does not write checkpoint {request.number}")
        return file

    # Calls of workers.

    def _whole_group(self, request: messages.Pull | messages.Push | messages.Commit) -> Replica:
        return self.group_for(request.stamp.job, request.stamp.generation, request.shards)

    async def _pull(self, request: messages.Pull, context: Context) -> messages.Pulled:
        group = self._whole_group(request)
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
        group = self._whole_group(request)
        group.check_open()
        if known := group.machine.answer_to(stamp.worker, stamp.incarnation, stamp.step):
            group.committed(stamp, known)
            await group.confirm()
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
        if request.commit:
            return await self._committed(group, stamp)
        await group.confirm()
        return answer

    async def _commit(self, request: messages.Commit, context: Context) -> events.AnswerPush:
        del context
        group = self._whole_group(request)
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
            await group.confirm()
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
        [group] = self.hosted.groups_of(request.job, request.generation)
        self._close_step(group, group.handle(events.NormReceived(request.server, request.step, request.squares)))

    def _clear(self) -> None:
        self._creating, self._saves = {}, {}
        for group in self.hosted.take_all():
            group.close()

    # Copies.

    async def _split(self, request: messages.SplitGroup, context: Context) -> None:
        _check_awaited(context)
        await self.hosted.split(request, lambda: context.active)

    def _copy_call(self, call: Callable[[Copies, Any], Any], *, awaited: bool = True) -> Any:
        async def answer(request: Any, context: Context) -> Any:
            if awaited:
                _check_awaited(context)
            return call(self.copies, request)

        return answer


def _check_awaited(context: Context) -> None:
    if not context.active:
        raise errors.Cancelled("the caller does not wait any more")


__all__ = ["ServerNode"]
