"""Draining of servers: what their jobs do before the servers leave. Pure.

A job moves off a draining server while it trains. Each of its lock groups there is handed over to its complete backup.
If it has none, or one on a draining server, a copy is made elsewhere before. Backups on a draining server are made
elsewhere, too. Only a few groups move at a time. If a third server can take a copy, the new copy of a replicated group
is complete before the old one ends, so that the group never has fewer than two (docs/decisions/0088).

A job of which a group cannot move, or has not moved in half of the time that the server waits, takes a last checkpoint,
and then restarts from it.
It restarts on other servers, or on the same servers after they have returned. After the cut of the last checkpoint,
the servers commit no more pushes. The job restarts when this checkpoint is complete. If an attempt fails, the job
continues to train, and tries again while the server waits. The server leaves when no job depends on it, or when its
grace period ends. In the second case, the jobs that still depend on it lose their shards, as in a crash. After the
server has left, jobs may wait for its return; `membership` limits this time.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from shoal.status import JobState, Role, SavedCheckpoint
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.cluster.pending_effects import PendingEffects
from shoal_coordinator.cluster.shards.copy_keeper import CopyKeeper
from shoal_coordinator.job import GroupCopies, JobMachine
from shoal_coordinator.messages import DrainOrder, Effect

# Seconds from a failed attempt to the next. A server waits about a minute for all attempts together.
_RETRY_S = 5.0
# The part of the time that a server waits in which jobs may move off it. The rest is for their checkpoints.
_MOVING_PART = 0.5
# The part of that time after which a group is handed over without a wait for its next backup.
_COPYING_PART = 0.75
# Lock groups that a server hands over at the same time. Their calls pause for a moment.
HAND_OVERS_AT_A_TIME = 2


class LoseShards(Protocol):
    """Makes a job give up its shards, and restart or fail; see `OutcomeHandler.lose_shards`."""

    def __call__(
        self, job: JobMachine, reason: str, now: float, *, announced: bool, saved: SavedCheckpoint | None
    ) -> None: ...


class DrainCoordinator:
    """Decides what jobs do about draining servers. It has no state: each member knows whether it is draining.

    Args:
        members: members of the cluster.
        pending_effects: pending effects of the cluster.
        emit: receives the effects that are decided.
        lose_shards: makes a job give up its shards.
        copies: moves copies to other servers.
        jobs: jobs of the cluster.
    """

    def __init__(
        self,
        members: Membership,
        pending_effects: PendingEffects,
        emit: Callable[[Iterable[Effect]], None],
        lose_shards: LoseShards,
        copies: CopyKeeper,
        jobs: JobTable,
    ) -> None:
        self._members, self._pending_effects = members, pending_effects
        self._emit, self._lose_shards = emit, lose_shards
        self._copies, self._jobs = copies, jobs

    def of(self, job: JobMachine) -> list[str]:
        """Returns the draining servers because of which a job is saved; none if the job cannot be saved."""
        if job.ended or not job.can_checkpoint:
            return []
        draining = [it.member for it in job.servers if self._members.is_draining(it.member)]
        return [server for server in draining if not self.moves_off(job, self._members.find(server))]

    def waits_for(self, member: Member, job: JobMachine) -> bool:
        """Returns whether a draining server has to wait for a job, which is saved or moves off it."""
        if member.id in self.of(job):
            return True
        return self.moves_off(job, member) and any(self._has_to_move(job, it, member) for it in job.copies.groups)

    def needs(self, job: JobMachine, member: Member) -> bool:
        """Returns whether a draining server has to stay because of a job that has not ended.

        A server that a user has ordered to drain also stays for a job that can be neither moved nor saved, unless the
        order is forced.
        """
        kept = member.order is not None and not member.order.force
        return self.waits_for(member, job) or (kept and any(it.member == member.id for it in job.servers))

    def moves_off(self, job: JobMachine, member: Member | None) -> bool:
        """Returns whether a job moves off a server while it trains, or would if the server drained."""
        may_move = job.copies.may_move and bool(job.copies.groups) and job.created and not job.ended
        return may_move and member is not None and job.ref not in member.stays_with

    def start(self, member: Member, now: float, order: DrainOrder | None = None) -> None:
        """Starts to drain a server.

        Args:
            member: the server.
            now: seconds of Unix time.
            order: the order of a user; None if the server was asked to stop.
        """
        began = member.draining
        self._members.start_draining(member, order)
        if not began:
            for job in self._jobs.live:
                self.begin(job, now)

    def mark_drained(self) -> None:
        """Records which draining servers no job needs any more."""
        for member in self._draining:
            if not member.drained and not any(self.needs(job, member) for job in self._jobs.live):
                self._members.mark_drained(member)

    def note_wait(self, member: Member, left_s: float | None, now: float) -> None:
        """Records when a server asked to drain, and how long it will wait; later requests change nothing.

        Args:
            member: the server.
            left_s: seconds that it will wait; None: not known.
            now: seconds of Unix time.
        """
        member.drains_since = member.drains_since or now
        if left_s is not None and not member.hands_over_until:
            member.hands_over_until = now + _MOVING_PART * max(0.0, left_s)

    @property
    def moves(self) -> bool:
        """Whether a server is draining, so that `review` may have to decide something later."""
        return bool(self._draining)

    def begin(self, job: JobMachine, now: float) -> None:
        """Starts saving a job, if it cannot move off draining servers, after one more server began to drain."""
        if not self.of(job):
            return
        if job.spec.is_session and not job.created:  # it has no values yet, so it can be placed again
            self._place_again(job, now)
        elif job.state is not JobState.RUNNING:  # it has not trained since its shards were created
            self._restart(job, now)
        elif not job.checkpoint_in_progress and not job.all_workers_finished:
            self._save(job, now, now)

    def review(self, jobs: Iterable[JobMachine], now: float) -> None:
        """Moves jobs off draining servers as far as possible now, and starts saving those that cannot move.

        Args:
            jobs: the jobs that have not ended.
            now: seconds of Unix time.
        """
        draining = self._draining
        if not draining:
            return
        for job in list(jobs):
            for member in draining:
                if self.moves_off(job, member):
                    self._move(job, member, now)
            self.resume(job, now)

    def resume(self, job: JobMachine, now: float) -> None:
        """Starts saving a job after a restart of the coordinator, unless a checkpoint is in progress or requested.

        If the earlier coordinator had no checkpoint storage, it did not save the jobs of draining servers.
        """
        if not job.awaits_checkpoint:
            self.begin(job, now)

    def checkpoint_ended(self, job: JobMachine, now: float, *, last: bool) -> None:
        """Restarts a job from a checkpoint, or tries to save it again.

        Args:
            job: the job whose checkpoint attempt has ended.
            now: seconds of Unix time.
            last: whether the checkpoint is complete and no push was committed after it.
        """
        if last:  # commits may be held; perhaps an earlier coordinator has decided that the job is saved
            for member in self._draining:
                member.stays_with.add(job.ref)
        if not self.of(job) or job.all_workers_finished:
            return
        if last:
            self._restart(job, now, job.newest_checkpoint)
        elif not job.checkpoint_in_progress:  # it failed, or began before the server was asked to drain
            self._save(job, now + _RETRY_S if job.checkpoint_failure else now, now)

    def validate(self, jobs: Iterable[JobMachine]) -> None:
        """Raises AssertionError if an invariant is broken."""
        for job in jobs:
            assert not self.of(job) or job.awaits_checkpoint, "a server waits for a job that is not being saved"

    # Jobs that move.

    @property
    def _draining(self) -> list[Member]:
        return [member for member in self._members.alive(Role.SERVER) if member.draining]

    def _move(self, job: JobMachine, member: Member, now: float) -> None:
        """Moves the copies of a job off a draining server, a few at a time."""
        moving = [it for it in job.copies.groups if self._has_to_move(job, it, member)]
        primaries = [it for it in moving if it.primary.member == member.id]
        served = [it for it in primaries if it.told]
        is_late = bool(member.hands_over_until) and now >= member.hands_over_until
        if (primaries and is_late) or any(self._is_stuck(it, job, member) for it in served):
            member.stays_with.add(job.ref)
            return
        late = self._copies.late(now)  # a server that is stopped would not learn that it is the primary
        for it in served:
            may_begin = not job.checkpoint_in_progress and self._handed_over(member) < HAND_OVERS_AT_A_TIME
            if it.second is None:
                job.copies.move(it.group, "")
            elif it.backup and (it.grown or not self._members.is_draining(it.backup.member)):
                if self._awaits_copy(it, job, member, now):
                    job.copies.move(it.group, "", behind_backup=True)
                elif may_begin and it.backup.member not in late:
                    last = sum(group.primary.member == member.id for group in job.copies.groups) == 1
                    note = f"server {member.id} is about to leave; its shards have moved to other servers"
                    self._copies.hand_over(job, it, note if last else "", now)
        for group in moving:
            now_known = next(it for it in job.copies.groups if it.group == group.group)  # it may be handed over
            self._move_others(job, now_known, member)

    def _awaits_copy(self, group: GroupCopies, job: JobMachine, member: Member, now: float) -> bool:
        """Returns whether a group is only handed over when its backup has made a copy, or is asked to make one."""
        if group.grown or not job.copies.is_replicated:
            return False
        time_s = member.hands_over_until - member.drains_since
        if member.hands_over_until and now >= member.drains_since + _COPYING_PART * time_s:
            return False
        return group.growing is not None or bool(self._targets(job, group, member))

    def _move_others(self, job: JobMachine, group: GroupCopies, member: Member) -> None:
        """Moves the other copies of a group off draining servers."""
        growing, backup = (
            it is not None and self._members.is_draining(it.member) for it in (group.growing, group.backup)
        )
        stays = not self._members.is_draining(group.primary.member)
        if group.backup and group.growing:
            if (growing or (backup and stays and group.behind_backup)) and self._copies.may_release(group):
                self._copies.keep_backup(job, group)
        elif not self._targets(job, group, member):
            pass
        elif backup and job.copies.is_replicated:
            job.copies.move(group.group, "")
        elif (growing or backup) and self._copies.may_release(group):
            self._copies.release(job, group)

    def _has_to_move(self, job: JobMachine, group: GroupCopies, member: Member) -> bool:
        """Returns whether a copy of a group has to leave a server. A backup stays if there is no place for another."""
        if group.second and group.second.member == member.id:
            return bool(self._targets(job, group, member))
        return group.has_copy_on(member.id)

    def _is_stuck(self, group: GroupCopies, job: JobMachine, member: Member) -> bool:
        """Returns whether no server can take over a group of which a server is the primary."""
        if group.second and not self._members.is_draining(group.second.member):
            return False
        return not self._targets(job, group, member)

    def _targets(self, job: JobMachine, group: GroupCopies, member: Member) -> list[Member]:
        """Returns the servers for a copy of a group, without those on which one failed since a server drains."""
        failed = job.copies.failed_on(group.group)
        return [it for it in self._copies.candidates(group) if failed.get(it.id, -1.0) < member.drains_since]

    def _handed_over(self, member: Member) -> int:
        """Returns how many groups a server hands over now."""
        return sum(any(ref.member == member.id for ref in it.former) for it in self._jobs.live_groups)

    # Other jobs.

    def _save(self, job: JobMachine, at: float, now: float) -> None:
        self._emit(job.request_checkpoint_from(at, now))

    def _restart(self, job: JobMachine, now: float, saved: SavedCheckpoint | None = None) -> None:
        self._lose_shards(job, f"{self._why(job)}{job.advice}", now, announced=True, saved=saved)

    def _place_again(self, job: JobMachine, now: float) -> None:
        """Places the shards of a job on other servers while they are still being created; its sessions wait."""
        job.wait_for(f"{self._why(job)}, so its variables are placed again", now)
        self._pending_effects.abandon(job.ref)
        self._emit(job.drop())

    def _why(self, job: JobMachine) -> str:
        draining = self.of(job)
        servers = f"server {draining[0]} is" if len(draining) == 1 else f"servers {', '.join(draining)} are"
        return f"{servers} about to leave"


__all__ = ["DrainCoordinator"]
