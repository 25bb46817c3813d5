"""The state machine of one job, from submission to its end. Pure: no clock, no I/O; it returns effects.

A job begins to run when its `workers` have entered, so that barriers have enough workers. If fewer workers are idle,
but at least `min_workers`, it begins with these. It then continues with the workers that are present. A worker that
dies or leaves is taken out of the barriers, another takes its rank, and up to `max_workers` may join. Workers stop when
the data is finished or `max_steps` are done, and are then not replaced. The job succeeds when all have finished.

The workers of a session job join and leave as their users decide. The job succeeds when the last one present finishes.
If the last one dies, the job stays running, so that its user can return.

`recovery` decides how a job that loses its shards goes on. It restarts from its newest complete checkpoint, or from the
beginning if it has none, and its workers get new assignments. A session job fails, because users' loops cannot restart.
"""

from collections.abc import Callable, Mapping, Sequence

from shoal._wire import Cursor, EvaluationAck, EvaluationClaim, Lease, NoRange, Placement
from shoal.evaluation_policy import reduces_on_plateau
from shoal.events import LogLine, MetricsReported
from shoal.optim import Schedule
from shoal.status import Evaluation, JobState, SavedCheckpoint
from shoal_coordinator.job.counters import JobCounters, QuarantineReason, RestartReason
from shoal_coordinator.job.ending import JobEnding
from shoal_coordinator.job.group_member import GroupMember
from shoal_coordinator.job.hang_detector import HangDetector
from shoal_coordinator.job.lifecycle import first_line
from shoal_coordinator.job.submission import Submission
from shoal_coordinator.job.view import JobView
from shoal_coordinator.messages import (
    CheckpointCommitted,
    CheckpointPublished,
    CutTaken,
    DescribeResult,
    DropShards,
    Effect,
    JobDescribed,
    JobRecordKind,
    RestoredCheckpoint,
    TakeCheckpointResult,
    WorkerReported,
)


class JobMachine(JobView):
    """The state machine of one job: a `JobView` with the methods that change it; see `begun` and `restored`.

    Args:
        submission, now, changed, checkpoints, counters: as for `JobView`.
    """

    def __init__(
        self,
        submission: Submission,
        now: float,
        changed: Callable[[str], None] = lambda _: None,
        *,
        checkpoints: bool = False,
        counters: JobCounters | None = None,
    ) -> None:
        super().__init__(submission, now, changed, checkpoints=checkpoints, counters=counters)
        coordinator = self._checkpoint_coordinator
        self._ending = JobEnding(submission, self._owners, coordinator, self._startup, changed)
        self._hang_detector = HangDetector(self.spec, self._owners, coordinator)

    @classmethod
    def begun(
        cls,
        submission: Submission,
        now: float,
        changed: Callable[[str], None] = lambda _: None,
        *,
        checkpoints: bool = False,
        counters: JobCounters | None = None,
    ) -> "JobMachine":
        """Returns a newly submitted job.

        Args:
            submission: the job.
            now: seconds of Unix time.
            changed: called with the name of a record that was changed or removed.
            checkpoints: whether the cluster has checkpoint storage.
            counters: the cluster's counters, to add to.

        Returns:
            The job, pending.
        """
        job = cls(submission, now, changed, checkpoints=checkpoints, counters=counters)
        for kind in (JobRecordKind.SPEC, JobRecordKind.CHECKPOINTS, JobRecordKind.EVALUATION):
            changed(kind)
        job._lifecycle.enter(JobState.PENDING, "", now)
        return job

    def wait_for(self, what: str, now: float, words: str = "") -> None:
        """Sets what the job waits for, and logs it when `what` changes; see `Lifecycle.wait_for`."""
        self._lifecycle.wait_for(what, now, words)

    def add_worker(self, worker: str, incarnation: int, assignment: int, now: float) -> GroupMember:
        """Gives a worker the first vacant rank, or else the first rank for extra workers.

        Args:
            worker: id of the worker.
            incarnation: its incarnation.
            assignment: number of the new assignment.
            now: seconds of Unix time.

        Returns:
            The new member of the worker group.
        """
        member = GroupMember(worker, incarnation, (self.free_ranks or self.free_extra_ranks)[0], assignment)
        self._startup.add_worker(member, now)
        return member

    def describe(self, event: JobDescribed, now: float) -> tuple[DescribeResult, list[Effect]]:
        """Records a worker's description of the program; a conflicting second description fails the job."""
        conflict = self._startup.describe(event)
        return DescribeResult(conflict), self.fail(conflict, now) if conflict else []

    def place(self, placement: Placement, now: float) -> list[Effect]:
        """Requests the creation of the shards according to a placement."""
        return self._startup.place(placement, now)

    def shards_created(self, now: float, restored: RestoredCheckpoint | None = None) -> list[Effect]:
        """Records that all servers hold the shards."""
        problem = self._startup.shards_created(now, restored)
        return self.fail(problem, now) if problem else self._startup.admit_waiting()

    def set_learning_rate(self, learning_rate: Schedule) -> list[Effect]:
        """Sets the learning rate of later updates; see `JobStartup.set_learning_rate`."""
        return self._startup.set_learning_rate(learning_rate)

    def join(self, worker: str, assigned: bool, now: float, *, waits: bool = False) -> list[Effect]:
        """Lets a worker enter as far as possible; see `JobStartup.join`."""
        return self._startup.join(worker, assigned, now, waits=waits)

    def admitted(self, steps: Mapping[int, int], now: float) -> None:
        """Records that all servers have admitted workers, by assignment; see `JobStartup.admitted`."""
        self._startup.admitted(steps, now)

    def copied(self, group: int, term: int, now: float) -> list[Effect]:
        """Records that a copy is complete, and begins to run if the job has waited for it.

        Args:
            group: see `CopyMachine.made`.
            term: see `CopyMachine.made`.
            now: seconds of Unix time.

        Returns:
            The effects.
        """
        effects = self.copies.made(group, term, now)
        self._startup.run_when_ready(now)
        return effects

    def lease(self, worker: str, done: int, now: float, samples: int = 0) -> Lease | NoRange:
        """Leases the next range to a worker.

        Args:
            worker: id of the worker.
            done: number of its lease whose range is done; 0 if there is none.
            now: seconds of Unix time.
            samples: samples in one epoch of a session's data; 0 for a worker.

        Returns:
            The lease, or why there is none.

        Raises:
            InvalidJob: another session of the job has another number of samples.
        """
        if self.spec.is_session and self._lifecycle.running:
            self._accounting.use_samples(samples)
        ledger = self._accounting.ledger
        if ledger is None or not self._lifecycle.running:
            return NoRange.WAIT
        self._worker_group.asked(worker, now)
        if done:
            ledger.complete(worker, done)
        if self.stopping:
            return NoRange.FINISHED
        return ledger.lease(worker, self._worker_group.active[worker].rank, self.live_workers)

    def report(self, report: WorkerReported, now: float) -> None:
        """Counts a worker's report, and logs it for watchers."""
        fresh = report.since(self._worker_group.keep_report(report, now))
        self._accounting.count(fresh, now)
        for line in report.log:
            self.log.append(LogLine(self.log.next, now, report.worker, line))
        if fresh.accepted or fresh.rejected or fresh.dropped:
            values, progress = dict(report.values), self._progress(now)
            self.log.append(MetricsReported(self.log.next, now, report.worker, report.step, values, progress))

    # Workers that fail again and again, or hang.

    def quarantine(self, worker: str, why: QuarantineReason, reason: str, now: float) -> list[Effect]:
        """Takes a worker out of the job for a while.

        Args:
            worker: id of the worker.
            why: label of the metric.
            reason: the reason that users see.
            now: seconds of Unix time.

        Returns:
            The effects.
        """
        seconds = self._worker_group.quarantines.add(worker, now)
        self._counters.quarantined[why] += 1
        self._lifecycle.note(f"worker {worker} is quarantined for {seconds:.0f} s: {reason}", now)
        return self.lose(worker, now, why=f"was quarantined: {first_line(reason)}")

    def end_quarantines(self, now: float) -> bool:
        """Ends the quarantines that are over; returns whether there were any."""
        return self._worker_group.quarantines.end(now)

    def hung_workers(self, now: float, interval_s: float = 0.0) -> tuple[list[str], str]:
        """Returns the hung workers, and the reason; see `HangDetector.hung_workers`."""
        return self._hang_detector.hung_workers(now, interval_s)

    def lose_hung(self, worker: str, reason: str, now: float, *, others: bool) -> list[Effect]:
        """Takes out a worker that hangs.

        Args:
            worker: id of the worker.
            reason: the reason that users see.
            now: seconds of Unix time.
            others: whether other workers can do its work, so that it is quarantined if it hangs often.

        Returns:
            The effects.
        """
        self._counters.hung += 1
        if self._worker_group.quarantines.count_hang(worker) and others:
            return self.quarantine(worker, QuarantineReason.HUNG, reason, now)
        self._lifecycle.note(f"worker {worker} is restarted: {reason}", now)
        return self.lose(worker, now)

    def claim_evaluation(self, worker: str, step: int, *, finished_training: bool) -> EvaluationClaim:
        """Gives a worker the evaluation that is due; see `CheckpointCoordinator.claim_evaluation`."""
        return self._checkpoint_coordinator.claim_evaluation(worker, step, finished_training=finished_training)

    def report_evaluation(self, worker: str, result: Evaluation, now: float) -> tuple[EvaluationAck, list[Effect]]:
        """Records a worker's result, and decides what follows. An unusable result fails the job.

        Args:
            worker: id of the worker.
            result: what it found.
            now: seconds of Unix time.

        Returns:
            The reply to the worker, and the effects.
        """
        if problem := self._checkpoint_coordinator.lacks(result):
            return EvaluationAck(stop=True), self.fail(problem, now)
        return self._checkpoint_coordinator.report_evaluation(worker, result, now)

    def request_checkpoint(self, now: float) -> tuple[TakeCheckpointResult, list[Effect]]:
        """Requests a checkpoint, to begin now or after the one in progress; see `CheckpointCoordinator.request`."""
        return self._checkpoint_coordinator.request(now)

    def request_checkpoint_from(self, start: float, now: float) -> list[Effect]:
        """Requests a checkpoint that begins no earlier than `start`."""
        return self._checkpoint_coordinator.request_from(start, now)

    def checkpoint_when_due(self, now: float) -> list[Effect]:
        """Begins a checkpoint if one is due."""
        return self._checkpoint_coordinator.begin_when_due(now)

    def checkpoints_scanned(self, largest: int, *, last: bool = False) -> list[Effect]:
        """Records the largest number in the storage; see `CheckpointCoordinator.scanned`."""
        return self._checkpoint_coordinator.scanned(largest, last=last)

    def cut_taken(self, cut: CutTaken) -> list[Effect]:
        """Records that all servers are writing their shards."""
        return self._checkpoint_coordinator.cut_taken(cut)

    def checkpoint_published(self, event: CheckpointPublished) -> None:
        """Records that the checkpoint in progress can be restored. Its attempt ends with `checkpoint_committed`."""
        self._checkpointed()
        self._checkpoint_coordinator.published(event)

    def checkpoints_removed(self, numbers: Sequence[int]) -> None:
        """Records that the storage no longer has these checkpoints."""
        self._checkpoint_coordinator.removed(numbers)

    def checkpoint_committed(self, event: CheckpointCommitted, now: float) -> list[Effect]:
        """Records that the checkpoint in progress is complete."""
        self._checkpointed()
        return self._checkpoint_coordinator.committed(event, now) + self.end_when_saved(now)

    def checkpoint_failed(self, reason: str, now: float) -> list[Effect]:
        """Records that the checkpoint in progress failed. An important one is tried again."""
        return self._checkpoint_coordinator.failed(reason, now) + self.end_when_saved(now)

    def end_when_saved(self, now: float) -> list[Effect]:
        """Ends the job if all workers have finished, and the final checkpoint is complete, failed or impossible."""
        return self._ending.end_when_saved(now)

    def _checkpointed(self) -> None:
        self._recovery.checkpointed()
        self._changed(JobRecordKind.STATE)
        # If this coordinator dies, and workers do not wait for the next one, this is what is known of their steps.
        self._changed(JobRecordKind.PROGRESS)
        self._changed(JobRecordKind.REPORTS)

    # Loss of shards.

    def lose_shards(
        self,
        reason: str,
        patience_s: float,
        now: float,
        *,
        announced: bool = False,
        saved: SavedCheckpoint | None = None,
    ) -> list[Effect]:
        """Restarts the job, or fails it if it cannot restart.

        Args:
            reason: why the shards are lost.
            patience_s: seconds to wait for as many servers as there were.
            now: seconds of Unix time.
            announced: whether a server with shards of the job was draining.
            saved: a checkpoint with everything that the lost shards held, so that it satisfies all requests.

        Returns:
            The effects.
        """
        if self.ended or self._plan.placement is None:
            return []
        can_restart, explanation = self._recovery.lose(reason, len(self.servers), patience_s, now, announced=announced)
        if not can_restart:
            return self.fail(explanation, now) + self.drop()
        self._counters.count_restart(RestartReason.DRAINING if announced else RestartReason.LOST)
        for worker in list(self._worker_group.active):
            self._ending.release(worker)  # no effects: its state on the servers goes with the shards
        self._worker_group.clear()
        servers = self._plan.drop()
        self._plan.restart(keeps_rate=not reduces_on_plateau(self.spec.evaluation))
        self._accounting.restart()
        if self._checkpoint_coordinator.lose(saved, reason, now):
            self._checkpointed()
        self._lifecycle.rewind(self.newest_checkpoint.time if self.newest_checkpoint else 0.0)
        self._lifecycle.enter(JobState.PENDING, explanation, now)
        return [DropShards(self.ref, servers)]

    def defer_restore(self, reason: str, now: float) -> list[Effect]:
        """Drops the shards until the checkpoint storage can be read; the job is then placed again."""
        self._recovery.defer_restore(reason, now)
        return self.drop()

    # End of workers and of the job.

    def finish(
        self, worker: str, error: str, now: float, cursor: Cursor | None = None, *, others_go_on: bool = False
    ) -> list[Effect]:
        """Records that a worker has finished. An error fails the job; see `JobEnding.finish`."""
        return self._ending.finish(worker, error, now, cursor, others_go_on=others_go_on)

    def lose(self, worker: str, now: float, cursor: Cursor | None = None, why: str = "") -> list[Effect]:
        """Records that a worker died or left before it finished; see `JobEnding.lose`."""
        return self._ending.lose(worker, now, cursor, why)

    def fail(self, reason: str, now: float) -> list[Effect]:
        """Fails the job, for a reason that users see."""
        return self._ending.fail(reason, now)

    def cancel(self, now: float, reason: str = "") -> list[Effect]:
        """Cancels the job at its user's request. The first line of the reason counts."""
        return self._ending.cancel(now, reason)

    def drop(self) -> list[Effect]:
        """Frees the shards."""
        return self._ending.drop()
