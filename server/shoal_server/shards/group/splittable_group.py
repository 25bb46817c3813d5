"""Splittable group: a lock group of which two can be made, so that one of them can move (docs/decisions/0084)."""

import time
from collections.abc import Callable, Sequence
from typing import Self

import structlog

from shoal import errors
from shoal.v1 import replica_pb2
from shoal_server.shards.group.pending_split import LOOK_AGAIN_S, PendingSplit
from shoal_server.shards.group.replicated_group import QUIET_WAIT_S, ReplicatedGroup
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.values import Payload, Selection

_log = structlog.get_logger(__name__)


class SplittableGroup(ReplicatedGroup):
    """A job's shards on one server, which can be split.

    Args and attributes: see `GroupShell`.
    """

    def split(
        self,
        shards: Sequence[int],
        term: int,
        replace: Callable[[Self, Self], object],
        is_wanted: Callable[[], bool] = lambda: True,
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

        Raises:
            Moved: this server is not the primary, or knows a later term.
            BadRequest: the group does not have the shards, or has a backup, or its updates need the norm of all shards.
            Overloaded: the open step had contributions all the time, or cuts were taken.
            Cancelled: the caller does not wait any more.
            UnknownJob, NotPlaced: the group is closed, or is being restored.
        """
        chosen = sorted(shards)
        pending = PendingSplit(self.config.name, lambda: replace(*self._parts(chosen)))
        with self._lock:
            self._check_open()
            self.check_term(term)
            self._check_splittable(chosen, term)
            self._take_term(term)
            self._refuse_pending()
            self._split = pending
            self._try_split(pending)
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
        _log.info("a lock group was split", job=self.config.name, group=self.number, shards=chosen, term=term)
        self.close()

    def _check_splittable(self, shards: Sequence[int], term: int) -> None:
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
        if self._copy or self._logs.has_backup:
            # Not Moved: this server has the shards, and a repeated call would find the same backup.
            raise errors.BadRequest(f"lock group {number} of {job} has a backup; end it with DropBackup first")

    def _parts(self, shards: Sequence[int]) -> tuple[Self, Self]:
        """Returns two groups that continue from the state of this one. Called with the lock held.

        Args:
            shards: the shards of the second group.
        """
        state, payloads = replica_pb2.GroupState(), list[Payload]()

        def number_of(payload: Payload) -> int:
            payloads.append(payload)
            return len(payloads)

        self._state.write_to(state, number_of, lambda _: 1)
        rest = [shard for shard in self._stored.by_number if shard not in shards]
        return self._part(rest, state, payloads), self._part(shards, state, payloads)

    def _part(self, shards: Sequence[int], message: replica_pb2.GroupState, payloads: Sequence[Payload]) -> Self:
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
        part.term = self.term
        return part


__all__ = ["SplittableGroup"]
