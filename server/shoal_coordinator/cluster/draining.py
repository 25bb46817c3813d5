"""Servers that are told to go: their jobs are saved, then go back to that, on servers that stay or come back. Pure.

A job with shards on such a server takes a last checkpoint of them, after which nothing more is committed, and goes back
to it once it is whole. One that fails is tried again, and the job trains on meanwhile, as long as the server waits: it
leaves when no job has to be waited for, or when its grace is over, which is a loss like any other. How long it is
expected back, `membership` knows.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from shoal.status import JobState, SavedCheckpoint
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.cluster.pending_effects import PendingEffects
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import Effect

# From the failure of an attempt to the next: a server waits a minute or so for all of them.
_AGAIN_S = 5.0


class LoseShards(Protocol):
    """Has a job give up its shards, at a time and for a reason, and go back or fail; see `OutcomeHandler.lose_shards`."""

    def __call__(
        self, job: JobMachine, reason: str, now: float, *, announced: bool, saved: SavedCheckpoint | None
    ) -> None: ...


class DrainCoordinator:
    """What jobs do about servers that are going. It keeps nothing: who is going is known of each member.

    Args:
        members: of the cluster.
        pending_effects: effects.
        emit: told what is now to be done.
        lose_shards: what becomes of a job that has to give up its shards.
    """

    def __init__(
        self,
        members: Membership,
        pending_effects: PendingEffects,
        emit: Callable[[Iterable[Effect]], None],
        lose_shards: LoseShards,
    ) -> None:
        self._members, self._pending_effects = members, pending_effects
        self._emit, self._lose_shards = emit, lose_shards

    def of(self, job: JobMachine) -> list[str]:
        """The servers with shards of a job that are going; those that cannot be saved are not waited for."""
        if job.ended or not job.can_checkpoint:
            return []
        return [server.member for server in job.servers if self._members.is_draining(server.member)]

    def begin(self, job: JobMachine, now: float) -> None:
        """One more server is going: its jobs are saved."""
        if not self.of(job):
            return
        if job.spec.is_session and not job.created:  # it cannot go back, and has nothing to go back for
            self._place_again(job, now)
        elif job.state is not JobState.RUNNING:  # nothing was trained since what its shards are made of
            self._restart(job, now)
        elif not job.checkpoint_in_progress and not job.closing:
            self._save(job, now, now)

    def checkpoint_ended(self, job: JobMachine, now: float, *, last: bool) -> None:
        """An attempt at a checkpoint is over; `last`: it is whole, and nothing was committed after it."""
        if not self.of(job) or job.closing:
            return
        if last:
            self._restart(job, now, job.newest_checkpoint)
        elif not job.checkpoint_in_progress:  # it failed, or was under way before the server said anything
            self._save(job, now + _AGAIN_S if job.checkpoint_failure else now, now)

    def validate(self, jobs: Iterable[JobMachine]) -> None:
        """Raises AssertionError if an invariant is broken."""
        for job in jobs:
            assert not self.of(job) or job.awaits_checkpoint, "a server waits for a job that is not being saved"

    def _save(self, job: JobMachine, at: float, now: float) -> None:
        self._emit(job.request_checkpoint_from(at, now))

    def _restart(self, job: JobMachine, now: float, saved: SavedCheckpoint | None = None) -> None:
        self._lose_shards(job, f"{self._why(job)}{job.advice}", now, announced=True, saved=saved)

    def _place_again(self, job: JobMachine, now: float) -> None:
        """Its shards were still being created: those who are in it wait on, and others host it."""
        job.wait_for(f"{self._why(job)}, so its variables get another place", now)
        self._pending_effects.abandon(job.ref)
        self._emit(job.drop())

    def _why(self, job: JobMachine) -> str:
        going = self.of(job)
        who = f"server {going[0]} is" if len(going) == 1 else f"servers {', '.join(going)} are"
        return f"{who} about to leave"


__all__ = ["DrainCoordinator"]
