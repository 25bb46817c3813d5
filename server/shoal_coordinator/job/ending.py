"""End of one job and of its workers: they finish or are lost, and the job succeeds, fails or is cancelled (no I/O)."""

from collections.abc import Callable

from shoal._wire import Cursor, without_controls
from shoal.status import JobState
from shoal_coordinator.job.checkpoints import CheckpointCoordinator
from shoal_coordinator.job.group_member import Stage
from shoal_coordinator.job.lifecycle import first_line
from shoal_coordinator.job.owners import Owners
from shoal_coordinator.job.startup import JobStartup
from shoal_coordinator.job.submission import Submission
from shoal_coordinator.messages import DropShards, Effect, JobRecordKind, RemoveWorker


class JobEnding:
    """Takes workers out of one job, and ends the job.

    Args:
        submission: the job.
        owners: owners of the job's state, which this class changes.
        checkpoint_coordinator: checkpoint coordinator of the job; takes the final checkpoint.
        startup: startup of the job; notified when a worker is gone.
        changed: called with the name of a record that has changed.
    """

    def __init__(
        self,
        submission: Submission,
        owners: Owners,
        checkpoint_coordinator: CheckpointCoordinator,
        startup: JobStartup,
        changed: Callable[[str], None],
    ) -> None:
        self._ref, self._spec = submission.ref, submission.spec
        self._lifecycle, self._plan = owners.lifecycle, owners.plan
        self._worker_group, self._accounting = owners.worker_group, owners.accounting
        self._checkpoint_coordinator, self._startup = checkpoint_coordinator, startup
        self._changed = changed

    def finish(
        self, worker: str, error: str, now: float, cursor: Cursor | None = None, *, others_go_on: bool = False
    ) -> list[Effect]:
        """Records that a worker has finished. An error fails the job. Before the job runs, a session only leaves.

        Args:
            worker: id of the worker.
            error: its error, or empty.
            now: seconds of Unix time.
            cursor: its position in its data, if known.
            others_go_on: whether a session with an error only leaves, if the job has other sessions.

        Returns:
            The effects.
        """
        if error and others_go_on and self._spec.is_session and len(self._worker_group.active) > 1:
            return self.lose(worker, now, why=f"left: {first_line(error)}")
        if error:
            return self.fail(f"worker {worker} failed: {error}", now)
        if not self._lifecycle.running and self._spec.is_session:
            return self.lose(worker, now)
        if not self._lifecycle.running:
            return self.fail(f"worker {worker} finished before the job ran; its daemon's log may say why", now)
        rank = self._worker_group.active[worker].rank
        effects = self.release(worker, cursor, rank)
        self._worker_group.finish(rank)
        self._changed(JobRecordKind.STATE)  # a call of the worker may wait for its entry
        return effects + self._succeed_when_done(now)

    def lose(self, worker: str, now: float, cursor: Cursor | None = None, why: str = "") -> list[Effect]:
        """Records that a worker died or left before it finished; its range is requeued.

        Args:
            worker: id of the worker.
            now: seconds of Unix time.
            cursor: its position in its data, if known.
            why: what has happened to it. Empty means that it is gone, which users of a session job are told.

        Returns:
            The effects.
        """
        told, why = bool(why) or self._spec.is_session, why or "is gone"
        rank = self._worker_group.active[worker].rank
        effects = self.release(worker, cursor)
        self._worker_group.vacate(rank, f"{worker} {why}" if told else "")
        self._lifecycle.note(f"worker {worker} (rank {rank}) {why}", now)
        self._startup.worker_gone(now)
        return effects if self._spec.is_session else effects + self._succeed_when_done(now)

    def fail(self, reason: str, now: float) -> list[Effect]:
        """Fails the job, for a reason that users see."""
        return self._end(JobState.FAILED, reason, now)

    def cancel(self, now: float, reason: str = "") -> list[Effect]:
        """Cancels the job at its user's request. The first line of the reason counts, without control characters."""
        return self._end(JobState.CANCELLED, without_controls(first_line(reason)), now)

    def drop(self) -> list[Effect]:
        """Frees the shards."""
        servers = self._plan.drop()
        return [DropShards(self._ref, servers)] if servers else []

    def release(self, worker: str, cursor: Cursor | None = None, preferred_rank: int | None = None) -> list[Effect]:
        """Takes a worker out of the job and of its servers; requeues its range.

        Args:
            worker: id of the worker.
            cursor: its position in its data, if known.
            preferred_rank: rank that keeps the range that the worker had, if any.

        Returns:
            The effects.
        """
        member = self._worker_group.release(worker)
        self._checkpoint_coordinator.release(member.assignment)
        self._accounting.release(worker, member.last_report, cursor, preferred_rank)
        if member.stage is Stage.ASSIGNED:
            return []
        return [RemoveWorker(self._ref, worker, member.incarnation, self._plan.servers)]

    def end_when_saved(self, now: float) -> list[Effect]:
        """Ends the job if all workers have finished, and the final checkpoint is complete, failed or impossible."""
        if not self._lifecycle.all_workers_finished or self._checkpoint_coordinator.pending:
            return []
        return self._succeed(now)

    def _succeed_when_done(self, now: float) -> list[Effect]:
        """Ends the job successfully, when every rank has finished or all data is done."""
        all_finished = self._spec.is_session or self._worker_group.finished >= self._spec.fewest_workers
        done = bool(self._worker_group.finished) and (all_finished or self._accounting.finished)
        if self._worker_group.active or not (done or self._checkpoint_coordinator.stopping):
            return []
        self._checkpoint_coordinator.request_last(now)
        if not self._checkpoint_coordinator.pending:
            return self._succeed(now)
        self._lifecycle.close(now)
        return self._checkpoint_coordinator.begin_when_due(now)

    def _succeed(self, now: float) -> list[Effect]:
        failure = self._checkpoint_coordinator.checkpoints.failure if self._lifecycle.all_workers_finished else ""
        untrained = self._accounting.untrained if self._spec.is_session else ""
        lost = "the final evaluation was lost with its worker" if self._checkpoint_coordinator.owes_evaluation else ""
        unsaved = f"its last checkpoint failed: {failure}" if failure else ""
        notes = [self._checkpoint_coordinator.stopping, self._worker_group.unfinished, untrained, lost, unsaved]
        return self._end(JobState.SUCCEEDED, "; ".join(filter(None, notes)), now)

    def _end(self, state: JobState, reason: str, now: float) -> list[Effect]:
        if self._lifecycle.ended:
            return []
        # Workers are fenced, so that the variables change no more and no worker stays in a barrier.
        effects = [effect for worker in list(self._worker_group.active) for effect in self.release(worker)]
        self._changed(JobRecordKind.REPORTS)  # no worker is live
        self._lifecycle.end(state, reason, now)
        # A job that never ran has no values worth keeping.
        return effects if self._lifecycle.started else effects + self.drop()
