"""Decisions about the copies of one job (no I/O).

Each decision about a lock group has a larger term than the one before, and at most one effect that is not done. So a
server that has carried out a decision can refuse all earlier ones. A copy is begun only when the decision before is
known to the server that it concerns.

A replicated group moves with two complete copies at each moment (docs/decisions/0088). To move a backup, the primary
makes another one, which becomes the backup when it is complete. To hand a primary over, its backup makes a copy, and
one decision makes the backup the primary and that copy its backup.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.v1 import state_pb2
from shoal_coordinator.job.copies.copy_table import CopyTable
from shoal_coordinator.job.copies.group_copies import GroupCopies
from shoal_coordinator.job.counters import JobCounters
from shoal_coordinator.job.lifecycle import Lifecycle
from shoal_coordinator.job.submission import Submission
from shoal_coordinator.messages import AddBackup, DropBackup, DropCopy, Effect, Promote, ServerRef, SplitGroup

# Seconds from a failed copy of a group to the next: first, doubled each time, up to the maximum. A failure after a
# longer pause counts as the first one. So does that of a copy which was complete for LASTED_S, and for as long as the
# last pause: its server has died, and a job must not be without a backup because servers died before.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 60.0
LASTED_S = 2.0


@dataclass(slots=True)
class _Attempts:
    """The failed copies of one group. They are not stored: the next coordinator begins again.

    Attributes:
        pause_s: seconds from the latest failure to the next attempt.
        next_at: when a copy may begin again.
        made_at: when the latest copy was complete; infinity if it is not.
        failed_on: the servers of the latest copies, which failed, and when they did. Others are preferred.
        reason: the latest failure.
    """

    pause_s: float = 0.0
    next_at: float = 0.0
    made_at: float = math.inf
    failed_on: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    def fail(self, server: str, reason: str, now: float) -> None:
        lasted = now - self.made_at >= max(LASTED_S, self.pause_s)
        repeated = now < self.next_at + MAX_PAUSE_S and not lasted
        self.made_at = math.inf
        self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S) if repeated and self.pause_s else FIRST_PAUSE_S
        self.next_at, self.reason = now + self.pause_s, reason
        self.failed_on[server] = now


@dataclass(frozen=True, slots=True)
class _WantedCopy:
    """The wish for a copy, because a group has to move. It is not stored: the next coordinator decides again.

    Attributes:
        generation: generation of the placement.
        server: member id of the server that gets the copy; empty if it may be any.
        behind_backup: whether the backup makes it.
    """

    generation: int
    server: str
    behind_backup: bool


class CopyMachine:
    """Decides about the copies of one job's lock groups.

    Args:
        submission: the job.
        table: its lock groups; only this class changes them.
        lifecycle: receives notes about failovers.
        has_values: returns whether the shards are on their servers, with their values.
        counters: the cluster's counters, to add to.

    Attributes:
        failovers: how often the job continued with the backups of a server.
    """

    def __init__(
        self,
        submission: Submission,
        table: CopyTable,
        lifecycle: Lifecycle,
        has_values: Callable[[], bool],
        counters: JobCounters,
    ) -> None:
        self._ref, self._wanted = submission.ref, submission.spec.replicas
        self._clips = bool(submission.spec.optimizer.clip_norm)
        self._table, self._lifecycle, self._has_values = table, lifecycle, has_values
        self._counters = counters
        self._attempts: dict[int, _Attempts] = {}
        self.failovers = 0
        self._moves: dict[int, _WantedCopy] = {}  # by group

    # Current state.

    @property
    def groups(self) -> list[GroupCopies]:
        """The lock groups in order; none if the job is not placed."""
        return list(self._table.groups.values())

    @property
    def complete(self) -> int:
        """The number of complete copies that every shard has; 0 if it has no values on servers, or no replicas."""
        replicated = self._wanted > 1 and bool(self._table.groups)
        return 1 + self._table.complete if replicated and self._has_values() else 0

    @property
    def amount(self) -> str:
        """How many copies the job has, for users."""
        goes = "continues" if self._lifecycle.running else "waits"
        return f"{goes} with {self.complete} of {self._wanted} copies"

    @property
    def without_backup(self) -> int:
        """The number of groups that have no complete backup although the job wants one."""
        lacking = sum(it.backup is None for it in self._table.groups.values())
        return lacking if self._wanted > 1 and self._has_values() else 0

    def growable(self, now: float) -> list[GroupCopies]:
        """Returns the groups that lack a backup, or have to move, and for which a copy may be begun now."""
        if not self._table.groups or self._lifecycle.ended or not self._has_values():
            return []
        return [it for it in self.groups if self._needs_copy(it) and now >= self._attempts_of(it.group).next_at]

    @property
    def retries(self) -> bool:
        """Whether a group lacks a copy that may be begun, now or later."""
        return any(self._needs_copy(it) for it in self._table.groups.values()) and not self._lifecycle.ended

    def _needs_copy(self, group: GroupCopies) -> bool:
        moves = self._move_of(group.group) is not None
        return (group.may_grow and self._wanted > 1) or ((group.may_grow or group.may_move) and moves)

    def moves_to(self, group: int) -> str | None:
        """Returns the server that a group has to move to, by member id; empty if it may be any. None if it stays."""
        move = self._move_of(group)
        return move.server if move else None

    def next_sender(self, group: GroupCopies) -> ServerRef:
        """Returns the server that makes the next copy of a group."""
        move = self._move_of(group.group)
        return group.backup if move and move.behind_backup and group.backup else group.primary

    def _move_of(self, group: int) -> _WantedCopy | None:
        move = self._moves.get(group)
        return move if move and move.generation == self._generation else None

    @property
    def is_replicated(self) -> bool:
        """Whether the job wants several copies of each shard."""
        return self._wanted > 1

    def failed_on(self, group: int) -> Mapping[str, float]:
        """Returns the servers on which the latest copies of a group failed, and when they did."""
        return self._attempts_of(group).failed_on

    @property
    def failure(self) -> str:
        """Why the latest copy of a group failed that has none now; empty if none did."""
        missing = (it.group for it in self.groups if it.second is None)
        return next(filter(None, (self._attempts_of(group).reason for group in missing)), "")

    @property
    def group_bytes(self) -> Mapping[int, int]:
        """The wire bytes of each group."""
        return self._table.sizes

    def shard_bytes(self, group: GroupCopies) -> Mapping[int, int]:
        """Returns the wire bytes of each shard of a group."""
        return self._table.shard_bytes(group)

    @property
    def may_move(self) -> bool:
        """Whether groups can move to other servers: squares of norms name the servers of a job."""
        return not self._clips or len(self._table.groups) == 1

    @property
    def may_split(self) -> bool:
        """Whether groups can be split: a group without others measures the norm of its job alone."""
        return not self._clips

    def backup_bytes(self) -> dict[str, int]:
        """Returns the wire bytes of the backups on each server, with those that are made now."""
        held: dict[str, int] = {}
        sizes = self._table.sizes
        for it in self.groups:
            for other in it.others:
                held[other.member] = held.get(other.member, 0) + sizes[it.group]
        return held

    # Decisions.

    def grow(self, group: int, server: ServerRef) -> list[Effect]:
        """Begins to make a copy of a group on a server: the backup that is missing, or the one that a move needs."""
        found = self._table.groups[group]
        sender = self.next_sender(found)
        behind = sender != found.primary
        self.stay(group)  # if the copy fails, the group has to be moved again
        grown = found.grow_on(server, behind_backup=behind)
        self._table.put(grown)
        keeps = 0 if behind else grown.backup_term
        return [AddBackup(self._ref, self._generation, group, grown.term, sender, server, keeps, behind)]

    def made(self, group: int, term: int, now: float) -> list[Effect]:
        """Records that a copy is complete. If the primary has made it beside its backup, it replaces that now.

        Args:
            group: number of the group.
            term: the term in which it was made.
            now: seconds of Unix time.

        Returns:
            The effects.
        """
        found = self._at(group, term)
        if found is None or not found.is_copied:
            return []
        attempts = self._attempts_of(group)
        attempts.made_at = now
        attempts.failed_on.clear()
        if found.backup is None or found.behind_backup:
            self._table.put(found.made())
            return []
        after = found.replaced()
        self._table.put(after)
        return [DropBackup(self._ref, self._generation, group, after.term, after.primary, after.backup_term)]

    def give_up(self, group: int, term: int, reason: str, now: float) -> list[Effect]:
        """Ends a copy that its sender does not reach, or that failed.

        Args:
            group: number of the group.
            term: the term in which the copy was begun. If it is none of the present copies, nothing changes.
            reason: why.
            now: seconds of Unix time.

        Returns:
            The effects.
        """
        found = self._table.groups.get(group)
        if found and found.growing and found.term == term:
            self._attempts_of(group).fail(found.growing.member, reason, now)
            return self.keep_backup(group) if found.backup else [self._leave_alone(found)]
        if found and found.backup and term in found.backup_terms:
            self._attempts_of(group).fail(found.backup.member, reason, now)
            return [self._leave_alone(found)]
        return []

    def keep_backup(self, group: int) -> list[Effect]:
        """Drops the copy of a group that was to replace the backup, or to follow it."""
        found = self._table.groups[group]
        after, sender = found.kept(), found.sender
        self._table.put(after)
        behind = found.behind_backup
        keeps = 0 if behind else after.backup_term
        return [DropBackup(self._ref, self._generation, group, after.term, sender, keeps, behind)]

    def told(self, group: int, term: int) -> list[Effect]:
        """Records that the decision of a term is known. Then the former copies are freed."""
        found = self._at(group, term)
        if not found or found.told:
            return []
        self._table.put(*found.known())
        effects: list[Effect] = [self.free(group, it) for it in found.former]
        now = self._table.groups[group]
        return [*effects, self._split_effect(now)] if now.split_off else effects

    def free(self, group: int, server: ServerRef) -> DropCopy:
        """Frees the copy of a group on a server that should have none now."""
        found = self._table.groups[group]
        assert server.member not in {it.member for it in (found.primary, *found.others)}
        return DropCopy(self._ref, self._generation, group, found.term, server)

    def move(self, group: int, server: str, *, behind_backup: bool = False) -> None:
        """Lets a copy of a group be made because it has to move. If the group has a backup, the copy replaces it.

        Args:
            group: number of the group.
            server: member id of the server; empty if it may be any.
            behind_backup: whether the copy follows the backup instead, because the primary moves there.
        """
        self._moves[group] = _WantedCopy(self._generation, server, behind_backup)

    def stay(self, group: int) -> None:
        """Ends the wish to move a group. A copy that was begun stays."""
        self._moves.pop(group, None)

    def hand_over(self, group: int, note: str, now: float) -> list[Effect]:
        """Makes the complete backup of a group its primary, with its own copy as the backup if that is complete.

        Args:
            group: number of the group.
            note: what users are told; empty for nothing.
            now: seconds of Unix time.

        Returns:
            The effects.
        """
        found = self._table.groups[group]
        if note:
            self._lifecycle.note(note, now)
        return [self._promote(found, keeps=found.grown)]

    def split(self, group: int, split_off: tuple[int, ...]) -> list[Effect]:
        """Makes some shards of a group a group of their own on the same servers."""
        found = self._table.groups[group].split(split_off)
        self._table.put(found)
        return [self._split_effect(found)]

    def _split_effect(self, group: GroupCopies) -> SplitGroup:
        about = self._ref, self._generation, group.group, group.term, group.primary, group.split_off
        return SplitGroup(*about, group.backup_term, group.backup)

    def release(self, group: int) -> list[Effect]:
        """Drops the backup of a group, because it has to be on another server, or nowhere."""
        return [self._leave_alone(self._table.groups[group])]

    def lose(self, server: str, is_usable: Callable[[ServerRef], bool], how: str, now: float) -> list[Effect] | None:
        """Continues without a server, if that is possible.

        Args:
            server: member id of the server.
            is_usable: returns whether a server can have a copy.
            how: what happened to it, for users: "is lost".
            now: seconds of Unix time.

        Returns:
            The effects; None if a group has no complete backup, so that its shards are lost. Nothing is changed then.
        """
        served = [it for it in self.groups if it.primary.member == server]
        backed_up = [it for it in self.groups if it.second and it.second.member == server]
        moving = [it.group for it in self.groups if it.backup and it.growing and it.growing.member == server]
        if not all(it.backup and is_usable(it.backup) for it in served):
            return None
        effects: list[Effect] = []
        for it in served:
            effects.append(self._promote(it, keeps=it.grown))
        effects += [self._leave_alone(it) for it in backed_up]
        effects += [effect for group in moving for effect in self.keep_backup(group)]
        if served:
            self.failovers += 1
            self._counters.failovers += 1
            heirs = sorted({it.backup.member for it in served if it.backup})
            verb = "continues" if len(heirs) == 1 else "continue"
            self._lifecycle.note(f"server {server} {how}; {', '.join(heirs)} {verb} with its shards", now)
        return effects

    # Stored state. The groups have a record of their own.

    def write_to(self, record: state_pb2.JobRecord) -> None:
        """Writes the number of failovers into the job's record."""
        record.failovers = self.failovers

    def restore_from(self, record: state_pb2.JobRecord) -> None:
        """Restores the number of failovers from the job's record."""
        self.failovers = record.failovers

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        self._table.validate()
        assert self._has_values() or not any(it.term for it in self.groups), "a copy of shards without values"

    def _leave_alone(self, group: GroupCopies) -> Effect:
        alone = group.alone()
        self._table.put(alone)
        about = self._ref, self._generation, group.group, alone.term, group.primary
        # A server that is not the primary yet has to become it.
        return Promote(*about, split_off=alone.split_off) if alone.promoted else DropBackup(*about)

    def _promote(self, group: GroupCopies, *, keeps: bool) -> Promote:
        after = group.handed_over(keeps=keeps)
        self._table.put(after)
        self.stay(group.group)
        about = self._ref, self._generation, group.group, after.term, after.primary
        return Promote(*about, after.backup_term, after.split_off)

    def _at(self, group: int, term: int) -> GroupCopies | None:
        found = self._table.groups.get(group)
        return found if found and found.term == term else None

    def _attempts_of(self, group: int) -> _Attempts:
        return self._attempts.setdefault(group, _Attempts())

    @property
    def _generation(self) -> int:
        assert self._table.planned
        return self._table.planned.generation


__all__ = ["FIRST_PAUSE_S", "MAX_PAUSE_S", "CopyMachine"]
