"""Draining of servers: each of their jobs takes a last checkpoint, and then restarts from it. Pure.

A job that has complete backups of all its shards on a draining server continues with these instead.

A job restarts on other servers, or on the same servers after they have returned. After the cut of the last checkpoint,
the servers commit no more pushes. The job restarts when this checkpoint is complete. If an attempt fails, the job
continues to train, and tries again while the server waits. The server leaves when no job depends on it, or when its
grace period ends. In the second case, the jobs that still depend on it lose their shards, as in a crash. After the
server has left, jobs may wait for its return; `membership` limits this time.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from shoal.status import JobState, Role, SavedCheckpoint
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.cluster.pending_effects import PendingEffects
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import Effect

# Seconds from a failed attempt to the next. A server waits about a minute for all attempts together.
_RETRY_S = 5.0


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
        fail_over: lets a job continue without a server, with the backups of the shards there; returns whether it does.
    """

    def __init__(
        self,
        members: Membership,
        pending_effects: PendingEffects,
        emit: Callable[[Iterable[Effect]], None],
        lose_shards: LoseShards,
        fail_over: Callable[[JobMachine, Member, float], bool],
    ) -> None:
        self._members, self._pending_effects = members, pending_effects
        self._emit, self._lose_shards, self._fail_over = emit, lose_shards, fail_over

    def of(self, job: JobMachine) -> list[str]:
        """Returns the draining servers that hold shards of a job; none if the job cannot be saved."""
        if job.ended or not job.can_checkpoint:
            return []
        return [server.member for server in job.servers if self._members.is_draining(server.member)]

    def begin(self, job: JobMachine, now: float) -> None:
        """Moves a job off draining servers, or starts saving it, after one more server began to drain."""
        if job.copies.groups:
            for server in self._members.alive(Role.SERVER):
                if server.draining:
                    self._fail_over(job, server, now)
        if not self.of(job):
            return
        if job.spec.is_session and not job.created:  # it has no values yet, so it can be placed again
            self._place_again(job, now)
        elif job.state is not JobState.RUNNING:  # it has not trained since its shards were created
            self._restart(job, now)
        elif not job.checkpoint_in_progress and not job.all_workers_finished:
            self._save(job, now, now)

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
