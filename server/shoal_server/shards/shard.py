"""Shard: one lock around a state machine and its arenas. Nothing else changes either."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from shoal import _tracing, consistency, errors, optim
from shoal._memory.buffers import BufferPool
from shoal._wire import Cursor, ShardLayout
from shoal.variables import Variable
from shoal_server.shards import events
from shoal_server.shards.arena import Arena
from shoal_server.shards.consistency import Apply, mode_for
from shoal_server.shards.snapshot import Snapshot
from shoal_server.shards.state import ShardState

E = TypeVar("E")


class PullTicket(Protocol):
    """Callbacks of one pull. The shard calls them without its lock."""

    def answer(self, step: int) -> None:
        """The values may be read now."""

    def refuse(self, error: errors.ShoalError) -> None:
        """The pull has failed."""


@dataclass(frozen=True, slots=True)
class JobShardConfig:
    """The configuration that all shards of a job share."""

    name: str
    generation: int
    variables: dict[str, Variable]
    optimizer: optim.Optimizer
    consistency: consistency.Consistency
    seed: int


@dataclass(frozen=True, slots=True)
class Stamp:
    """The permanent name of a push within its job."""

    worker: str
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A shard's state for a checkpoint. The owner must end the snapshot with `end_saving`."""

    answer: events.AnswerCut
    snapshot: Snapshot


# The gradients or values of a push, by arena: finite, in the dtype that the server keeps.
Payload = Mapping[int, np.ndarray]


class Shard:
    """Slices of variables that are versioned, locked and placed together.

    Args:
        config: the job's configuration.
        layout: the shard's layout.
        on_apply: called with the seconds that each update took.
        memory: provides memory for copies of the values.
    """

    def __init__(
        self,
        config: JobShardConfig,
        layout: ShardLayout,
        on_apply: Callable[[float], None] = lambda _: None,
        memory: BufferPool | None = None,
    ) -> None:
        self.layout = layout
        self.generation = config.generation
        self._on_apply = on_apply
        self._memory = memory or BufferPool(0, 0.0)
        self._arenas = [Arena(arena, config.variables, config.optimizer, config.seed) for arena in layout.arenas]
        # Guards _state, the arenas' values and slots, _closed and _snapshot. Only the locks of a snapshot and of the
        # kernel threads are taken under it, both briefly, and nothing is sent. Kernels run under it without the GIL; a
        # large one waits until the threads that joined it are done.
        self._lock = threading.Lock()
        self._state = ShardState(f"{config.name}/{layout.shard}", mode_for(config.consistency))
        self._closed = False
        # Of the arenas' current version, once a reader has asked for it.
        self._snapshot: Snapshot | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of values and slots."""
        return sum(arena.nbytes for arena in self._arenas)

    @property
    def queues(self) -> tuple[int, int]:
        """Number of waiting pulls, and of staged pushes."""
        # Without the lock: heartbeats call this, and a restore holds the lock while it reads from storage.
        return self._state.waiting, self._state.staged

    @property
    def version(self) -> int:
        """Updates applied."""
        with self._lock:
            return self._state.version

    def answer_to(self, stamp: Stamp) -> events.AnswerPush | None:
        """Returns the answer to a push that was committed before; None if it was not."""
        with self._opened():
            return self._state.answer_to(stamp.worker, stamp.incarnation, stamp.step)

    def stage(
        self, stamp: Stamp, weight: float, version: int, payload: Payload | None, cursor: Cursor | None = None
    ) -> events.AnswerPush:
        """Stages a complete push until it is committed. A repeated push gets the first answer.

        Args:
            stamp: name of the push.
            weight: weight in the step's mean, >= 0.
            version: version of the shard at the worker's pull.
            payload: gradients by arena; None if the weight is 0.
            cursor: the worker's position in its data.

        Returns:
            The answer "staged", or the first answer if the push was committed before.

        Raises:
            Fenced: the worker is not admitted.
            BadRequest: the step was answered long ago, or may not begin yet.
        """
        event = events.PushStaged(stamp.worker, stamp.incarnation, stamp.step, weight, version, payload, cursor)
        return self._push(event)

    def commit(self, stamp: Stamp) -> events.AnswerPush:
        """Commits a staged push.

        Raises:
            NotStaged: no push with this stamp is staged.
            Fenced: the worker is not admitted.
        """
        return self._push(events.PushCommitted(stamp.worker, stamp.incarnation, stamp.step))

    def pull(self, ticket: PullTicket, stamp: Stamp, ahead: int = 0) -> None:
        """Asks for the values. The ticket is answered at once, or when the consistency mode permits it.

        Args:
            ticket: called with the answer.
            stamp: worker, incarnation and step.
            ahead: steps after the stamp's step for which the values are wanted.

        Raises:
            Fenced: the worker is not admitted.
            BadRequest: the step is out of range, or too far ahead.
            Overloaded: too many pulls wait here.
        """
        self._handle(events.PullRequested(ticket, stamp.worker, stamp.incarnation, stamp.step, ahead))

    def abandon(self, ticket: PullTicket) -> None:
        """Removes a waiting pull. A closed shard has none."""
        with self._lock:
            self._state.handle(events.PullAbandoned(ticket))

    def admit(self, worker: str, incarnation: int, rank: int) -> int:
        """Admits a worker.

        Args:
            worker: name of the worker.
            incarnation: its incarnation.
            rank: its rank in the worker group.

        Returns:
            The step at which it starts on this shard.

        Raises:
            Fenced: this incarnation is fenced.
            BadRequest: another incarnation is still admitted.
        """
        effects = self._handle(events.WorkerAdmitted(worker, incarnation, rank))
        return _only(effects, events.AnswerAdmission).step

    def fence(self, worker: str, incarnation: int) -> int:
        """Refuses a worker's calls from now on; returns the number of steps that it has committed here."""
        effects = self._handle(events.WorkerFenced(worker, incarnation))
        return _only(effects, events.AnswerFence).committed_steps

    def release(self, worker: str, incarnation: int, committed_steps: int) -> None:
        """Takes a worker out of the barriers.

        Args:
            worker: name of the worker.
            incarnation: its incarnation.
            committed_steps: largest number of steps that the worker has committed on any shard.
        """
        self._handle(events.WorkerReleased(worker, incarnation, committed_steps))

    def close(self) -> None:
        """Refuses waiting and later calls: the job is gone from this server."""
        with self._lock:
            self._closed = True
            tickets = self._state.abandon_all()
        for ticket in tickets:
            ticket.refuse(self._gone())

    def assign(self, values: Payload) -> None:
        """Overwrites initial values.

        Args:
            values: values of all arenas.

        Raises:
            BadRequest: training has begun.
        """
        with self._opened():
            if events.Overwrite() in self._state.handle(events.ValuesAssigned()):
                self._leave_to_readers()
                for index, array in values.items():
                    self._arenas[index].assign(array)

    def read(self) -> Snapshot:
        """Returns the current values as a snapshot; later updates do not change it."""
        with self._opened():
            return self._latest().begin()

    def progress(self) -> Mapping[str, events.WorkerProgress]:
        """Returns each admitted worker's progress on this shard."""
        with self._opened():
            return self._state.progress()

    def cut(self, progress: Mapping[str, events.WorkerProgress]) -> Cut:
        """Takes the snapshot for a checkpoint, after completing the pushes that any server has committed.

        Args:
            progress: the largest progress of each worker on any server.
        """
        begun: list[Snapshot] = []
        effects = self._handle(events.CutRequested(progress), then=lambda: begun.append(self._latest().begin_saving()))
        return Cut(_only(effects, events.AnswerCut), begun[0])

    def restore(self, version: int, step: int, read: Callable[["Arena"], None]) -> None:
        """Overwrites values and slots, before training begins.

        Args:
            version: number of updates in the restored values.
            step: step to continue with.
            read: fills an arena; called under the lock, because no worker uses the shard yet.

        Raises:
            BadRequest: training has begun.
        """
        with self._opened():
            self._state.handle(events.ValuesRestored(version, step))
            self._leave_to_readers()
            try:
                for arena in self._arenas:
                    read(arena)
            except BaseException:
                self._closed = True  # the values are partly overwritten
                raise

    def _latest(self) -> Snapshot:
        if self._snapshot is None:
            values, slots = [arena.values for arena in self._arenas], [arena.slots for arena in self._arenas]
            self._snapshot = Snapshot(self._state.version, self.layout, values, slots)
        return self._snapshot

    def _push(self, event: events.PushStaged | events.PushCommitted) -> events.AnswerPush:
        return _only(self._handle(event), events.AnswerPush)

    def _handle(self, event: events.Event, then: Callable[[], None] = lambda: None) -> list[events.Effect]:
        with self._opened():
            effects = self._state.handle(event)
            try:
                self._apply_all([effect for effect in effects if isinstance(effect, Apply)])
                then()  # under the lock
            except BaseException:
                # The state machine counts the update as applied, but it failed: the shard cannot continue.
                self._closed = True
                raise
        for effect in effects:
            match effect:
                case events.AnswerPull(ticket, step):
                    ticket.answer(step)
                case events.RefusePull(ticket, error):
                    ticket.refuse(error)
        return effects

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Holds the lock; raises UnknownJob if the shard is closed."""
        with self._lock:
            if self._closed:
                raise self._gone()
            yield

    def _gone(self) -> errors.UnknownJob:
        return errors.UnknownJob(f"{self._state.name} is gone from this server: its job has ended or was dropped")

    def _apply_all(self, updates: Sequence[Apply]) -> None:
        first = self._state.version - len(updates)
        for number, update in enumerate(updates):
            with _tracing.span("apply", shard=self.layout.shard, pushes=len(update.contributions)):
                self._apply(update, first + number)

    def _leave_to_readers(self) -> None:
        """Moves the arenas to new memory if readers use the current one. Called before the values change."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot and snapshot.in_use:
            saved = snapshot.being_saved
            for arena in self._arenas:
                arena.move(self._memory, slots=saved)

    def _apply(self, update: Apply, version: int) -> None:
        start = time.perf_counter()
        self._leave_to_readers()
        for index, arena in enumerate(self._arenas):
            parts = [part for part in update.contributions if index in part.payload]
            if parts:
                arena.apply(
                    [part.payload[index] for part in parts],
                    [part.weight for part in parts],
                    version=version,
                    scale=update.learning_rate_scale,
                )
        self._on_apply(time.perf_counter() - start)

    def non_finite(self, index: int, element: int, value: float) -> errors.NonFiniteGradient:
        """Returns the error for a push whose arena holds NaN or Inf.

        Args:
            index: index of the arena.
            element: index of the element in the arena.
            value: the element.
        """
        arena = self.layout.arenas[index]
        name = next(part.variable for part in reversed(arena.slices) if part.offset <= element)
        return errors.NonFiniteGradient(
            f"{self._state.name}: what was pushed for {name!r} holds {value}; the whole push was rejected and "
            "no variable changed. Look for a too large learning rate or a division by zero, or skip this step",
            variable=name,
        )


def _only(effects: Iterable[events.Effect], kind: type[E]) -> E:
    """Returns the only effect of a kind."""
    (effect,) = (effect for effect in effects if isinstance(effect, kind))
    return effect
