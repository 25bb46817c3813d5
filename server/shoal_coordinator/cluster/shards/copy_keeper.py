"""Copies of all jobs: where backups are made, and what follows from lost servers and broken connections (no I/O).

`CopyMachine` decides about the copies of one job. This module knows the servers. A job that loses a server goes on with
the backups there; `OutcomeHandler` restarts it if there are none.
"""

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from shoal.status import BrokenReplica, Role
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.cluster.pending_effects import PendingEffects
from shoal_coordinator.cluster.shards.zones import server_for_backup
from shoal_coordinator.job import GroupCopies, JobMachine
from shoal_coordinator.messages import (
    BackupFailed,
    BackupMade,
    CommitCheckpoint,
    Effect,
    GroupTold,
    JobRef,
    ProbeServer,
    Promote,
    ServerProbed,
    ServerRef,
    TakeCut,
    events,
    servers_of,
)

# Backups that are made at the same time from a server, and on a server. More would delay the pushes there.
COPIES_AT_A_TIME = 2


class CopyKeeper:
    """Keeps the copies of jobs complete.

    Args:
        jobs: jobs of the cluster.
        members: members of the cluster.
        pending_effects: pending effects of the cluster.
        emit: receives the effects that are decided.
        schedule: runs the scheduler, given the time; it calls `grow`.
        declare_lost: handles servers that do not answer, as those whose heartbeat timeout has expired.
        fail_checkpoint: ends a checkpoint attempt that cannot go on. It does not run the scheduler.

    Attributes:
        handlers: the handler of each type of event.
        close: jobs that got a backup in the zone of its primary, although there are other zones.
    """

    def __init__(
        self,
        jobs: JobTable,
        members: Membership,
        pending_effects: PendingEffects,
        emit: Callable[[Iterable[Effect]], None],
        schedule: Callable[[float], None],
        declare_lost: Callable[[Sequence[Member], float], None],
        fail_checkpoint: Callable[[events.CheckpointFailed, float], None],
    ) -> None:
        self._jobs, self._members, self._pending_effects = jobs, members, pending_effects
        self._emit, self._schedule = emit, schedule
        self._declare_lost, self._fail_checkpoint = declare_lost, fail_checkpoint
        self.close: set[JobRef] = set()
        self.handlers: dict[type[events.ClusterEvent[Any]], Callable[[Any, float], Any]] = {
            BackupMade: self._backup_made,
            BackupFailed: self._backup_failed,
            GroupTold: self._group_told,
            ServerProbed: self._server_probed,
        }

    # Copies that are missing.

    def grow(self, now: float) -> None:
        """Begins to make the copies that jobs lack, or move by, on the servers with the fewest bytes."""
        growable = [(job, group) for job in self._jobs.live for group in job.copies.growable(now)]
        if not growable:
            return
        growable.sort(key=lambda it: not self._members.is_draining(it[1].primary.member))  # which waits for the copy
        held, late = held_bytes(self._jobs.values()), self.late(now)
        busy = self._busy() | Counter(dict.fromkeys(late, COPIES_AT_A_TIME))
        for job, group in growable:
            sender = job.copies.next_sender(group).member
            if busy[sender] >= COPIES_AT_A_TIME:
                continue
            if server := self._server_for(job, group, held, busy, late):
                held[server.id] += job.copies.group_bytes[group.group]
                busy.update((server.id, sender))
                self._emit(job.copies.grow(group.group, _ref(server)))

    @property
    def retries(self) -> bool:
        """Whether a job lacks a backup that may be begun later."""
        return any(job.copies.retries for job in self._jobs.live)

    def waiting_for(self, job: JobMachine) -> str:
        """Returns what a job needs to have all its copies; empty if it has them, or if they are being made."""
        missing = [it for it in job.copies.growable(math.inf) if it.may_grow and job.copies.is_replicated]
        if not missing:
            return ""
        if not any(self.candidates(it) for it in missing):
            return f"{job.copies.amount}; takes another server when there is one"
        return f"{job.copies.amount}: {job.copies.failure}" if job.copies.failure else ""

    def moving_off(self, job: JobMachine) -> str:
        """Returns from which servers a job moves because they are about to leave; empty if there are none."""
        groups = job.copies.groups
        left = Counter(it.primary.member for it in groups if self._members.is_draining(it.primary.member))
        moving = {name: count for name, count in sorted(left.items()) if job.ref not in self._stays(name)}
        return "; ".join(
            f"moves off server {name}, which is about to leave: {count} lock group{'s' * (count > 1)} left"
            for name, count in moving.items()
        )

    def _stays(self, server: str) -> Container[JobRef]:
        found = self._members.find(server)
        return found.stays_with if found else ()

    def _server_for(
        self, job: JobMachine, group: GroupCopies, held: Counter[str], busy: Counter[str], late: Container[str]
    ) -> Member | None:
        wanted, sender = job.copies.moves_to(group.group), self._members.find(job.copies.next_sender(group).member)
        zone = sender.zone if sender and job.copies.is_replicated else ""  # other copies only move
        servers = [it for it in self.candidates(group) if wanted in (None, "", it.id)]
        full = {it for it in busy if busy[it] >= COPIES_AT_A_TIME}
        best = server_for_backup(servers, zone, held, failed=job.copies.failed_on(group.group), late=late, busy=full)
        if best and best.zone == zone and any(it.zone != zone for it in servers):
            self.close.add(job.ref)
        return best

    def candidates(self, group: GroupCopies) -> list[Member]:
        """Returns the servers that may get another copy of a group: they have neither its primary nor its backup."""
        held = {it.member for it in (group.primary, group.backup) if it}
        return [server for server in self._members.not_draining if server.id not in held]

    def _busy(self) -> Counter[str]:
        """Returns on how many copies each server works that are made now."""
        copied = [it for job in self._jobs.values() for it in job.copies.groups if it.is_copied]
        return Counter(it.sender.member for it in copied) + Counter(it.growing.member for it in copied if it.growing)

    def late(self, now: float) -> set[str]:
        """Returns the servers that were silent for half a heartbeat timeout: they may be stopped, or lost soon."""
        limit_s = max(self._members.heartbeat_timeout_s / 2, 2 * self._members.heartbeat_interval_s)
        return {it.id for it in self._members.alive(Role.SERVER) if now - it.last_seen > limit_s}

    # Servers that are about to leave, or lost.

    def hand_over(self, job: JobMachine, group: GroupCopies, note: str, now: float) -> None:
        """Makes the complete backup of a group its primary, with its own copy as the backup if that is complete.

        Args:
            job: the job, of which no checkpoint may be in progress.
            group: the group.
            note: what users are told; empty for nothing.
            now: seconds of Unix time.
        """
        self._emit(job.copies.hand_over(group.group, note, now))
        self._redirect(job, group.primary.member, now)

    def release(self, job: JobMachine, group: GroupCopies) -> None:
        """Drops the backup of a group, or the copy that was to be one; `grow` makes another one."""
        self._emit(job.copies.release(group.group))

    def keep_backup(self, job: JobMachine, group: GroupCopies) -> None:
        """Drops the copy of a group that was to replace its backup, or to follow it."""
        self._emit(job.copies.keep_backup(group.group))

    def may_release(self, group: GroupCopies) -> bool:
        """Returns whether the backup of a group may be dropped: few groups of its primary change theirs at a time."""
        changing = sum(it.primary == group.primary and (it.is_copied or not it.told) for it in self._jobs.live_groups)
        return group.told and changing - group.is_copied < COPIES_AT_A_TIME

    def may_split(self, group: GroupCopies) -> bool:
        """Returns whether a group may be split: few groups of its primary are at a time."""
        split = sum(it.primary == group.primary and bool(it.split_off) for it in self._jobs.live_groups)
        return split < COPIES_AT_A_TIME

    def split(self, job: JobMachine, group: GroupCopies, shards: tuple[int, ...]) -> None:
        """Makes some shards of a group a group of their own.

        Args:
            job: the job.
            group: the group, of which no copy is being made. If it has a backup, the parts have it, too.
            shards: the shards.
        """
        self._emit(job.copies.split(group.group, shards))

    def fail_over(self, job: JobMachine, server: Member, now: float) -> bool:
        """Lets a job continue without a server that has copies of it, if every shard there has another copy.

        Args:
            job: the job.
            server: the server, which has ended.
            now: seconds of Unix time.

        Returns:
            Whether the job continues. If not, its shards are lost, and nothing has changed.
        """
        how = "has left" if server.draining else "is lost"
        before = job.servers
        effects = job.copies.lose(server.id, self._is_usable, how, now)
        if effects is None:
            return False
        self._emit(effects)
        if job.servers != before:
            self._redirect(job, server.id, now)
        else:
            self._follow_promotions(job, effects)
        return True

    def _redirect(self, job: JobMachine, former: str, now: float) -> None:
        """Sends the effects to the new primaries that were meant for a former one, after these know that they are."""
        self._emit(self._pending_effects.take_for(job.ref, former, job.servers))
        attempts = [it for it in self._pending_effects if it.job == job.ref and _saves_on(it, former)]
        for effect in attempts:
            if isinstance(effect, TakeCut):  # the new primaries cannot continue a cut of the old ones
                reason = f"server {former} was lost during the checkpoint"
                self._fail_checkpoint(events.CheckpointFailed(job.ref, reason, effect=effect.number), now)
        if attempts and not job.ended:
            self._emit(job.request_checkpoint_from(now, now))

    def _is_usable(self, server: ServerRef) -> bool:
        return bool(self._members.incarnation_at(server))  # a draining one hands over to the next

    # Reports of broken connections.

    def reported(self, member: Member, broken: Iterable[BrokenReplica], now: float) -> None:
        """Handles what a server reports about connections to other copies.

        Args:
            member: the server.
            broken: the lock groups whose other copy it does not reach.
            now: seconds of Unix time.
        """
        self._emit(self._stale_copies(member, broken))
        for job, group, report in self._concerned(member, broken):
            if report.primary:
                self._give_up(job, group, report, now)
            else:
                self.probe(job.ref, _connected(group, report)[0], now)
        if broken:
            self._schedule(now)

    def probe(self, job: JobRef, server: ServerRef, now: float) -> None:
        """Asks a server for an answer, unless it is being asked already.

        Args:
            job: a job with shards on the server.
            server: the server.
            now: seconds of Unix time.
        """
        incarnation = self._members.incarnation_at(server)
        asked = any(isinstance(it, ProbeServer) and it.server == server for it in self._pending_effects)
        if incarnation and not asked:
            self._emit([ProbeServer(job, server, incarnation, now)])

    def probe_all(self, job: JobMachine, now: float) -> None:
        """Asks the primaries of a job for an answer, because a worker found its shards gone."""
        for server in job.servers:
            self.probe(job.ref, server, now)

    def _concerned(
        self, member: Member, broken: Iterable[BrokenReplica]
    ) -> Iterator[tuple[JobMachine, GroupCopies, BrokenReplica]]:
        """Yields the reports that are about a connection of a group's present copies, with the reporter at one end."""
        for report in broken:
            job = self._jobs.get(report.job)
            if job is None or job.placement is None or job.placement.generation != report.generation:
                continue
            group = next((it for it in job.copies.groups if it.group == report.group), None)
            if group and report.term in _terms(group):
                sender, receiver = _connected(group, report)
                if (sender if report.primary else receiver).member == member.id:
                    yield job, group, report

    def _give_up(self, job: JobMachine, group: GroupCopies, report: BrokenReplica, now: float) -> None:
        sender, receiver = _connected(group, report)
        reason = (
            f"servers {sender.member} and {receiver.member} do not reach each other "
            f"({report.reason or 'no reason given'})"
        )
        self._end_copy(job, group.group, report.term, reason, now)

    def _end_copy(self, job: JobMachine, group: int, term: int, reason: str, now: float) -> None:
        effects = job.copies.give_up(group, term, reason, now)
        self._emit(effects)
        self._follow_promotions(job, effects)

    def _follow_promotions(self, job: JobMachine, effects: Iterable[Effect]) -> None:
        """Queues the effects that need a new primary after its promotion again, which replaces an earlier one."""
        for effect in effects:
            if isinstance(effect, Promote):
                self._emit(self._pending_effects.take_for(job.ref, effect.server.member, job.servers))

    def _stale_copies(self, member: Member, broken: Iterable[BrokenReplica]) -> Iterator[Effect]:
        """Yields effects that free the reported copies of earlier terms on a server that should have no copy."""
        for report in broken:
            job = self._jobs.get(report.job)
            if job is None or job.placement is None or job.placement.generation != report.generation:
                continue
            group = next((it for it in job.copies.groups if it.group == report.group), None)
            if group is None or report.term >= group.term or not group.told:  # what is not told yet frees it then
                continue
            known = {it.member for it in (group.primary, *group.others)}
            if member.id not in known and not self._pending_effects.frees(job.ref, group.group, member.id):
                yield job.copies.free(group.group, _ref(member))

    # Outcomes of effects.

    def _backup_made(self, event: BackupMade, now: float) -> None:
        if job := self._job_of_outcome(event.effect, event.job):
            self._emit(job.copied(event.group, event.term, now))
            self._schedule(now)

    def _backup_failed(self, event: BackupFailed, now: float) -> None:
        if job := self._job_of_outcome(event.effect, event.job):
            self._end_copy(job, event.group, event.term, event.reason, now)

    def _group_told(self, event: GroupTold, now: float) -> None:
        if job := self._job_of_outcome(event.effect, event.job):
            self._emit(job.copies.told(event.group, event.term))
            self._schedule(now)

    def _server_probed(self, event: ServerProbed, now: float) -> None:
        if not self._pending_effects.end(event.effect):
            return
        if event.silence:
            lost = self._members.lose_silent(event.server.member, event.incarnation, event.asked_at, now)
            if lost:
                self._declare_lost([lost], now)
            return
        # The server lives, so its backups have lost their connections only.
        for member in self._members.alive(Role.SERVER):
            for job, group, report in self._concerned(member, member.load.broken_replicas):
                if not report.primary and _connected(group, report)[0] == event.server:
                    self._give_up(job, group, report, now)
        self._schedule(now)

    def _job_of_outcome(self, effect: int, ref: JobRef) -> JobMachine | None:
        """Ends an effect, and returns its job, which may have ended; None if the effect was replaced."""
        job = self._jobs.get(ref.name)
        return job if self._pending_effects.end(effect) and job and job.ref == ref else None

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for job in self._jobs.values():
            groups = job.copies.groups
            for it in groups:
                assert all(self._members.incarnation_at(other) for other in it.others), "a copy on a lost server"
            due = {(it.group, it.term) for it in groups if it.is_copied or not it.told}
            told = self._pending_effects.group_terms(job.ref)
            # An effect that fails after its job has ended is not repeated: nobody needs the shards.
            assert told <= due if job.ended else told == due, "a decision that no server is told"


def held_bytes(jobs: Iterable[JobMachine]) -> Counter[str]:
    """Returns the bytes of values placed on each server, with backups; heartbeats would report them later."""
    held: Counter[str] = Counter()
    for job in jobs:
        for shard in job.placement.shards if job.placement else ():
            held[shard.server] += shard.layout.nbytes
        held.update(job.copies.backup_bytes())
    return held


def _saves_on(effect: Effect, server: str) -> bool:
    """Returns whether an effect is a part of a checkpoint that needs a server."""
    match effect:
        case TakeCut():
            return any(it.member == server for it in effect.servers)
        case CommitCheckpoint():
            return any(it.member == server for it in servers_of(effect.placement))
    return False


def _terms(group: GroupCopies) -> set[int]:
    """Returns the terms in which the other copies of a group were begun."""
    return {*group.backup_terms, group.term} if group.growing else {*group.backup_terms}


def _connected(group: GroupCopies, report: BrokenReplica) -> tuple[ServerRef, ServerRef]:
    """Returns the servers that a connection of a group has connected: the one that sends the inputs, and the other."""
    if group.growing and report.term == group.term:
        return group.sender, group.growing
    assert group.backup
    return group.primary, group.backup


def _ref(member: Member) -> ServerRef:
    return ServerRef(member.id, member.registration.address)


__all__ = ["COPIES_AT_A_TIME", "CopyKeeper", "held_bytes"]
