"""Replicated lock group of a simulated server: what `ReplicatedGroup` and `SplittableGroup` add to a lock group."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

from shoal import errors
from shoal.status import BrokenReplica
from shoal.v1 import replica_pb2
from shoal_server.shards.group.input_log import CopyState, InputLog
from shoal_server.shards.group.pending_split import LOOK_AGAIN_S
from shoal_server.shards.group.replicated_group import QUIET_WAIT_S
from shoal_server.shards.machine import events
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.mode import Mode
from shoal_server.shards.machine.state import GroupState
from simulation.invariants import Checker
from simulation.messages import CreateShards, PushName
from simulation.nodes.group import Group
from simulation.scheduler import Future, Scheduler


@dataclass(frozen=True)
class CopyStart:
    """A lock group at one moment: what a copy begins with.

    Attributes:
        state: the state of its machine.
        gradients: the names of its staged pushes, by the number that `state` has for them.
        values: its values, and what the checker has to know of it.
    """

    state: replica_pb2.GroupState
    gradients: Mapping[int, PushName]
    values: Mapping[str, Any]


@dataclass
class PendingSplit:
    """A split that waits for a moment.

    Attributes:
        shards: the shards that leave the group.
        divide: called with the two groups, which calls must find from then on.
        done: whether it was made; an error if it is refused.
    """

    shards: tuple[int, ...]
    divide: Callable[[Any, Any], object]
    done: Future[None]


# The attributes of a group that are its values, or that the checker reads.
_VALUES = ("staged", "pushes", "held", "fenced", "released", "value", "_stored_version")


class Replica(Group):
    """A lock group with the calls about its copies, and about its split."""

    _pending: tuple[InputLog, Future[CopyStart]] | None = None  # the copy that waits for a moment to begin
    _split: PendingSplit | None = None  # the split that waits for such a moment
    _loaded = False  # of a backup: whether it has had all values
    _lost_primary = ""
    _ahead = 0  # of a backup: inputs that the primary believes it has, and that are not carried out yet

    def __init__(
        self,
        server: str,
        config: CreateShards,
        machine: GroupState,
        scheduler: Scheduler,
        checker: Checker,
        follows: int | None = None,
    ) -> None:
        super().__init__(server, config, machine, scheduler, checker, follows)
        self._followed_term = self.term  # of a backup: the term in which it was begun

    def handle(self, event: events.LockGroupEvent) -> list[events.LockGroupEffect]:
        effects = super().handle(event)
        self._try_copy()
        self._try_split()
        return effects

    def close(self) -> None:
        super().close()
        if self._pending:
            self._pending[1].fail(self._gone())
        if self._split:
            self._split.done.fail(self._gone())

    # As the sender of inputs.

    async def begin_copy(self, log: InputLog, keeps: int = 0, *, as_backup: bool = False) -> CopyStart:
        """Begins a copy for a backup, as soon as the open step has no contribution."""
        self._check_role(as_backup=as_backup)
        self._take_term(log.term)
        if self.logs.has_complete(log.term):
            raise errors.Moved(f"lock group {self.number} had a complete backup in term {log.term}")
        self._keep(keeps)
        started: Future[CopyStart] = Future()
        self._pending = log, started
        self._try_copy()
        if not started.done:
            self._scheduler.after(QUIET_WAIT_S, lambda: started.fail(errors.Overloaded("no step has ended")))
        try:
            return await started
        finally:
            self._end_pending(started)

    def end_copy(self, term: int, keeps: int = 0, *, as_backup: bool = False) -> None:
        """Continues without a backup, or with one only: answers that wait for others are given."""
        self._check_role(as_backup=as_backup)
        logs = [*self.logs, self._pending[0]] if self._pending else [*self.logs]
        if any(log.term >= term for log in logs):
            return
        self._take_term(term)
        self._keep(keeps)

    def keep_copy(self, term: int) -> None:
        """Ends the copies of this backup except one, before its promotion. If it is the primary, nothing changes."""
        if self.follows and not self.closed:
            self._keep(term)

    def _check_role(self, *, as_backup: bool) -> None:
        if not as_backup:
            self.check_open()
        elif self.closed:
            raise self._gone()
        elif not self.follows or not self._loaded:
            raise errors.Moved(f"{self.server} has no complete backup of lock group {self.number}")

    def _keep(self, term: int) -> None:
        if term and not self.logs.has_complete(term):
            raise errors.Moved(f"{self.server} has no complete copy of lock group {self.number} of term {term}")
        self._refuse_pending()
        for log in self.logs.keep(term):
            log.end()

    def leave(self, term: int) -> bool:
        """Closes this copy, because other servers have the copies of a term. Returns whether it is closed now."""
        if self.term >= term:
            return False
        self._moved = True
        self.close()
        return True

    def check_term(self, term: int) -> None:
        """Raises Moved if a term is over."""
        if term < self.term:
            raise errors.Moved(f"term {term} of lock group {self.number} is over; the term is {self.term}")

    def check_replaceable(self, term: int) -> None:
        """Raises Moved unless this is a backup that a primary of this term may replace by a new copy."""
        self.check_term(term)
        if not self.follows:
            raise errors.Moved(f"{self.server} is the primary of lock group {self.number} itself")
        if self._loaded and term == self.term:
            raise errors.Moved(f"{self.server} has a complete copy of lock group {self.number} already")

    def _take_term(self, term: int) -> None:
        self.check_term(term)
        self.term = term

    def _end_pending(self, started: Future[CopyStart]) -> None:
        if self._pending and self._pending[1] is started:
            self._pending = None

    def _refuse_pending(self) -> None:
        if self._pending:
            self._pending[1].fail(errors.Moved(f"the copy of term {self._pending[0].term} is not wanted"))
        if self._split:
            self._split.done.fail(errors.Moved(f"the split of lock group {self.number} is not wanted"))
        self._pending = self._split = None

    def _try_copy(self) -> None:
        if not self._pending or self._pending[1].done or not self.machine.is_copyable:
            return
        (log, started), self._pending = self._pending, None
        state, gradients = replica_pb2.GroupState(), dict[int, PushName]()

        def number_of(name: PushName) -> int:
            number = log.sender.next_gradient()
            gradients[number] = name
            return number

        self.machine.write_to(state, number_of, log.sender.ticket)
        self.logs.begin(log, self._ahead)
        started.set(CopyStart(state, gradients, {name: copy(getattr(self, name)) for name in _VALUES}))

    async def split(
        self,
        shards: tuple[int, ...],
        term: int,
        divide: Callable[[Self, Self], object],
        is_wanted: Callable[[], bool],
    ) -> None:
        """Makes two groups of this one, as soon as the open step has no contribution."""
        self.check_open()
        self.check_term(term)
        self._check_splittable(shards, term)
        self._take_term(term)
        self._refuse_pending()
        self._split = pending = PendingSplit(shards, divide, Future())
        self._try_split()
        until = self._scheduler.now + QUIET_WAIT_S
        while not pending.done.done:
            woken: Future[None] = Future()
            pending.done.then(lambda woken=woken: woken.set(None))  # type: ignore[misc]
            self._scheduler.after(LOOK_AGAIN_S, lambda woken=woken: woken.set(None))  # type: ignore[misc]
            await woken
            if self._split is not pending:
                continue
            if not is_wanted() or self._scheduler.now >= until:
                self._split = None
                raise (errors.Overloaded if is_wanted() else errors.Cancelled)("the split was not made")
            self._try_split()
        pending.done.result()

    def _check_splittable(self, shards: tuple[int, ...], term: int) -> None:
        if not self.shards.issuperset(shards):
            if term == self.term:
                raise errors.Moved(f"lock group {self.number} has no shards {shards} any more at term {term}")
            raise errors.BadRequest(f"lock group {self.number} has the shards {sorted(self.shards)}, not {shards}")
        if self._pending or self.logs.has_backup:
            raise errors.BadRequest(f"lock group {self.number} has a backup; end it with DropBackup first")

    def _try_split(self) -> None:
        pending = self._split
        held = self.waiting_cut is not None or self.held_s > 0
        if not pending or pending.done.done or self.closed or held or not self.machine.is_copyable:
            return
        self._split = None
        parts = self._parts(pending.shards)
        try:
            pending.divide(*parts)
        except errors.ShoalError as error:
            for part in parts:
                part.close()
            pending.done.fail(error)
            return
        self._moved = True
        self.close()
        pending.done.set(None)

    def _parts(self, shards: tuple[int, ...]) -> tuple[Self, Self]:
        state, names = replica_pb2.GroupState(), list[PushName]()

        def number_of(name: PushName) -> int:
            names.append(name)
            return len(names)

        self.machine.write_to(state, number_of, lambda _: 1)
        start = CopyStart(state, dict(enumerate(names, 1)), {name: copy(getattr(self, name)) for name in _VALUES})
        rest = tuple(sorted(self.shards.difference(shards)))
        return self.part(rest, start), self.part(shards, start)

    def part(self, shards: tuple[int, ...], start: CopyStart) -> Self:
        """Returns a group of some shards that continues from the state of this one."""
        config, new_mode = replace(self.config, shards=shards), self._new_mode
        empty = GroupState(config.job, new_mode(), peers=config.norms)
        part = type(self)(self.server, config, empty, self._scheduler, self._checker)
        part.load(start, new_mode())
        part.machine.forget_callers()
        part.term = self.term
        return part

    def _new_mode(self) -> Mode:
        return mode_for(self.config.consistency, shares_norms=bool(self.config.norms))

    # As a backup.

    def load(self, start: CopyStart, mode: Mode) -> None:
        """Takes the state of the primary's machine, and its values."""
        machine = GroupState.restored(start.state, self.config.job, mode, start.gradients.__getitem__)
        self._use(machine, self._checker)
        for name, value in start.values.items():
            setattr(self, name, copy(value))
        self.version = machine.version
        self._loaded = True

    def arrive(self, inputs: int) -> bool:
        """Counts inputs that have arrived. Returns whether the primary may be told at once that they have."""
        tells = not self.logs
        self._ahead += inputs if tells else 0
        return tells

    def follow(self, event: events.LockGroupEvent, *, told: bool) -> None:
        """Carries out an event of the primary, and sends it to this backup's own copy."""
        if self.closed:
            raise self._gone()
        if not self.follows:
            raise errors.Moved(f"{self.server} is the primary of lock group {self.number} now")
        if isinstance(event, events.PushStaged) and event.payload is not None:
            self.logs.send_gradient(event.payload)
        self._ahead -= told
        effects = self._advance(event)
        self.logs.add(event)
        self.logs.flush()
        self._note(event, effects)
        self._try_copy()

    def when_copied(self, tell: Callable[[], object]) -> None:
        """Calls a function when this backup's own copy has all events; never if the group closes before."""
        self.logs.when_copied(self.logs.number, tell, lambda: None)

    def _note(self, event: events.LockGroupEvent, effects: list[events.LockGroupEffect]) -> None:
        """Does what the calls of a primary do for the checker."""
        match event:
            case events.PushStaged():
                self.staged[event.worker] = event.payload
            case events.PushCommitted():
                answer = events.only(effects, events.AnswerPush)
                self.hold_name(event.worker, event.incarnation, event.step, answer)
            case events.WorkerFenced():
                self.fenced[event.worker] = max(event.incarnation, self.fenced.get(event.worker, 0))
            case events.WorkerReleased():
                self.released.setdefault((event.worker, event.incarnation), event.committed_steps)

    def promote(self, term: int, keeps: int = 0) -> None:
        """Makes this backup the primary, with a copy of its own. The connection of the old primary has ended."""
        if self.closed:
            raise self._gone()
        if self.follows and not self._loaded:
            raise errors.Moved(f"{self.server} has no complete copy of lock group {self.number}")
        self._take_term(term)
        self._keep(keeps)
        if not self.follows:
            return
        self._advance(events.CallersForgotten())
        self.logs.add(events.CallersForgotten())
        self.follows, self._lost_primary = False, ""
        self._checker.promoted(self)
        self.handle(events.FoldsDone())  # the old primary may have ended before it closed its sealed step

    @property
    def is_complete(self) -> bool:
        """Whether this copy has all values."""
        return not self.closed and (self._loaded or not self.follows)

    def lose_primary(self, why: str) -> None:
        """Records that the connection to the primary broke."""
        self._lost_primary = why if self.follows else ""

    @property
    def broken_replicas(self) -> list[BrokenReplica]:
        """The connections to other copies that broke, about which the coordinator has to decide."""
        if self.closed:
            return []
        about = self.config.job, self.generation, self.number
        logs = [log for log in self.logs if log.state is CopyState.BROKEN]
        found = [BrokenReplica(*about, log.term, True, log.failure or "it is closed") for log in logs]
        if self.follows and self._lost_primary:
            found.append(BrokenReplica(*about, self._followed_term, False, self._lost_primary))
        return found


__all__ = ["CopyStart", "Replica"]
