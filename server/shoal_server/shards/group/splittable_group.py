"""Splittable group: a lock group of which two can be made, so that one of them can move (docs/decisions/0084).

A group with a backup is split on both servers. The split is the last input of the group, and each part has a connection
of its own from then on (docs/decisions/0088).
"""

import time
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import structlog

from shoal import errors
from shoal._wire import ShardLayout
from shoal.v1 import replica_pb2
from shoal_server.shards.group.input_log import InputLog
from shoal_server.shards.group.pending_split import LOOK_AGAIN_S, PendingSplit
from shoal_server.shards.group.replicated_group import QUIET_WAIT_S, ReplicatedGroup
from shoal_server.shards.machine import events
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.values import Payload, Selection

_log = structlog.get_logger(__name__)


class SplittableGroup(ReplicatedGroup):
    """A job's shards on one server, which can be split.

    Args and attributes: see `GroupShell`.
    """

    # As the primary.

    def split(
        self,
        shards: Sequence[int],
        term: int,
        replace: Callable[[Self, Self], object],
        is_wanted: Callable[[], bool] = lambda: True,
        keeps: int = 0,
        logs: Sequence[InputLog] = (),
    ) -> None:
        """Makes two groups of this one, as soon as the open step has no contribution. Calls that wait here are refused.

        Both groups continue from the state of this one, with the pushes that are staged.

        Args:
            shards: the shards that leave the group, as for `check_parts`.
            term: number of the coordinator's decision.
            replace: called with the group of the other shards and the group of these shards, with the lock of this
                group. Calls must find these two instead of this one from then on. If it raises an error, nothing is
                changed.
            is_wanted: returns whether the caller still waits. If nobody does, nobody would tell the workers of the new
                groups, and they could not train.
            keeps: the term of the complete backup, which both groups keep; 0 if there is none.
            logs: for a group with a backup, the logs of the group of the other shards and of the group of these shards.

        Raises:
            Moved: this server is not the primary, or knows a later term.
            BadRequest: the group does not have the shards, or its updates need the norm of all shards, or it has
                another backup than the one to keep, or the connection to that is broken.
            Overloaded: the open step had contributions all the time, or cuts were taken.
            Cancelled: the caller does not wait any more.
            UnknownJob, NotPlaced: the group is closed, or is being restored.
        """
        chosen = sorted(shards)

        def divide() -> None:
            self._check_kept(keeps)
            parts = self._parts(chosen, term)
            for part, log in zip(parts, logs, strict=False):
                if not log.begin_complete():
                    raise self._unkept(f"the connection for the shards {sorted(part._stored.by_number)} is broken")
                part._logs.begin(log)
            replace(*parts)
            if logs:
                self._feed(events.GroupSplit(tuple(chosen), term))
                self._settles = True

        pending = PendingSplit(self.config.name, divide)
        with self._lock:
            self._check_open()
            self.check_term(term)
            self._check_splittable(chosen, term, keeps)
            self._take_term(term)
            self._refuse_pending()
            self._split = pending
            self._try_split(pending)
        self._await_split(pending, is_wanted)
        _log.info("a lock group was split", job=self.config.name, group=self.number, shards=chosen, term=term)
        self._end_split(settles=bool(logs))

    def _end_split(self, *, settles: bool) -> None:
        self._logs.flush()
        self.close()
        if settles:
            self._logs.settle()  # what was told before the split waits for the backup, as always
            self._logs.close()

    def _await_split(self, pending: PendingSplit, is_wanted: Callable[[], bool]) -> None:
        until = time.monotonic() + QUIET_WAIT_S
        while not pending.wait(LOOK_AGAIN_S):
            with self._lock:
                if self._split is not pending:
                    continue
                if not is_wanted():
                    self._split = None
                    raise errors.Cancelled(f"the caller does not wait for the split of {self.config.name} any more")
                if time.monotonic() >= until:
                    self._split = None
                    raise errors.Overloaded(
                        f"{self.config.name}: lock group {self.number} can only be split between two steps, and none "
                        f"ended for {QUIET_WAIT_S:g} s; the split is tried again"
                    )
                self._try_split(pending)

    def _check_splittable(self, shards: Sequence[int], term: int, keeps: int) -> None:
        job, number = self.config.name, self.number
        if missing := [shard for shard in shards if shard not in self._stored.by_number]:
            if term == self.term:
                raise errors.Moved(f"{job}: lock group {number} has no shards {missing} any more at term {term}")
            raise errors.BadRequest(
                f"lock group {number} of {job} has no shards {missing}; it has {sorted(self._stored.by_number)}"
            )
        if self.config.optimizer.clip_norm:
            raise errors.BadRequest(
                f"lock group {number} of {job} cannot be split: its optimizer has a clip_norm, and servers tell each "
                "other the norm of a whole lock group"
            )
        self._check_kept(keeps)

    def _check_kept(self, term: int) -> None:
        """Raises BadRequest unless the complete copy of a term is the only one, or there is none if the term is 0."""
        # Not Moved: this server has the shards, and a repeated call would find the same backup.
        if term:
            if self._copy or [log.term for log in self._logs] != [term] or not all(log.complete for log in self._logs):
                raise self._unkept(f"it has no complete backup of term {term}, or has another one, too")
        elif self._copy or self._logs.has_backup:
            job = self.config.name
            raise errors.BadRequest(f"lock group {self.number} of {job} has a backup; end it with DropBackup first")

    def _unkept(self, why: str) -> errors.BadRequest:
        return errors.BadRequest(
            f"{self.config.name}: lock group {self.number} cannot be split with its backup: {why}; repeat the call, or "
            "end the backup with DropBackup first"
        )

    # As a backup.

    def follow_split(self, event: events.GroupSplit, replace: Callable[[Self, Self], object]) -> None:
        """Makes the same two groups of this backup as the primary did. They are backups.

        Args:
            event: the primary's last input.
            replace: as for `split`.

        Raises:
            BadRequest: the group does not have the shards, or its open step has contributions.
            UnknownJob, InternalError: the group is closed.
            Moved: it is the primary now.
        """
        with self._lock:
            if self._closed:
                raise self._gone()
            if not self.follows:
                raise errors.Moved(f"this server is the primary of these shards of {self.config.name} now")
            leave, may_leave = {*event.shards}, self._stored.by_number.keys() - {self.number}
            if not self._state.is_copyable or not leave or not leave <= may_leave:
                raise errors.BadRequest(
                    f"the primary of lock group {self.number} of {self.config.name} has split off the shards "
                    f"{[*event.shards]}, which this backup cannot do"
                )
            replace(*self._parts(event.shards, event.term))
            self._closed = self._moved = True
        _log.info("a backup was split", job=self.config.name, group=self.number, shards=[*event.shards])
        self.close()

    # The parts.

    def part_layouts(self, shards: Sequence[int]) -> tuple[list[ShardLayout], list[np.ndarray]]:
        """Returns the layouts of some shards, and an array for each slab that a group of them would have.

        Args:
            shards: the shards, in the order of the group. The arrays only have the right sizes and dtypes.

        Raises:
            UnknownShard, Moved: the group does not have them.
        """
        with self._lock:
            layouts = [shard.layout for shard in Selection(self.config, self._stored, shards).shards]
            return layouts, self._stored.part_shapes(layouts)

    def _parts(self, shards: Sequence[int], term: int) -> tuple[Self, Self]:
        """Returns two groups that continue from the state of this one, in the same role. Called with the lock held.

        Args:
            shards: the shards of the second group, in order.
            term: number of the coordinator's decision.
        """
        state, payloads = replica_pb2.GroupState(), list[Payload]()

        def number_of(payload: Payload) -> int:
            payloads.append(payload)
            return len(payloads)

        self._state.write_to(state, number_of, lambda _: 1)
        rest = [shard for shard in self._stored.by_number if shard not in shards]
        return self._part(rest, term, state, payloads), self._part(shards, term, state, payloads)

    def _part(
        self, shards: Sequence[int], term: int, message: replica_pb2.GroupState, payloads: Sequence[Payload]
    ) -> Self:
        part = type(self)(
            self.config, (), self._updates.on_apply, self._memory, self._state.on_admission, readers=self._readers
        )
        chosen = Selection(self.config, self._stored, shards)
        part._counting = self._counting  # snapshots of slabs that stay whole are used by readers of both groups
        part._stored = self._stored.part(self.config, shards, self._counting)
        part._state = GroupState.restored(
            message,
            self.config.name,
            self._new_mode(),
            lambda number: chosen.part(payloads[number - 1], self._stored, self._memory),
            on_admission=self._state.on_admission,
        )
        part._state.forget_callers()  # they are refused here, and call again
        part._updates.folds.count = message.permits.folded
        part._limit_permits()
        part.follows, part.term, part._followed_term, part._loaded = self.follows, term, term, self._loaded
        return part


__all__ = ["SplittableGroup"]
