"""The door of a shard: one lock around its state machine and its arenas. Nothing else changes either."""

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
    """What a shard tells of a pull that it was asked for; called without the shard's lock."""

    def answer(self, step: int) -> None:
        """The values may be read now."""

    def refuse(self, error: errors.ShoalError) -> None:
        """They never may."""


@dataclass(frozen=True, slots=True)
class JobShardConfig:
    """What all shards of a job have in common."""

    name: str
    generation: int
    variables: dict[str, Variable]
    optimizer: optim.Optimizer
    consistency: consistency.Consistency
    seed: int


@dataclass(frozen=True, slots=True)
class Stamp:
    """Names a push for ever."""

    worker: str
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A shard as a checkpoint saves it; its snapshot is to be ended by `end_saving`."""

    answer: events.AnswerCut
    snapshot: Snapshot


# By arena: what a push brings, in the dtype that the server keeps; finite.
Payload = Mapping[int, np.ndarray]


class Shard:
    """Variables' slices that are versioned, locked and placed together.

    Args:
        terms: of the job.
        layout: of this shard.
        on_apply: told the seconds that each update took.
        memory: for copies of the values.
    """

    def __init__(
        self,
        terms: JobShardConfig,
        layout: ShardLayout,
        on_apply: Callable[[float], None] = lambda _: None,
        memory: BufferPool | None = None,
    ) -> None:
        self.layout = layout
        self.generation = terms.generation
        self._on_apply = on_apply
        self._memory = memory or BufferPool(0, 0.0)
        self._arenas = [Arena(arena, terms.variables, terms.optimizer, terms.seed) for arena in layout.arenas]
        # Guards _state, the arenas' values and slots, _closed and _snapshot. Of other locks only a snapshot's and that
        # of the idle cores are taken under it, both for moments, and nothing is sent. Kernels run under it, without the
        # interpreter's lock; a large one is waited for until the cores that joined it are through.
        self._lock = threading.Lock()
        self._state = ShardState(f"{terms.name}/{layout.shard}", mode_for(terms.consistency))
        self._closed = False
        # Of the version that the arenas hold, once anybody has asked for it.
        self._snapshot: Snapshot | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of values and slots."""
        return sum(arena.nbytes for arena in self._arenas)

    @property
    def queues(self) -> tuple[int, int]:
        """Pulls that wait for the consistency mode, and pushes that wait to be committed."""
        # Without the lock: heartbeats ask, and must not wait for a restore, which holds it while it reads a storage.
        return self._state.waiting, self._state.staged

    @property
    def version(self) -> int:
        """Updates applied."""
        with self._lock:
            return self._state.version

    def answer_to(self, stamp: Stamp) -> events.AnswerPush | None:
        """What this push was answered, if it was committed before."""
        with self._opened():
            return self._state.answer_to(stamp.worker, stamp.incarnation, stamp.step)

    def stage(
        self, stamp: Stamp, weight: float, version: int, payload: Payload | None, cursor: Cursor | None = None
    ) -> events.AnswerPush:
        """Holds a whole push until it is committed; repeats are answered as the first was.

        Raises:
            Fenced: the worker is not admitted.
            BadRequest: a step of long ago.
        """
        event = events.PushStaged(stamp.worker, stamp.incarnation, stamp.step, weight, version, payload, cursor)
        return self._push(event)

    def commit(self, stamp: Stamp) -> events.AnswerPush:
        """Lets a staged push count.

        Raises:
            NotStaged: there is none with this stamp.
            Fenced: the worker is not admitted.
        """
        return self._push(events.PushCommitted(stamp.worker, stamp.incarnation, stamp.step))

    def pull(self, ticket: PullTicket, stamp: Stamp, ahead: int = 0) -> None:
        """Asks for the values: `ticket` is answered, at once or when the consistency mode lets it.

        Raises:
            Fenced: the worker is not admitted.
            Overloaded: too many pulls wait here.
        """
        self._handle(events.PullRequested(ticket, stamp.worker, stamp.incarnation, stamp.step, ahead))

    def abandon(self, ticket: PullTicket) -> None:
        """Forgets a waiting pull; a shard that was closed has forgotten it already."""
        with self._lock:
            self._state.handle(events.PullAbandoned(ticket))

    def admit(self, worker: str, incarnation: int, rank: int) -> int:
        """Lets a worker in; the step at which it may begin here."""
        effects = self._handle(events.WorkerAdmitted(worker, incarnation, rank))
        return _only(effects, events.AnswerAdmission).step

    def fence(self, worker: str, incarnation: int) -> int:
        """Refuses a worker's calls from now on; how many steps it had committed here."""
        effects = self._handle(events.WorkerFenced(worker, incarnation))
        return _only(effects, events.AnswerFence).committed_steps

    def release(self, worker: str, incarnation: int, committed_steps: int) -> None:
        """Takes a worker out of the barriers."""
        self._handle(events.WorkerReleased(worker, incarnation, committed_steps))

    def close(self) -> None:
        """Refuses what waits and what comes: the job is gone from this server."""
        with self._lock:
            self._closed = True
            tickets = self._state.abandon_all()
        for ticket in tickets:
            ticket.refuse(self._gone())

    def assign(self, values: Payload) -> None:
        """Overwrites initial values.

        Args:
            values: of all arenas.

        Raises:
            BadRequest: training has begun.
        """
        with self._opened():
            if events.Overwrite() in self._state.handle(events.ValuesAssigned()):
                self._leave_to_readers()
                for index, array in values.items():
                    self._arenas[index].assign(array)

    def read(self) -> Snapshot:
        """Begins to read the values as they are now; whatever is applied meanwhile, that is what will be read."""
        with self._opened():
            return self._latest().begin()

    def progress(self) -> Mapping[str, events.WorkerProgress]:
        """How far each admitted worker has come here."""
        with self._opened():
            return self._state.progress()

    def cut(self, progress: Mapping[str, events.WorkerProgress]) -> Cut:
        """Takes a checkpoint: begins to save what there is now, with all that is committed on any server.

        Args:
            progress: of each worker, on the servers where it is furthest.
        """
        begun: list[Snapshot] = []
        effects = self._handle(events.CutRequested(progress), then=lambda: begun.append(self._latest().begin_saving()))
        return Cut(_only(effects, events.AnswerCut), begun[0])

    def restore(self, version: int, step: int, read: Callable[["Arena"], None]) -> None:
        """Overwrites values and slots, before training begins.

        Args:
            version: updates that they have seen.
            step: to go on with.
            read: fills an arena; called under the lock, for nobody else has any business here yet.

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
                self._closed = True  # neither what it was nor what it should be
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
                # The machine says that this was applied, and it was not: nobody must go on from here.
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
        """Holds the lock of a shard that has not been closed."""
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
        """Before the values change: whoever reads them keeps the memory that they are in."""
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
        """The error for a push whose arena `index` holds NaN or Inf."""
        arena = self.layout.arenas[index]
        name = next(part.variable for part in reversed(arena.slices) if part.offset <= element)
        return errors.NonFiniteGradient(
            f"{self._state.name}: what was pushed for {name!r} holds {value}; the whole push was rejected and "
            "no variable changed. Look for a too large learning rate or a division by zero, or skip this step",
            variable=name,
        )


def _only(effects: Iterable[events.Effect], kind: type[E]) -> E:
    """The one effect of a kind that the machine promises."""
    (effect,) = (effect for effect in effects if isinstance(effect, kind))
    return effect
