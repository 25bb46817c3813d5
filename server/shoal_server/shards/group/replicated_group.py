"""Replicated group: a lock group as the primary or the backup of another server's (docs/decisions/0082).

A backup has the same lock, state machine and shards as a primary. It gets its events from the primary, tells nobody of
their effects, and refuses all calls.
"""

from collections.abc import Callable, Sequence

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

    # As a primary.

    @property
    def log(self) -> InputLog | None:
        """The log of the backup; None if there is no backup."""
        return self._log

    def begin_copy(self, log: InputLog) -> CopyStart:
        """Begins a copy for a backup, as soon as the open step has no contribution.

        Args:
            log: gets the inputs from that moment on. Its term must not be lower than that of the group.

        Returns:
            The state, the gradients and the values at that moment.

        Raises:
            Moved: this server is not the primary, or its term is later, or it had a complete copy in this term.
            Overloaded: the open step had contributions all the time.
            UnknownJob, NotPlaced: the group is closed, or is being restored.
        """
        pending = PendingCopy(self.config.name, log)
        with self._lock:
            self._check_open()
            self._take_term(log.term)
            if self._log and self._log.term == log.term and self._log.state in (CopyState.COMPLETE, CopyState.BROKEN):
                raise errors.Moved(  # that backup may be the primary now, so answers must go on waiting for it
                    f"{self.config.name}: lock group {self.number} had a complete backup in term {log.term}"
                )
            self._refuse_pending()
            earlier, self._log = self._log, None
            self._copy = pending
            self._try_copy(pending)
        if earlier:
            earlier.end()  # the coordinator has decided that this server has the only copy, or it would not ask
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

    def end_copy(self, term: int) -> None:
        """Continues without a backup: answers that wait for it are given.

        Args:
            term: number of the coordinator's decision.

        Raises:
            Moved: this server is not the primary, or knows a later term.
            UnknownJob: the group is closed.
        """
        with self._lock:
            self._check_open()
            newest = self._copy.log if self._copy else self._log
            if newest and newest.term >= term:
                return  # a late repetition: this backup was added after that decision
            self._take_term(term)
            self._refuse_pending()
            log, self._log = self._log, None
        if log:
            log.end()

    def _refuse_pending(self) -> None:
        """Ends the copy or split that waits, because there is a later decision. Called with the lock held."""
        if self._copy:
            self._copy.refuse(errors.Moved(f"{self.config.name}: the copy of term {self._copy.log.term} is not wanted"))
        if self._split:
            self._split.refuse(errors.Moved(f"{self.config.name}: the split of lock group {self.number} is not wanted"))
        self._copy = self._split = None

    def _check_no_backup(self) -> None:
        """Raises BadRequest if there is a backup, to which overwritten values cannot be sent. With the lock held."""
        if self._log and self._log.state is not CopyState.ENDED:
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

    def follow(self, event: events.LockGroupEvent) -> None:
        """Carries out an event of the primary. A failure closes the group.

        Raises:
            UnknownJob, InternalError: the group is closed.
            Moved: it is the primary now.
        """
        with self._lock:
            if self._closed:
                raise self._gone()
            if not self.follows:
                raise errors.Moved(f"this server is the primary of these shards of {self.config.name} now")
            try:
                effects = self._state.handle(event)
                self._updates.carry_out(effects, self._state.version)
                if any(isinstance(effect, events.MeasureNorm) for effect in effects):
                    self._updates.measure()
                self._updates.folds.work()
            except BaseException as cause:
                self._fail(cause)
        if self._failure:
            self.close()
            raise self._gone()

    def check_hash(self, values_hash: int) -> None:
        """Compares the values of this backup with those of the primary. If they differ, the group is closed.

        Raises:
            InternalError: they differ.
        """
        with self._lock:
            same = self._stored.values_hash() == values_hash
            version = self._state.version
        if same:
            return
        self.close()
        raise errors.InternalError(
            f"{self.config.name}: at version {version}, the backup of lock group {self.number} has other values than "
            "its primary, so it was dropped. Please report this, with the logs of both servers"
        )

    def promote(self, term: int) -> int:
        """Makes this backup the primary. The connection of the old primary has ended.

        Args:
            term: number of the coordinator's decision.

        Returns:
            Updates applied.

        Raises:
            Moved: the term is over, or the copy is not complete.
            UnknownJob: the group is closed.
        """
        with self._lock:
            if self._closed:
                raise self._gone()
            if self.follows and not self._loaded:
                raise errors.Moved(f"{self.config.name}: this server has no complete copy of lock group {self.number}")
            self._take_term(term)
            if not self.follows:
                return self._state.version
            self._state.forget_callers()
            self.follows, self._lost_primary = False, ""
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
    def broken_replica(self) -> BrokenReplica | None:
        """What the coordinator has to decide about; None if there is nothing."""
        config, log = self.config, self._log
        if self.follows:
            reason = self._lost_primary
        else:
            reason = log.failure or "it is closed" if log and log.state is CopyState.BROKEN else ""
        if not reason or self._closed:
            return None
        reason = shortened(without_controls(reason))
        return BrokenReplica(config.name, config.generation, self.number, self.term, not self.follows, reason)


__all__ = ["QUIET_WAIT_S", "ReplicatedGroup"]
