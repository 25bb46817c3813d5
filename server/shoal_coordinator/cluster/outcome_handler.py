"""What became of effects, and what follows for their jobs; also from a loss of shards, however it was noticed. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

from shoal import errors
from shoal.status import SavedCheckpoint
from shoal_coordinator.cluster.draining import DrainCoordinator
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.cluster.pending_effects import PendingEffects
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import Effect, HoldResult, events

# Outcomes that say of which job they are.
AnyOutcome = (
    events.ShardsCreated
    | events.WorkerAdmitted
    | events.EffectFailed
    | events.CheckpointsScanned
    | events.RestoreDeferred
    | events.CutTaken
    | events.CheckpointCommitted
    | events.CheckpointFailed
)


class OutcomeHandler:
    """Takes in what was done, of what is outstanding.

    Args:
        jobs: of the cluster.
        members: of the cluster.
        pending_effects: effects; what becomes of one that was given up is of no interest.
        emit: told what is now to be done.
        schedule: called with the time when something has changed by which others may get on.
        patience_s: how long a job that lost its shards waits for as many servers as it had.

    Attributes:
        draining: what jobs do about servers that are going.
    """

    def __init__(
        self,
        jobs: JobTable,
        members: Membership,
        pending_effects: PendingEffects,
        emit: Callable[[Iterable[Effect]], None],
        schedule: Callable[[float], None],
        patience_s: float,
    ) -> None:
        self._jobs, self._pending_effects = jobs, pending_effects
        self._emit, self._schedule = emit, schedule
        self._patience_s = patience_s
        self.draining = DrainCoordinator(members, pending_effects, emit, self.lose_shards)
        self.handlers: dict[type[events.ClusterEvent[Any]], Callable[[Any, float], Any]] = {
            events.ShardsCreated: self._shards_created,
            events.RestoreDeferred: self._restore_deferred,
            events.WorkerAdmitted: self._worker_admitted,
            events.WorkerFenced: self._worker_fenced,
            events.EffectDone: self._effect_done,
            events.EffectFailed: self._effect_failed,
            events.CheckpointsScanned: self._checkpoints_scanned,
            events.CutHeld: self._cut_held,
            events.CutTaken: self._cut_taken,
            events.CheckpointCommitted: self._checkpoint_committed,
            events.CheckpointFailed: self._checkpoint_failed,
        }

    def lose_shards(
        self,
        job: JobMachine,
        reason: str,
        now: float,
        *,
        announced: bool = False,
        saved: SavedCheckpoint | None = None,
    ) -> None:
        """Has a job go back, or fail; what was still to be done for it is given up if it goes on.

        Args:
            job: whose.
            reason: why.
            now: the time.
            announced: a server has said before that it was going.
            saved: has all that is lost, if anything does.
        """
        effects = job.lose_shards(reason, self._patience_s, now, announced=announced, saved=saved)
        if not job.ended:
            self._pending_effects.abandon(job.ref)
        self._emit(effects)

    # Shards and workers.

    def _shards_created(self, event: events.ShardsCreated, now: float) -> None:
        if job := self._job_of_outcome(event):
            self._emit(job.shards_created(now, event.restored))
            self._schedule(now)

    def _restore_deferred(self, event: events.RestoreDeferred, now: float) -> None:
        if job := self._job_of_outcome(event):
            self._emit(job.defer_restore(event.reason, now))
            self._schedule(now)

    def _worker_admitted(self, event: events.WorkerAdmitted, now: float) -> None:
        if job := self._job_of_outcome(event):
            job.admitted(event.assignment, event.step, now)
            self._schedule(now)  # if it runs now, extra workers may join

    def _worker_fenced(self, event: events.WorkerFenced, _: float) -> None:
        self._pending_effects.fenced(event.effect, event.committed_steps)

    def _effect_done(self, event: events.EffectDone, _: float) -> None:
        self._pending_effects.end(event.effect)

    def _effect_failed(self, event: events.EffectFailed, now: float) -> None:
        if job := self._job_of_outcome(event):
            if event.lost:
                self.lose_shards(job, event.reason, now)
            else:
                self._emit(job.fail(event.reason, now))
            self._schedule(now)

    # Checkpoints.

    def _checkpoints_scanned(self, event: events.CheckpointsScanned, _: float) -> None:
        if job := self._job_of_outcome(event):
            self._emit(job.checkpoints_scanned(event.largest, last=bool(self.draining.of(job))))

    def _cut_held(self, event: events.CutHeld, _: float) -> HoldResult:
        job = self._jobs.find_live(event.job)
        if job is None:
            raise errors.Cancelled(f"job {event.job.name} is over")
        return job.held()

    def _cut_taken(self, event: events.CutTaken, _: float) -> None:
        if job := self._job_of_outcome(event):
            self._emit(job.cut_taken(event))

    def _checkpoint_committed(self, event: events.CheckpointCommitted, now: float) -> None:
        if job := self._job_of_outcome(event):
            self._emit(job.checkpoint_committed(event, now))
            self.draining.checkpoint_ended(job, now, last=event.last)
            self._schedule(now)

    def _checkpoint_failed(self, event: events.CheckpointFailed, now: float) -> None:
        if job := self._job_of_outcome(event):
            if event.lost and job.can_restart:
                self.lose_shards(job, event.reason, now)
            else:
                self._emit(job.checkpoint_failed(event.reason, now))
                self.draining.checkpoint_ended(job, now, last=False)
            self._schedule(now)

    def _job_of_outcome(self, event: AnyOutcome) -> JobMachine | None:
        """The live job that an effect was for; None: there is none any more, or the effect was given up."""
        return self._jobs.find_live(event.job) if self._pending_effects.end(event.effect) else None
