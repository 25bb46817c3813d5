"""Replicated group: a lock group as the primary or the backup of another server's (docs/decisions/0082).

A backup has the same lock, state machine and shards as a primary. It gets its events from the primary, tells nobody of
their effects, and refuses all calls. Before it becomes the primary, it may get a backup of its own, to which it sends
the events on (docs/decisions/0088).
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import structlog

from shoal import errors
from shoal._wire import shortened, without_controls
from shoal.status import BrokenReplica
from shoal.v1 import replica_pb2
from shoal_server.shards.group.group_shell import GroupShell
from shoal_server.shards.group.input_log import CopyState, InputLog
from shoal_server.shards.group.pending_copy import CopyStart, PendingCopy
from shoal_server.shards.machine import events
from shoal_server.shards.machine.mode import Apply
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.values import Payload

_log = structlog.get_logger(__name__)

# Seconds to wait for a moment at which the open step has no contribution.
QUIET_WAIT_S = 20.0


class ReplicatedGroup(GroupShell):
    """A job's shards on one server, with the calls about their copies.

    Args and attributes: see `GroupShell`.
    """

    _lost_primary = ""  # of a backup: why its connection broke
    _loaded = False  # of a backup: whether it has had all values and the state of the machine

    @property
    def number(self) -> int:
        """Names the group in its job: the smallest index of its shards."""
        return min(self._stored.by_number, default=0)

    # As the sender of inputs.

    @property
    def logs(self) -> Sequence[InputLog]:
        """The logs of the copies that get inputs from here, in the order in which they began."""
        return [*self._logs]

    def begin_copy(self, log: InputLog, keeps: int = 0, *, as_backup: bool = False) -> CopyStart:
        """Begins a copy for a backup, as soon as the open step has no contribution.

        Args:
            log: gets the inputs from that moment on. Its term must not be lower than that of the group.
            keeps: the term of the complete copy for which answers go on waiting; 0 if there is none.
            as_backup: whether this is a backup that makes a copy of its own.

        Returns:
            The state, the gradients and the values at that moment.

        Raises:
            Moved: this server is not the primary or the backup, as `as_backup` says; or its term is later; or it had a
                complete copy in this term; or it has not the copy to keep.
            Overloaded: the open step had contributions all the time.
            UnknownJob, NotPlaced: the group is closed, or is being restored.
        """
        pending = PendingCopy(self.config.name, log)
        with self._lock:
            self._check_role(as_backup=as_backup)
            self._take_term(log.term)
            if self._logs.has_complete(log.term):
                raise errors.Moved(  # that backup may be the primary now, so answers must go on waiting for it
                    f"{self.config.name}: lock group {self.number} had a complete backup in term {log.term}"
                )
            ended = self._keep(keeps)  # the coordinator has decided that there are no others, or it would not ask
            self._copy = pending
            self._try_copy(pending)
        _end(ended)
        start = pending.wait(QUIET_WAIT_S)
        if start is None:
            with self._lock:
                if pending.begun:
                    start = pending.wait(0.0)
                elif self._copy is pending:
                    self._copy = None
        if start is None:
            raise errors.Overloaded(
                f"{self.config.name}: a copy of the shards can only begin between two steps, and none ended for "
                f"{QUIET_WAIT_S:g} s; the copy is tried again"
            )
        return start

    def end_copy(self, term: int, keeps: int = 0, *, as_backup: bool = False) -> None:
        """Continues without a backup, or with one only: answers that wait for others are given.

        Args:
            term: number of the coordinator's decision.
            keeps: the term of the complete copy that stays; 0 if none does.
            as_backup: whether this is a backup, whose own copy ends.

        Raises:
            Moved: this server is not the primary or the backup, as `as_backup` says; or it knows a later term; or it
                has not the copy to keep.
            UnknownJob: the group is closed.
        """
        with self._lock:
            self._check_role(as_backup=as_backup)
            logs = [*self._logs, self._copy.log] if self._copy else [*self._logs]
            if any(log.term >= term for log in logs):
                return  # a late repetition: this backup was added after that decision
            self._take_term(term)
            ended = self._keep(keeps)
        _end(ended)

    def _check_role(self, *, as_backup: bool) -> None:
        """Raises an error unless this is the primary, or a complete backup. Called with the lock held."""
        if not as_backup:
            self._check_open()
        elif self._closed:
            raise self._gone()
        elif not self.follows or not self._loaded:
            raise errors.Moved(f"{self.config.name}: this server has no complete backup of lock group {self.number}")

    def _keep(self, term: int) -> list[InputLog]:
        """Removes all copies except one, also those that have not begun. Called with the lock held.

        Args:
            term: the term of the complete copy that stays; 0 for none.

        Returns:
            The logs to end, without the lock.

        Raises:
            Moved: there is no such copy. Nothing has changed.
        """
        if term and not self._logs.has_complete(term):
            raise errors.Moved(f"{self.config.name}: lock group {self.number} has no complete copy of term {term} here")
        self._refuse_pending()
        return self._logs.keep(term)

    def _refuse_pending(self) -> None:
        """Ends the copy or split that waits, because there is a later decision. Called with the lock held."""
        if self._copy:
            self._copy.refuse(errors.Moved(f"{self.config.name}: the copy of term {self._copy.log.term} is not wanted"))
        if self._split:
            self._split.refuse(errors.Moved(f"{self.config.name}: the split of lock group {self.number} is not wanted"))
        self._copy = self._split = None

    def _check_no_backup(self) -> None:
        """Raises BadRequest if there is a backup, to which overwritten values cannot be sent. With the lock held."""
        if self._logs.has_backup:
            raise errors.BadRequest(
                f"{self.config.name}: lock group {self.number} has a backup; values can only be overwritten before that"
            )

    def check_term(self, term: int) -> None:
        """Raises Moved if a term is over."""
        if term < self.term:
            raise errors.Moved(
                f"{self.config.name}: term {term} of lock group {self.number} is over; the term is {self.term}",
                term=self.term,
            )

    def leave(self, term: int) -> bool:
        """Closes this copy, because other servers have the copies of a term. Calls that wait are sent to the primary.

        Args:
            term: number of the coordinator's decision.

        Returns:
            Whether it is closed now. A copy of this term or a later one stays.
        """
        with self._lock:
            if self.term >= term:
                return False
            self._moved = True
        self.close()
        return True

    def _take_term(self, term: int) -> None:
        self.check_term(term)
        self.term = term

    def check_replaceable(self, term: int) -> None:
        """Raises Moved unless this is a backup that a primary of this term may replace by a new copy."""
        self.check_term(term)
        if not self.follows:
            raise errors.Moved(f"this server is the primary of lock group {self.number} of {self.config.name} itself")
        if self._loaded and term == self.term:  # the coordinator may be about to promote it
            raise errors.Moved(f"this server has a complete copy of lock group {self.number} at term {term} already")

    # As a backup.

    def load(self, message: replica_pb2.GroupState, payload_of: Callable[[int], Payload]) -> None:
        """Takes the state of the primary's machine.

        Args:
            message: the state.
            payload_of: returns the gradient with a number.

        Raises:
            BadRequest: the state is not valid.
        """
        name = self.config.name
        with self._lock:
            self._state = GroupState.restored(message, name, self._new_mode(), payload_of, peers=self._peers)
            self._updates.folds.count = message.permits.folded
            self._limit_permits()
            permits = self._state.permits
            if permits.waiting and permits.limits is None:
                raise errors.BadRequest(f"{name}: a copy has pushes that wait, but its pushes need no permit")
            self._loaded = True

    @property
    def stored_elements(self) -> int:
        """Number of elements of all values and slots, which a copy has to fill."""
        return sum(slab.values.size * (1 + len(slab.slots)) for slab in self._stored.slabs)

    @property
    def slab_values(self) -> Sequence[np.ndarray]:
        """The values of each slab, for their sizes and dtypes."""
        return [slab.values for slab in self._stored.slabs]

    def array(self, slab: int, slot: str) -> np.ndarray:
        """Returns the values of a slab, or one of its slots, to fill them with those of the primary.

        Raises:
            BadFrame: there is no such array.
        """
        slabs = self._stored.slabs
        if slab < len(slabs) and not slot:
            return slabs[slab].values
        if slab < len(slabs) and slot in slabs[slab].slots:
            return slabs[slab].slots[slot]
        raise errors.BadFrame(f"the primary of {self.config.name} sent slab {slab}, slot {slot!r}; there is none")

    def arrive(self, inputs: int) -> bool:
        """Counts inputs that have arrived, before `follow` carries them out.

        Args:
            inputs: how many.

        Returns:
            Whether the primary may be told at once that this backup has them. False if this backup has a copy of its
            own: then `when_copied` says when that copy has them.
        """
        with self._lock:
            tells = not self._logs
            self._ahead += inputs if tells else 0
        return tells

    def follow(self, event: events.LockGroupEvent, *, told: bool = True) -> None:
        """Carries out an event of the primary, and sends it to this backup's own copy. A failure closes the group.

        Args:
            event: the event.
            told: what `arrive` has returned for it.

        Raises:
            UnknownJob, InternalError: the group is closed.
            Moved: it is the primary now.
        """
        while True:
            if isinstance(event, events.PushStaged) and event.payload is not None:
                self._logs.send_gradient(event.payload)
            with self._lock:
                if self._closed:
                    raise self._gone()
                if not self.follows:
                    raise errors.Moved(f"this server is the primary of these shards of {self.config.name} now")
                if self._logs.lacks(event):  # a copy has begun in between
                    continue
                self._ahead -= told
                try:
                    self._carry_out(event)
                except BaseException as cause:
                    self._fail(cause)
                self._try_pending()
            break
        if self._failure:
            self.close()
            raise self._gone()
        self._logs.flush()

    def _carry_out(self, event: events.LockGroupEvent) -> None:
        effects = self._feed(event)
        if any(isinstance(effect, Apply) for effect in effects):
            self._logs.flush_at_once()
        self._updates.carry_out(effects, self._state.version)
        if any(isinstance(effect, events.MeasureNorm) for effect in effects):
            self._updates.measure()
        self._updates.folds.work()

    def when_copied(self, tell: Callable[[], object]) -> None:
        """Calls a function when this backup's own copy has all events up to the last one; never if the group closes."""
        self._logs.when_copied(self._logs.number, tell, lambda: None)

    def check_hash(self, values_hash: int) -> None:
        """Compares the values of this backup with those of the primary. If they differ, the group is closed.

        Raises:
            InternalError: they differ.
        """
        with self._lock:
            ours, version = self._stored.values_hash(), self._state.version
            if same := ours == values_hash:
                self._logs.add_hash(lambda: ours)
        if same:
            return
        self.close()
        raise errors.InternalError(
            f"{self.config.name}: at version {version}, the backup of lock group {self.number} has other values than "
            "its primary, so it was dropped. Please report this, with the logs of both servers"
        )

    def keep_copy(self, term: int) -> None:
        """Ends the copies of this backup except one, before its promotion. If it is the primary, nothing changes.

        Args:
            term: the term of the complete copy that stays; 0 for none.

        Raises:
            Moved: there is no such copy.
        """
        with self._lock:
            ended = self._keep(term) if self.follows and not self._closed else []
        _end(ended)

    def promote(self, term: int, keeps: int = 0) -> int:
        """Makes this backup the primary. The connection of the old primary has ended.

        Args:
            term: number of the coordinator's decision.
            keeps: the term of this backup's own copy, which is the backup from now on; 0 if there is none.

        Returns:
            Updates applied.

        Raises:
            Moved: the term is over, or this copy or the one to keep is not complete.
            UnknownJob: the group is closed.
        """
        with self._lock:
            if self._closed:
                raise self._gone()
            if self.follows and not self._loaded:
                raise errors.Moved(f"{self.config.name}: this server has no complete copy of lock group {self.number}")
            self._take_term(term)
            ended, repeated, version = self._keep(keeps), not self.follows, self._state.version
            if not repeated:
                self._feed(events.CallersForgotten())
                self.follows, self._lost_primary = False, ""
        _end(ended)
        if repeated:
            return version
        # The old primary may have ended before it told that it had folded contributions, or closed its sealed step.
        self._advance(events.Folded(self._updates.folds.count))
        self._advance(events.FoldsDone())
        _log.info("this server is the primary now", job=self.config.name, group=self.number, term=term)
        with self._lock:
            return self._state.version

    def lose_primary(self, why: str) -> None:
        """Records that the connection to the primary broke."""
        with self._lock:
            self._lost_primary = why if self.follows else ""

    @property
    def broken_replicas(self) -> list[BrokenReplica]:
        """The connections to other copies that broke, about which the coordinator has to decide."""
        if self._closed:
            return []
        logs = [log for log in self._logs if log.state is CopyState.BROKEN]
        found = [(log.term, True, log.failure or "it is closed") for log in logs]
        if self.follows and self._lost_primary:
            found.append((self._followed_term, False, self._lost_primary))
        about = self.config.name, self.config.generation, self.number
        return [BrokenReplica(*about, term, sends, shortened(without_controls(why))) for term, sends, why in found]


def _end(logs: Iterable[InputLog]) -> None:
    for log in logs:
        log.end()


__all__ = ["QUIET_WAIT_S", "ReplicatedGroup"]
