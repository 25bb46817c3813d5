"""Coordinator of a simulation: the real state machine of the cluster, and a store that survives its process.

It does what `Coordinator`, `DecisionWriter` and `Ticker` do: a decision is not visible before it is written.
"""

from collections.abc import Mapping
from typing import Any

from shoal import errors
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.job import Job
from shoal.optim import SGD
from shoal.status import JobState, Role
from shoal_coordinator.cluster import Cluster, ClusterPolicy
from shoal_coordinator.cluster.shards import SMALLEST_MOVE_BYTES
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import DrainOrder, Effect, ServerRef, events
from shoal_coordinator.persistence import ClusterRecords, encode_records, restored
from simulation import messages
from simulation.network import Context
from simulation.nodes.effects import EffectTasks
from simulation.nodes.node import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S, JOB, Node, World
from simulation.plan import Plan
from simulation.scheduler import Future, Life

_TICK_S, _JOIN_WAIT_S = 0.3, 20.0
# In a run with moves, the shards of a job have 16 bytes, and all are worth a move.
MOVED_BYTES = 1


class CoordinatorNode(Node):
    """The coordinator.

    Attributes:
        machine: the state machine of its process.
        ended: the state in which the job has ended, once that is durable; None before.
    """

    machine: Cluster

    def __init__(self, name: str, world: World, pace: float) -> None:
        super().__init__(name, world, pace)
        self.ended: tuple[JobState, str] | None = None
        self._forget()

    def _forget(self) -> None:
        self._decided = self._durable = 0
        self._effects: list[Effect] = []
        self._waits: list[tuple[int, Future[None]]] = []
        self._entries: list[tuple[str, Future[None]]] = []
        self._to_write: Future[None] = Future()
        self._writing: Mapping[str, bytes | None] | None = None

    def begin(self, life: Life) -> None:
        self._forget()
        self._now = self.clock.steady()
        policy = _policy(self.world.plan)
        found = restored(self.world.metadata.load(), policy, self._now())
        self.machine = found or Cluster("reef", policy, self._now())
        self._records = ClusterRecords(self.machine)
        self._tasks = EffectTasks(self)
        self._note(self.machine.pending_effects)
        self.scheduler.spawn(life, self._write_on())
        self.scheduler.spawn(life, self._tick())
        if not self.machine.jobs(self._now()):
            self.scheduler.spawn(life, self.decide(events.JobSubmitted(job_of(self.world.plan), token="once")))

    def crashed(self) -> None:
        if self._writing is not None and self.scheduler.random.random() < 0.5:  # the write was complete
            self.world.metadata.apply(self._writing)

    @property
    def job(self) -> JobMachine | None:
        """The job of the run; None before it is submitted."""
        try:
            return self.machine.job(JOB)
        except errors.UnknownJob:
            return None

    def machine_time(self) -> float:
        """Returns the time that the state machine is told, in seconds."""
        return self._now()

    def request_checkpoint(self) -> None:
        """Lets a user ask for a checkpoint now."""
        if self.life:
            self.scheduler.spawn(self.life, self.decide(events.CheckpointRequested(JOB)))

    def order_drain(self, server: str) -> None:
        """Lets a user order a server to drain. The user tries again while the coordinator does not answer."""
        if self.life:
            self.scheduler.spawn(self.life, self.decide(events.DrainOrdered(server, DrainOrder())))
        else:
            self.scheduler.after(1.0, lambda: self.order_drain(server))

    def wanted(self, effect: int, server: ServerRef) -> bool:
        """Returns whether a server is alive and the effect is still pending."""
        return self.machine.wants(effect, server)

    async def serve(self, request: Any, context: Context) -> Any:
        match request:
            case events.JoinRequested():
                return await self._join(request)
            case messages.Placements():
                placed = self.machine.job(request.job).placed
                await self._durably(self._decided)
                return placed
            case messages.States():
                state = self.machine.job(request.job).state
                await self._durably(self._decided)
                return state
        return await self.decide(request)

    async def decide(self, event: events.ClusterEvent[events.R]) -> events.R:
        """Feeds an event to the machine, and waits until the decision is durable."""
        answer: Future[events.R] = Future()
        effects: list[Effect] = []
        check = self.world.watch_decision(event)
        try:
            result, effects = self.machine.handle(event, self._now())
            answer.set(result)
        except errors.ShoalError as error:
            answer.fail(error)
        self.machine.validate()
        check()
        decided = self._note(effects)
        self._look_at_job(event)
        await self._durably(decided)
        return answer.result()

    def _look_at_job(self, event: Any) -> None:
        if isinstance(event, events.MemberLeft) and event.member.startswith("w"):
            self.checker.workers_lost = True
        if not self.machine.take_changed_jobs():
            return
        job = self.job
        if job is None:
            return
        for entry in self._entries:
            if job.answerable([entry[0]]):
                entry[1].set(None)

    async def _join(self, request: events.JoinRequested) -> Any:
        joined = await self.decide(request)
        if not joined.ends_wait:
            woken: Future[None] = Future()
            entry = request.worker, woken
            self._entries.append(entry)
            self.scheduler.after(_JOIN_WAIT_S, lambda: woken.set(None))
            try:
                await woken
            finally:
                self._entries = [it for it in self._entries if it is not entry]
            joined = await self.decide(request)
        return joined

    # Durability.

    def _note(self, effects: list[Effect]) -> int:
        self._effects += effects
        if effects or self.machine.changed:
            self._decided += 1
            self._to_write.set(None)
        return self._decided

    async def _durably(self, decided: int) -> None:
        if self._durable < decided:
            written: Future[None] = Future()
            self._waits.append((decided, written))
            await written

    async def _write_on(self) -> None:
        while True:
            await self._to_write
            self._to_write = Future()
            decided, changes = self._decided, encode_records(self._records.changes_later())
            effects, self._effects = self._effects, []
            job = self.job
            self._writing = changes
            await self.sleep(0.001 + 0.004 * self.scheduler.random.random())
            self.world.metadata.apply(changes)
            self._writing = None
            if job and job.ended and self.ended is None:
                self._end(job)
            self._tasks.submit(effects)
            self._durable = decided
            waits, self._waits = self._waits, []
            for wait in waits:
                if wait[0] <= decided:
                    wait[1].set(None)
                else:
                    self._waits.append(wait)

    def _end(self, job: JobMachine) -> None:
        self.ended = job.state, job.status(self._now()).reason
        if job.state is JobState.SUCCEEDED and job.placement:
            self.checker.succeeded(job.placement.generation, job.record_later("ledger")())

    async def _tick(self) -> None:
        while True:
            await self.sleep(_TICK_S)
            lost = await self.decide(events.TimePassed())
            if Role.WORKER in lost.values():
                self.checker.workers_lost = True


def _policy(plan: Plan) -> ClusterPolicy:
    return ClusterPolicy(
        HEARTBEAT_TIMEOUT_S,
        checkpoints=True,
        heartbeat_interval_s=HEARTBEAT_INTERVAL_S,
        event_bytes=1 << 24,
        smallest_move_bytes=MOVED_BYTES if plan.moves else SMALLEST_MOVE_BYTES,
    )


def job_of(plan: Plan) -> Job:
    """Returns the job of a plan."""
    return Job(
        "m:f",
        name=JOB,
        workers=plan.wanted,
        min_workers=1 + getattr(plan.consistency, "backup_workers", 0),
        max_workers=plan.workers,
        consistency=plan.consistency,
        optimizer=SGD(0.1, clip_norm=1.0) if plan.norms else SGD(0.1),
        epochs=plan.epochs,
        batch_size=plan.batch,
        range_size=plan.range_size,
        shards=6 if plan.moves else 2 * plan.servers,
        replicas=plan.replicas,
        checkpoints=CheckpointPolicy(every_s=plan.checkpoint_s, keep_last=2),
    )


__all__ = ["MOVED_BYTES", "CoordinatorNode", "job_of"]
