"""Replicated lock group of a simulated server: what `ReplicatedGroup` adds to a lock group (docs/decisions/0082)."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from shoal import errors
from shoal.status import BrokenReplica
from shoal.v1 import replica_pb2
from shoal_server.shards.group.input_log import CopyState, InputLog
from shoal_server.shards.group.replicated_group import QUIET_WAIT_S
from shoal_server.shards.machine import events
from shoal_server.shards.machine.mode import Mode
from shoal_server.shards.machine.state import GroupState
from simulation.messages import PushName
from simulation.nodes.group import Group
from simulation.scheduler import Future


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


# The attributes of a group that are its values, or that the checker reads.
_VALUES = ("staged", "pushes", "held", "fenced", "released", "value", "_stored_version")


class Replica(Group):
    """A lock group with the calls about its copies."""

    _pending: tuple[InputLog, Future[CopyStart]] | None = None  # the copy that waits for a moment to begin
    _loaded = False  # of a backup: whether it has had all values
    _lost_primary = ""

    def handle(self, event: events.LockGroupEvent) -> list[events.LockGroupEffect]:
        effects = super().handle(event)
        self._try_copy()
        return effects

    def close(self) -> None:
        super().close()
        if self._pending:
            self._pending[1].fail(self._gone())

    # As a primary.

    async def begin_copy(self, log: InputLog) -> CopyStart:
        """Begins a copy for a backup, as soon as the open step has no contribution."""
        self.check_open()
        self._take_term(log.term)
        if self.log and self.log.term == log.term and self.log.state in (CopyState.COMPLETE, CopyState.BROKEN):
            raise errors.Moved(f"lock group {self.number} had a complete backup in term {log.term}")
        self._refuse_pending()
        earlier, self.log = self.log, None
        if earlier:
            earlier.end()
        started: Future[CopyStart] = Future()
        self._pending = log, started
        self._try_copy()
        if not started.done:
            self._scheduler.after(QUIET_WAIT_S, lambda: started.fail(errors.Overloaded("no step has ended")))
        try:
            return await started
        finally:
            self._end_pending(started)

    def end_copy(self, term: int) -> None:
        """Continues without a backup: answers that wait for it are given."""
        self.check_open()
        newest = self._pending[0] if self._pending else self.log
        if newest and newest.term >= term:
            return
        self._take_term(term)
        self._refuse_pending()
        log, self.log = self.log, None
        if log:
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
            self._pending = None

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
        self.log = log
        started.set(CopyStart(state, gradients, {name: copy(getattr(self, name)) for name in _VALUES}))

    # As a backup.

    def load(self, start: CopyStart, mode: Mode) -> None:
        """Takes the state of the primary's machine, and its values."""
        machine = GroupState.restored(start.state, self.config.job, mode, start.gradients.__getitem__)
        self._use(machine, self._checker)
        for name, value in start.values.items():
            setattr(self, name, copy(value))
        self.version = machine.version
        self._loaded = True

    def follow(self, event: events.LockGroupEvent) -> None:
        """Carries out an event of the primary, and tells nobody."""
        if self.closed:
            raise self._gone()
        if not self.follows:
            raise errors.Moved(f"{self.server} is the primary of lock group {self.number} now")
        effects = self._advance(event)
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

    def promote(self, term: int) -> None:
        """Makes this backup the primary. The connection of the old primary has ended."""
        if self.closed:
            raise self._gone()
        if self.follows and not self._loaded:
            raise errors.Moved(f"{self.server} has no complete copy of lock group {self.number}")
        self._take_term(term)
        if not self.follows:
            return
        self.machine.forget_callers()
        self.follows, self._lost_primary = False, ""
        self._checker.promoted(self)
        self.handle(events.FoldsDone())  # the old primary may have ended before it closed its sealed step

    def lose_primary(self, why: str) -> None:
        """Records that the connection to the primary broke."""
        self._lost_primary = why if self.follows else ""

    @property
    def broken_replica(self) -> BrokenReplica | None:
        """What the coordinator has to decide about; None if there is nothing."""
        log = self.log
        if self.follows:
            reason = self._lost_primary
        else:
            reason = log.failure or "it is closed" if log and log.state is CopyState.BROKEN else ""
        if not reason or self.closed:
            return None
        return BrokenReplica(self.config.job, self.generation, self.number, self.term, not self.follows, reason)


__all__ = ["CopyStart", "Replica"]
