"""Trainer of a simulated worker: the protocol of `shoal._training` and of the training loop, without gradients.

It describes the job, enters it, leases ranges, pulls, stages a push on all servers and commits it on all, repeats calls
by their stamp, and adopts a new placement.
"""

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from shoal import errors
from shoal._wire import Cursor, DataRange, Lease, NoRange
from shoal.status import JobState
from shoal.variables import Variable
from shoal_coordinator.messages import ProgramDescription, events
from shoal_server.shards.machine.events import AnswerPush
from shoal_worker.assignment import AssignedJob
from shoal_worker.messages import TrainerOutcome
from simulation import messages
from simulation.messages import Pulled, PushName, Stamp
from simulation.nodes.connections import Connection, Connections
from simulation.plan import COORDINATOR
from simulation.scheduler import Life

if TYPE_CHECKING:
    from simulation.nodes.worker import WorkerNode

T = TypeVar("T")

VARIABLES = {name: Variable(4) for name in "abcdef"}
_JOIN_TIMEOUT_S, _IDLE_S, _ASK_AGAIN_S = 30.0, 0.02, 0.5
# Seconds between two steps of a worker that must not end its job yet.
_HELD_S = 0.5


class Trainer:
    """The trainer of one assignment.

    Attributes:
        step: the next step.
        accepted, dropped, samples: pushes so far, for reports.
    """

    def __init__(self, node: "WorkerNode", assigned: AssignedJob, life: Life) -> None:
        self._node, self.assigned, self.life = node, assigned, life
        self._plan, self._checker = node.world.plan, node.checker
        self._identity = assigned.job, node.name, assigned.incarnation
        self.step = self.accepted = self.dropped = self.samples = 0
        self._connections: Connections  # after it has entered the job
        self._versions: dict[int, int] = {}  # of the last pulled values, by shard
        self._asked_at = float("-inf")
        self._staged_step = -1
        self._lease: Lease | None = None
        self._consumed = 0
        self._batches: deque[int] = deque()
        self._ahead: tuple[int, dict[int, int]] | None = None  # the next step, and the versions of its values

    async def run(self) -> TrainerOutcome:
        """Returns the outcome of training, as `shoal_worker.trainer` does."""
        try:
            return await self._train()
        except (errors.Fenced, errors.Unreachable, errors.Moved) as error:
            return TrainerOutcome(error.message, fenced=True)
        except errors.ShoalError as error:
            lost = isinstance(error, (*errors.SHARDS_LOST, errors.NotPlaced))
            return TrainerOutcome(f"{error.code}: {error.message}", shards_lost=lost)

    async def _train(self) -> TrainerOutcome:
        await self._node.sleep(0.1)  # to start
        part = self.assigned.assignment
        description = ProgramDescription(VARIABLES, self._plan.samples)
        await self._ask(events.JobDescribed(*self._identity, description, part))
        try:
            await self._enter()
        except (errors.Cancelled, errors.JobFailed):
            return TrainerOutcome()
        while await self._advance():
            pass
        if self._lease:  # after the barrier, the step of the last push is closed
            await self._pull(barrier=True)
        return TrainerOutcome(cursor=self._cursor)

    async def _enter(self) -> None:
        while True:
            join = events.JoinRequested(*self._identity, assignment=self.assigned.assignment, waits=True)
            joined = await self._ask(join, _JOIN_TIMEOUT_S)
            if joined.state.finished:
                raise errors.Cancelled("the job is over")
            if joined.placement and joined.ready:
                break
            await self._node.sleep(0.1)
        self._connections = Connections(
            self._node, self.life, self.assigned.job, joined.placement, self._on_retry, self._ask
        )
        self.step = joined.step

    async def _advance(self) -> bool:
        """Trains on a batch, leases a range, or skips a step. Returns False when nothing is left to do."""
        if self._batches:
            await self._pull()
            await self._node.sleep(self._plan.step_s * (0.3 + 1.4 * self._node.scheduler.random.random()))
            await self._push(self._batches.popleft())
            return True
        began = self._node.clock.monotonic()
        await self._pull(barrier=True)
        if self._node.world.holds_end():
            await self._send(None, 0.0)
            await self._node.sleep(_HELD_S)
            return True
        done = self._lease.number if self._lease else 0
        answer = await self._ask(events.LeaseRequested(*self._identity, done, self.assigned.assignment))
        self._lease = None
        if answer is NoRange.FINISHED:
            return False
        if answer is NoRange.WAIT:
            await self._send(None, 0.0)
            await self._node.sleep(max(0.0, began + _IDLE_S - self._node.clock.monotonic()))
            return True
        self._lease, self._consumed = answer, 0
        size, samples = self._plan.batch, answer.range.samples
        self._batches.extend(min(size, samples - start) for start in range(0, samples, size))
        return True

    @property
    def _cursor(self) -> Cursor | None:
        return Cursor(self._lease.number, self._consumed) if self._lease else None

    # The coordinator.

    async def _ask(self, request: Any, timeout_s: float = 5.0) -> Any:
        return await self._node.retrying(lambda: self._node.call(COORDINATOR, request, timeout_s, self.life))

    async def _on_retry(self) -> None:
        """Ends a repeated call to a server if the job has ended."""
        now = self._node.clock.monotonic()
        if now - self._asked_at < _ASK_AGAIN_S:
            return
        self._asked_at = now
        try:
            state: JobState = await self._node.call(COORDINATOR, messages.States(self.assigned.job), 5.0, self.life)
        except errors.UnknownJob:
            raise
        except errors.ShoalError:
            return
        if state.finished:
            raise errors.Cancelled("the job has ended")

    # The servers.

    def _stamp(self, step: int) -> Stamp:
        return Stamp(*self._identity, step, self._connections.placement.generation)

    async def _pull(self, *, barrier: bool = False) -> None:
        fetched, self._ahead = self._ahead, None
        if fetched is None or fetched[0] < self.step or barrier:
            fetched = await self._fetch(self.step, 0, barrier=barrier)
        step, versions = fetched
        self.step, self._versions = max(self.step, step), versions

    async def _fetch(self, step: int, ahead: int, *, barrier: bool = False) -> tuple[int, dict[int, int]]:
        """Pulls from all lock groups, until all are at one step. Returns it, and the version of each shard."""
        while True:
            request = partial(self._pull_request, step, ahead, barrier)
            found: list[Pulled] = await self._connections.each(request, waits=True)
            newest = max(step + ahead, *(it.step for it in found))
            if all(it.step == newest for it in found):
                versions: dict[int, int] = {}
                for connection, pulled in zip(self._connections.all, found, strict=True):
                    versions.update(dict.fromkeys(connection.shards, pulled.version))
                    caller = f"{self._node.name}/{self.life.number}"
                    self._checker.pulled(caller, self._stamp(step), connection.group, pulled.version)
                return newest, versions
            step = newest - ahead

    def _pull_request(self, step: int, ahead: int, barrier: bool, connection: Connection) -> messages.Pull:
        return messages.Pull(connection.shards, self._stamp(step), ahead, barrier)

    async def _push(self, samples: int) -> None:
        assert self._lease
        part: DataRange = self._lease.range
        start = part.start + self._consumed
        self._consumed += samples
        if self._plan.overlap:
            self._ahead = await self._fetch(self.step, 1)
        await self._send((part.epoch, start, start + samples), float(samples))

    async def _send(self, brings: tuple[int, int, int] | None, weight: float) -> None:
        """Stages a push on all servers, and commits it on all. With one lock group, both happen in one call."""
        step, connections = self.step, self._connections
        cursor = self._cursor if brings else None
        nothing = brings is None and self._staged_step != step
        versions = self._versions
        name: PushName | None = None

        def at_once() -> bool:
            return len(connections.all) == 1 or nothing  # may change with the placement

        def push(connection: Connection) -> messages.Push:
            nonlocal name
            if brings or not at_once():  # one server may stage it, too, and its lock group may then be split
                self._staged_step = step
            stamp = self._stamp(step)
            if brings:
                name = PushName(stamp.generation, stamp.worker, stamp.incarnation, step, *brings)
            version = min(versions.get(shard, 0) for shard in connection.shards)
            return messages.Push(connection.shards, stamp, weight, version, name, cursor, at_once())

        def commit(connection: Connection) -> messages.Commit:
            return messages.Commit(connection.shards, self._stamp(step))

        moves = {connection: connection.moves for connection in connections.all}

        async def commit_moved(connection: Connection) -> AnswerPush:
            """Commits a staged push. If the server does not have it and is another one by now, stages it there, too."""
            try:
                answer: AnswerPush = await connections.call(connection, commit)
            except errors.NotStaged:
                if connection.moves == moves.get(connection):
                    raise
                await connections.call(connection, push)
                answer = await connections.call(connection, commit)
            return answer

        answers: list[AnswerPush] = await connections.each(push)
        if not at_once():
            answers = await connections.each_with(commit_moved)
        self._count(answers, name, round(weight))
        self.step = max(self.step, step + 1, *(it.step for it in answers))

    def _count(self, answers: list[AnswerPush], name: PushName | None, samples: int) -> None:
        outcomes = {answer.outcome for answer in answers}
        if name and outcomes == {"accepted"}:
            self._checker.told_accepted(name)
        self.accepted += bool(name) and "accepted" in outcomes
        self.dropped += "accepted" not in outcomes and "dropped_late" in outcomes
        self.samples += samples if "accepted" in outcomes else 0


__all__ = ["VARIABLES", "Trainer"]
