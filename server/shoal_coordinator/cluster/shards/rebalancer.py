"""Rebalancer: moves shards of running jobs to servers that have fewer, and backups to other zones (no I/O).

`rebalance` and `move_apart` decide what should move. A lock group moves as it moves off a server that is about to
leave: a copy is made on the other server, which then becomes the primary. If a third server can take a copy, a
replicated group has two complete copies at each moment: its backup moves to the other server first, and makes the next
backup before it becomes the primary (docs/decisions/0088). A part of a group is split off before, on the primary and
on the backup. One move of a job is in progress at a time.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache

from shoal.status import Role
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.cluster.shards.copy_keeper import CopyKeeper, held_bytes
from shoal_coordinator.cluster.shards.rebalance import GroupLoad, Move, rebalance
from shoal_coordinator.cluster.shards.zones import barred_servers, move_apart
from shoal_coordinator.job import GroupCopies, JobMachine
from shoal_coordinator.messages import JobRef

# Seconds without a change of the servers before shards move: others may come, too, or come back.
SETTLED_S = 3.0
# Seconds for which a job moves nothing to a server on which a copy has failed: first, doubled each time, and at most.
PAUSE_S, MAX_PAUSE_S = 30.0, 3600.0
# Seconds to the next look at a job that is busy.
LOOK_S = 1.0


@dataclass(slots=True)
class _Progress:
    """A move in progress. It is not stored: the next coordinator decides again.

    Attributes:
        move: the move. Once its shards have been split off, it is that of the whole new group.
        begun_at: seconds of Unix time.
        of_backup: whether only the backup of the group moves.
    """

    move: Move
    begun_at: float
    of_backup: bool = False


class Rebalancer:
    """Keeps the bytes of each job even over the servers.

    Args:
        jobs: jobs of the cluster.
        members: members of the cluster.
        copies: makes and promotes copies.
        smallest_bytes: bytes of a job that are not worth a move.
    """

    def __init__(self, jobs: JobTable, members: Membership, copies: CopyKeeper, smallest_bytes: int) -> None:
        self._jobs, self._members, self._copies, self._smallest_bytes = jobs, members, copies, smallest_bytes
        self._moves: dict[JobRef, _Progress] = {}
        self._to_check: dict[JobRef, float] = {}  # the jobs that may be uneven, with the time of the next look
        self._servers: frozenset[tuple[str, int]] = frozenset()  # that may have shards, with their incarnations
        self._settled_at = math.inf  # when their latest change counts; infinity if it has counted
        # The servers on which copies of a job have failed, with the pause and its end. Forgotten when servers change.
        self._failures: dict[tuple[JobRef, str], tuple[float, float]] = {}

    def is_due(self, now: float) -> bool:
        """Returns whether `review` has something to do although nothing has happened."""
        return bool(self._moves) or now >= self._settled_at or any(now >= at for at in self._to_check.values())

    def review(self, now: float) -> None:
        """Continues the moves as far as possible now, and begins others."""
        servers = frozenset((it.id, it.incarnation) for it in self._members.not_draining)
        if servers != self._servers:
            self._servers, self._settled_at = servers, now + SETTLED_S
        if now >= self._settled_at:
            self._settled_at = math.inf
            self._to_check = {job.ref: now for job in self._jobs.live}
            self._failures.clear()
        self._to_check = dict.fromkeys(self._copies.close, now) | self._to_check
        self._copies.close.clear()
        held = cache(lambda: held_bytes(self._jobs.values()))  # one look at all jobs, and only if one may move
        for ref in dict.fromkeys([*self._to_check, *self._moves]):
            job = self._jobs.find_live(ref)
            if job is None or job.all_workers_finished or (job.placement and not job.copies.may_move):
                self._end(ref)
                self._to_check.pop(ref, None)
                self._failures = {key: it for key, it in self._failures.items() if key[0] != ref}
            elif not job.created or self._is_on_draining(job):  # it has no values yet, or moves off those servers first
                self._end(ref)
                self._to_check[ref] = now + LOOK_S
            else:
                if ref not in self._moves and now >= self._to_check[ref]:
                    self._begin(job, held, now)
                if progress := self._moves.get(ref):
                    self._advance(job, progress, now)

    def _is_on_draining(self, job: JobMachine) -> bool:
        return any(self._members.is_draining(it.member) for group in job.copies.groups for it in group.servers)

    def _begin(self, job: JobMachine, held: Callable[[], Counter[str]], now: float) -> None:
        """Decides what moves next, if all copies of a job are where they should be.

        Args:
            job: the job.
            held: returns the bytes on each server.
            now: seconds of Unix time.
        """
        groups = job.copies.groups
        begun = [it for it in groups if it.behind_backup or not job.copies.is_replicated]
        moving = [Move(it.group, it.second.member) for it in begun if it.second]
        if moving:  # an earlier coordinator, or a server that was to leave, has begun to move these groups
            self._moves[job.ref] = _Progress(moving[0], now)
            return
        if not all(it.told and not it.growing for it in groups) or self._settled_at < math.inf:
            self._to_check[job.ref] = now + LOOK_S
            return
        loads = {it.group: GroupLoad(it.primary.member, job.copies.shard_bytes(it)) for it in groups}
        failing = dict.fromkeys(self._copies.late(now), now + LOOK_S)
        failing |= {member: end for member, _ in self._servers if (end := self._pause_of(job.ref, member)[1]) > now}
        usable = {member for member, _ in self._servers if member not in failing} | {it.server for it in loads.values()}
        servers = {member: held()[member] for member in usable}
        zones = {it.id: it.zone for it in self._members.unordered() if it.role is Role.SERVER}
        pairs = {it.group: (it.primary.member, it.backup.member) for it in groups if it.backup}
        apart = move_apart(pairs, {it: size for it, size in servers.items() if it not in failing}, zones)
        move = apart or rebalance(loads, servers, splits=job.copies.may_split, smallest_bytes=self._smallest_bytes)
        of_backup = apart is not None or (move is None and job.copies.is_replicated)
        if move is None and of_backup:
            move = self._backup_move(job, servers, barred_servers(pairs, zones))
        if move and move.server not in failing:
            self._moves[job.ref] = _Progress(move, now, of_backup)
        elif failing:
            self._to_check[job.ref] = min(failing.values())
        else:
            del self._to_check[job.ref]

    def _backup_move(
        self, job: JobMachine, servers: Mapping[str, int], barred: Mapping[int, AbstractSet[str]]
    ) -> Move | None:
        """Decides which backup moves next, so that the backups take memory and network of all servers."""
        groups = [(it, it.backup.member) for it in job.copies.groups if it.backup]
        loads = {it.group: GroupLoad(server, job.copies.shard_bytes(it)) for it, server in groups}
        usable = {**dict.fromkeys((it.server for it in loads.values()), 0), **servers}
        return rebalance(loads, usable, splits=False, smallest_bytes=self._smallest_bytes, barred=barred)

    def _pause_of(self, job: JobRef, server: str) -> tuple[float, float]:
        return self._failures.get((job, server), (0.0, 0.0))

    def _advance(self, job: JobMachine, progress: _Progress, now: float) -> None:
        move = progress.move
        group = next((it for it in job.copies.groups if it.group == move.group), None)
        usable = any(member == move.server for member, _ in self._servers)
        failed = job.copies.failed_on(move.group).get(move.server, -1.0) >= progress.begun_at
        if failed:
            self._pause(job, move.server, now)
        if group is None or not usable or failed:
            self._end(job.ref)
            self._to_check[job.ref] = now + LOOK_S
        elif move.shards:
            self._split(job, group, progress, now)
        elif group.primary.member == move.server or (progress.of_backup and _has_backup_on(group, move.server)):
            if group.told and not group.growing:
                self._end(job.ref)
                self._to_check[job.ref] = now
        elif _has_backup_on(group, move.server):
            self._hand_over(job, group, progress, now)
        elif group.second is None or (group.may_move and job.copies.is_replicated):
            job.copies.move(move.group, move.server)
        elif group.second.member != move.server and not (
            progress.of_backup or (group.backup and job.copies.is_replicated)
        ):
            self._release(job, group)

    def _hand_over(self, job: JobMachine, group: GroupCopies, progress: _Progress, now: float) -> None:
        """Hands a group over to its backup, which is on the server that it moves to.

        If another server can take a copy, the backup of a replicated group makes its next backup there before.
        """
        move, others = progress.move, self._copies.candidates(group)
        failed, is_settled = job.copies.failed_on(group.group), self._settled_at == math.inf
        if not group.told or move.server in self._copies.late(now):
            pass  # a decision is not known yet, or would not be known soon
        elif job.copies.is_replicated and not group.grown and (others or not is_settled):
            if group.growing or not others:
                pass  # it is being made; or a server was lost, and may come back
            elif any(failed.get(it.id, -1.0) < progress.begun_at for it in others):
                job.copies.move(group.group, "", behind_backup=True)
            else:  # the group stays where it is: it must not have one complete copy for the sake of even shares
                self._pause(job, move.server, now)
                self._end(job.ref)
                self._to_check[job.ref] = now + LOOK_S
        elif not job.checkpoint_in_progress:
            note = f"lock group {move.group} moves to server {move.server}, so that all servers have their share"
            self._copies.hand_over(job, group, note, now)

    def _pause(self, job: JobMachine, server: str, now: float) -> None:
        """Leaves a server out for a while."""
        pause_s = min(2 * self._pause_of(job.ref, server)[0] or PAUSE_S, MAX_PAUSE_S)
        self._failures[job.ref, server] = pause_s, now + pause_s

    def _split(self, job: JobMachine, group: GroupCopies, progress: _Progress, now: float) -> None:
        """Splits a group. Its new part then moves."""
        move = progress.move
        if min(move.shards) in {it.group for it in job.copies.groups}:  # done
            progress.move = Move(min(move.shards), move.server)
            self._advance(job, progress, now)
        elif not group.told or job.checkpoint_in_progress or not self._copies.may_split(group):
            pass  # later
        elif group.second and not job.copies.is_replicated:  # only the part has to move
            self._release(job, group)
        elif not group.growing:  # else the copy is complete soon, or has failed
            self._copies.split(job, group, move.shards)

    def _release(self, job: JobMachine, group: GroupCopies) -> None:
        """Gives up the backup of a group, which is made again after the move."""
        if self._copies.may_release(group):
            self._copies.release(job, group)

    def _end(self, ref: JobRef) -> None:
        progress, job = self._moves.pop(ref, None), self._jobs.find_live(ref)
        if progress and job:
            job.copies.stay(progress.move.group)


def _has_backup_on(group: GroupCopies, server: str) -> bool:
    return group.backup is not None and group.backup.member == server


__all__ = ["PAUSE_S", "SETTLED_S", "Rebalancer"]
