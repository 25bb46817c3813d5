"""Handling of effect outcomes: what each one means for its job. It also handles every loss of shards (no I/O)."""

from collections.abc import Callable, Iterable
from typing import Any

from shoal import errors
from shoal._wire import Placement
from shoal.status import SavedCheckpoint
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.cluster.pending_effects import PendingEffects
from shoal_coordinator.cluster.shards import CopyKeeper, DrainCoordinator, NormWatch
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import Effect, HoldResult, JobRef, SetLearningRate, events

# The outcomes that name their job.
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
    """Applies the outcomes of pending effects to jobs.

    Args:
        jobs: jobs of the cluster.
        members: members of the cluster.
        pending_effects: pending effects of the cluster. The outcome of an effect that is no longer pending is ignored.
        emit: receives the effects that are decided.
        schedule: runs the scheduler, given the time; called after a change that other jobs may wait for.
        patience_s: after a job lost its shards, seconds that it waits for as many servers as it had before.
        copies: keeps the copies of jobs complete.

    Attributes:
        draining: decides what jobs do about draining servers.
        handlers: the handler of each type of event.
    """

    def __init__(
        self,
        jobs: JobTable,
        members: Membership,
        pending_effects: PendingEffects,
        emit: Callable[[Iterable[Effect]], None],
        schedule: Callable[[float], None],
        patience_s: float,
        copies: CopyKeeper,
    ) -> None:
        self._jobs, self._members, self._pending_effects = jobs, members, pending_effects
        self._emit, self._schedule = emit, schedule
        self._patience_s = patience_s
        self._copies = copies
        self.draining = DrainCoordinator(members, pending_effects, emit, self.lose_shards, copies, jobs)
        self.handlers: dict[type[events.ClusterEvent[Any]], Callable[[Any, float], Any]] = {
            events.ShardsCreated: self._shards_created,
            events.RestoreDeferred: self._restore_deferred,
            events.WorkerAdmitted: self._worker_admitted,
            events.WorkerFenced: self._worker_fenced,
            events.OutcomesReceived: self._outcomes_received,
            events.EffectDone: self._effect_done,
            events.EffectFailed: self._effect_failed,
            events.CheckpointsScanned: self._checkpoints_scanned,
            events.CutHeld: self._cut_held,
            events.CutTaken: self._cut_taken,
            events.CheckpointPublished: self._checkpoint_published,
            events.CheckpointCommitted: self._checkpoint_committed,
            events.CheckpointFailed: self._checkpoint_failed,
            **copies.handlers,
        }

    def sets_learning_rate(self, job: JobRef) -> bool:
        """Returns whether servers may not have the latest learning rate of a job yet."""
        return any(isinstance(it, SetLearningRate) and it.job == job for it in self._pending_effects)

    def lose_server(self, member: Member, now: float) -> None:
        """Handles the loss of a server for each job with shards on it.

        A job with other copies of these shards continues with them. The values of an ended job are lost otherwise.
        """
        for job in list(self._jobs.values()):
            if job.copies.groups and self._copies.fail_over(job, member, now):
                continue
            if not job.placement or all(server.member != member.id for server in job.servers):
                continue
            if job.ended:
                self._emit(job.drop())
                self._jobs.variables_lost(job)
            else:
                lost = f"{_lost_shards(member, job.placement)}{job.advice}"
                self.lose_shards(job, lost, now, announced=member.draining)

    def lose_shards(
        self,
        job: JobMachine,
        reason: str,
        now: float,
        *,
        announced: bool = False,
        saved: SavedCheckpoint | None = None,
    ) -> None:
        """Makes a job restart or fail after it lost its shards. If it restarts, its pending effects are abandoned.

        Args:
            job: the job.
            reason: why the shards are lost.
            now: seconds of Unix time.
            announced: whether the server was draining.
            saved: a checkpoint that contains everything that the lost shards held, or None.
        """
        # Other servers of the job are alive. It waits for those that drain, unless they are not to return.
        servers = [self._members.find(it.member) for it in job.servers]
        returns = not announced or any(it and it.draining and not it.order for it in servers)
        patience_s = self._patience_s if returns else 0.0
        effects = job.lose_shards(reason, patience_s, now, announced=announced, saved=saved)
        self._emit(effects)  # first, because it depends on the effects that are pending
        if not job.ended:
            self._pending_effects.abandon(job.ref)

    def lose_unreachable(self, norm_watch: NormWatch, now: float) -> bool:
        """Makes jobs restart or fail whose servers have not reached each other for too long.

        Args:
            norm_watch: knows the servers that cannot reach each other.
            now: seconds of Unix time.

        Returns:
            Whether what a job waits for has changed.
        """
        changed, overdue = norm_watch.update(), norm_watch.give_up()
        for job, reason in overdue:
            self.lose_shards(job, f"{reason}{job.advice}", now)
        return changed or bool(overdue)

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
        self._admit([event], now)

    def _admit(self, outcomes: Iterable[events.WorkerAdmitted], now: float) -> None:
        """Records admissions of one job together: there may be a thousand, and scheduling takes milliseconds."""
        live = [(job, it) for it in outcomes if (job := self._job_of_outcome(it))]
        if live:
            live[0][0].admitted({it.assignment: it.step for _, it in live}, now)
            self._schedule(now)  # if the job runs now, extra workers may join

    def _outcomes_received(self, event: events.OutcomesReceived, now: float) -> None:
        self._admit([it for it in event.outcomes if isinstance(it, events.WorkerAdmitted)], now)
        for outcome in event.outcomes:
            if not isinstance(outcome, events.WorkerAdmitted):
                self.handlers[type(outcome)](outcome, now)

    def _worker_fenced(self, event: events.WorkerFenced, _: float) -> None:
        if not self._pending_effects.fenced(event.effect, event.committed_steps):
            # Another effect fences the worker on other servers, too, and may find a larger number of steps there.
            raise errors.Cancelled(f"effect {event.effect}, which removes a worker, was dropped")

    def _effect_done(self, event: events.EffectDone, _: float) -> None:
        self._pending_effects.end(event.effect)

    def _effect_failed(self, event: events.EffectFailed, now: float) -> None:
        if job := self._job_of_outcome(event):
            if event.shards_lost:
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
            raise errors.Cancelled(f"job {event.job.name} has ended")
        return job.held()

    def _cut_taken(self, event: events.CutTaken, _: float) -> None:
        if job := self._job_of_outcome(event):
            self._emit(job.cut_taken(event))

    def _checkpoint_published(self, event: events.CheckpointPublished, _: float) -> bool:
        job = self._jobs.find_live(event.job)
        if job is None or self._pending_effects.find(event.effect) is None:
            return False
        job.checkpoint_published(event)
        return True

    def _checkpoint_committed(self, event: events.CheckpointCommitted, now: float) -> None:
        live = self._jobs.find_live(event.job)
        if live and self._pending_effects.find(event.effect) is None:  # abandoned, after older ones were removed
            live.checkpoints_removed(event.removed)
        if job := self._job_of_outcome(event):
            self._emit(job.checkpoint_committed(event, now))
            self.draining.checkpoint_ended(job, now, last=event.last)
            self._schedule(now)

    def _checkpoint_failed(self, event: events.CheckpointFailed, now: float) -> None:
        if self.end_checkpoint(event, now):
            self._schedule(now)

    def end_checkpoint(self, event: events.CheckpointFailed, now: float) -> bool:
        """Ends a checkpoint attempt that has failed, or that cannot go on. The caller runs the scheduler afterwards.

        Returns:
            Whether the attempt was in progress.
        """
        job = self._job_of_outcome(event)
        if job is None:
            return False
        if event.shards_lost and job.can_restart:
            self.lose_shards(job, event.reason, now)
        else:
            self._emit(job.checkpoint_failed(event.reason, now))
            self.draining.checkpoint_ended(job, now, last=False)
        return True

    def _job_of_outcome(self, event: AnyOutcome) -> JobMachine | None:
        """Ends the effect, and returns its live job; None if the job has ended or the effect was abandoned."""
        return self._jobs.find_live(event.job) if self._pending_effects.end(event.effect) else None


def _lost_shards(server: Member, placement: Placement) -> str:
    """Returns why a job has lost shards, after the server that held them was declared lost or has left."""
    numbers = [str(shard.layout.shard) for shard in placement.shards if shard.server == server.id]
    what = f"shard{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
    how = "has left" if server.draining else "is lost"  # as `shoal status` says
    return f"server {server.id} {how}, and with it the last copy of {what}"
