"""One job's life, from submission to its end. Pure: no clock, no I/O; what is to be done comes back as effects.

A job begins to run when its `workers` have entered, or `min_workers` of them if no more are idle, so that no barrier is
passed by too few. From then on it goes on with those that are there: who dies or leaves is taken out of the barriers,
another enters in its place, and up to `max_workers` may join. Workers stop by themselves, when the data is out or
`max_steps` are taken, and are not replaced then; the job succeeds when all have.
The workers of a session job come and go as their users please; it succeeds when the last one present finishes, while
the death of the last one leaves it running, for its user to come back to.

A job whose shards are lost goes back: to its newest whole checkpoint, or to its beginning if it has none yet; its
workers start anew. A session job fails instead, for its users' programs would not know. `recovery` decides it.

Each method here is something that happens to the job. Its owners (see `view`) take it in; what follows from one of them
for the others, and for the job as a whole, is decided here.
"""

from collections.abc import Callable

from shoal._wire import Cursor, EvaluationAck, EvaluationClaim, Lease, NoRange, Placement
from shoal.events import LogLine, MetricsReported
from shoal.status import Evaluation, JobState, SavedCheckpoint
from shoal_coordinator.job.counters import JobCounters, RestartReason
from shoal_coordinator.job.parts import GroupMember, Stage, Submission
from shoal_coordinator.job.snapshot import JobSnapshot
from shoal_coordinator.job.view import JobView
from shoal_coordinator.messages import (
    CheckpointCommitted,
    CutTaken,
    DescribeResult,
    DropShards,
    Effect,
    JobDescribed,
    JobRecordKind,
    RemoveWorker,
    RestoredCheckpoint,
    TakeCheckpointResult,
    WorkerReported,
)


class JobMachine(JobView):
    """The state machine of one job: a `JobView`, and what happens to it. `begun` and `restored` make it."""

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
        """Returns a job that was submitted now; the arguments are those of `JobView`."""
        job = cls(submission, now, changed, checkpoints=checkpoints, counters=counters)
        for part in (JobRecordKind.SPEC, JobRecordKind.CHECKPOINTS, JobRecordKind.EVALUATION):
            changed(part)
        job._lifecycle.enter(JobState.PENDING, "", now)
        return job

    @classmethod
    def restored(
        cls,
        number: int,
        saved: JobSnapshot,
        now: float,
        changed: Callable[[str], None] = lambda _: None,
        *,
        checkpoints: bool = False,
        counters: JobCounters | None = None,
    ) -> "JobMachine":
        """Returns a job as an earlier coordinator knew it.

        Args:
            number: of the submission.
            saved: what is kept of it.
            now, changed, checkpoints, counters: as for a new job.

        Raises:
            ShoalError, ValueError: what is kept makes no sense.
        """
        submission = Submission.from_proto(number, saved.spec)
        job = cls(submission, now, changed, checkpoints=checkpoints, counters=counters)
        if not job._records.restore(saved):
            changed(JobRecordKind.CHECKPOINTS)
        return job

    def wait_for(self, what: str, now: float) -> None:
        """Tells the user what the job lacks, once when that changes; "" is nothing."""
        self._lifecycle.wait_for(what, now)

    # Workers come.

    def enrol(self, worker: str, incarnation: int, assignment: int, now: float) -> GroupMember:
        """Gives a worker the first vacant rank, or else the first that is open to it."""
        member = GroupMember(worker, incarnation, (self.vacancies or self.openings)[0], assignment)
        self._startup.enrol(member, now)
        return member

    def describe(self, event: JobDescribed, now: float) -> tuple[DescribeResult, list[Effect]]:
        """Takes what a worker says of its program; a second, different description ends the job."""
        conflict = self._startup.describe(event)
        return DescribeResult(conflict), self.fail(conflict, now) if conflict else []

    def place(self, placement: Placement, now: float) -> list[Effect]:
        """Has the shards allocated where they are planned."""
        return self._startup.place(placement, now)

    def shards_created(self, now: float, restored: RestoredCheckpoint | None = None) -> list[Effect]:
        """All servers hold the shards."""
        problem = self._startup.shards_created(now, restored)
        return self.fail(problem, now) if problem else []

    def join(self, worker: str, assigned: bool, now: float) -> list[Effect]:
        """Lets a worker in as far as it can go: servers are told of it once they have the shards and it has come."""
        return self._startup.join(worker, assigned, now)

    def admitted(self, assignment: int, step: int, now: float) -> None:
        """All servers let a worker in."""
        self._startup.admitted(assignment, step, now)

    # They work.

    def lease(self, worker: str, done: int) -> Lease | NoRange:
        """Gives a worker the next range, after marking an earlier one as done."""
        ledger = self._accounting.ledger
        if ledger is None or not self._lifecycle.running:
            return NoRange.WAIT
        if done:
            ledger.complete(worker, done)
        if self.stopping:
            return NoRange.FINISHED
        return ledger.lease(worker, self._worker_group.active[worker].rank, self.staff)

    def report(self, report: WorkerReported, now: float) -> None:
        """Counts in what a worker did, and shows it to those who watch."""
        fresh = report.since(self._worker_group.keep_report(report))
        self._accounting.count(fresh, now)
        for line in report.log:
            self.log.append(LogLine(self.log.next, now, report.worker, line))
        if fresh.accepted or fresh.rejected or fresh.dropped:
            values, progress = dict(report.values), self._progress(now)
            self.log.append(MetricsReported(self.log.next, now, report.worker, report.step, values, progress))

    # They evaluate.

    def claim_evaluation(self, worker: str, step: int, *, through: bool) -> EvaluationClaim:
        """Gives a worker the evaluation that is due at its step, if one is and nobody else has it."""
        return self._checkpoint_coordinator.claim_evaluation(worker, step, through=through)

    def report_evaluation(self, worker: str, result: Evaluation, now: float) -> tuple[EvaluationAck, list[Effect]]:
        """Takes what a worker has found, and says what follows for it; what is of no use ends the job."""
        if problem := self._checkpoint_coordinator.lacks(result):
            return EvaluationAck(stop=True), self.fail(problem, now)
        return self._checkpoint_coordinator.report_evaluation(worker, result, now)

    # Checkpoints are taken, in the order in which they go on.

    def request_checkpoint(self, now: float) -> tuple[TakeCheckpointResult, list[Effect]]:
        """Takes one more, now or when the one under way is over.

        Raises:
            StorageFailed: the cluster has no folder of checkpoints.
            NotPlaced: the job does not run.
        """
        return self._checkpoint_coordinator.request(now)

    def request_checkpoint_from(self, start: float, now: float) -> list[Effect]:
        """Takes one more, which begins at `start` at the earliest."""
        return self._checkpoint_coordinator.request_from(start, now)

    def checkpoint_when_due(self, now: float) -> list[Effect]:
        """Begins a checkpoint, if it is time."""
        return self._checkpoint_coordinator.begin_when_due(now)

    def checkpoints_scanned(self, largest: int, *, last: bool = False) -> list[Effect]:
        """The folder was looked at; `last`: a server is going, so the job goes back to the checkpoint under way."""
        return self._checkpoint_coordinator.scanned(largest, last=last)

    def cut_taken(self, cut: CutTaken) -> list[Effect]:
        """All servers write their part."""
        return self._checkpoint_coordinator.cut_taken(cut)

    def checkpoint_committed(self, event: CheckpointCommitted, now: float) -> list[Effect]:
        """The checkpoint that was under way is whole."""
        self._checkpointed()
        return self._checkpoint_coordinator.committed(event, now) + self.end_when_saved(now)

    def checkpoint_failed(self, reason: str, now: float) -> list[Effect]:
        """The checkpoint that was under way was given up; those that matter the most are tried again."""
        return self._checkpoint_coordinator.failed(reason, now) + self.end_when_saved(now)

    def end_when_saved(self, now: float) -> list[Effect]:
        """Ends a job that is closing, once its last checkpoint is whole or given up, or there is no folder for it."""
        if not self.closing or self._checkpoint_coordinator.pending:
            return []
        return self._succeed(now)

    def _checkpointed(self) -> None:
        self._recovery.checkpointed()
        self._changed(JobRecordKind.STATE)

    # Its shards are lost, and it goes on.

    def lose_shards(
        self,
        reason: str,
        patience_s: float,
        now: float,
        *,
        announced: bool = False,
        saved: SavedCheckpoint | None = None,
    ) -> list[Effect]:
        """Goes back, or fails if it cannot.

        Args:
            reason: why they are lost.
            patience_s: how long to wait for as many servers as there were.
            now: the time.
            announced: a server that has some said before that it was going.
            saved: has all that is lost, and so all that checkpoints that were asked for since would have.
        """
        if self.ended or self._plan.placement is None:
            return []
        can_restart, follows = self._recovery.lose(reason, len(self.servers), now + patience_s, announced=announced)
        if not can_restart:
            return self.fail(follows, now) + self.drop()
        self._counters.count_restart(RestartReason.DRAINING if announced else RestartReason.LOST)
        for worker in list(self._worker_group.active):
            self._release(worker)  # what servers know of it goes with the shards
        self._worker_group.clear()
        self._lifecycle.reopen()
        servers = self._plan.drop()
        self._plan.restart()
        self._accounting.restart()
        if self._checkpoint_coordinator.lose(saved, reason, now):
            self._checkpointed()
        self._lifecycle.enter(JobState.PENDING, follows, now)
        return [DropShards(self.ref, servers)]

    def defer_restore(self, reason: str, now: float) -> list[Effect]:
        """Its checkpoints cannot be read for now: it is placed again in a while, and till then it holds no memory."""
        self._recovery.defer_restore(reason, now)
        return self.drop()

    # They go, and the job ends.

    def finish(self, worker: str, error: str, now: float) -> list[Effect]:
        """A worker is through: done, or with an error, which ends the job. Before it runs, sessions may still leave."""
        if error:
            return self.fail(f"worker {worker} failed: {error}", now)
        if not self._lifecycle.running and self.spec.is_session:
            return self.lose(worker, now)
        if not self._lifecycle.running:
            return self.fail(f"worker {worker} was through before the job ran; its daemon's log may say why", now)
        rank = self._worker_group.active[worker].rank
        effects = self._release(worker)
        self._worker_group.finish(rank)
        self._changed(JobRecordKind.STATE)
        return effects + self._succeed_when_done(now)

    def lose(self, worker: str, now: float, cursor: Cursor | None = None) -> list[Effect]:
        """A worker died or left in the midst of its work; what it held goes to others.

        Args:
            worker: that is gone.
            now: as ever.
            cursor: how far it was in its data, if it could say so.
        """
        rank = self._worker_group.active[worker].rank
        effects = self._release(worker, cursor)
        self._worker_group.vacate(rank)
        self._startup.elect_value_sender()
        self._lifecycle.note(f"worker {worker} (rank {rank}) is gone", now)
        return effects if self.spec.is_session else effects + self._succeed_when_done(now)

    def fail(self, reason: str, now: float) -> list[Effect]:
        """Ends the job for a reason that its user is told."""
        return self._end(JobState.FAILED, reason, now)

    def cancel(self, now: float) -> list[Effect]:
        """Ends the job because its user wants so."""
        return self._end(JobState.CANCELLED, "", now)

    def drop(self) -> list[Effect]:
        """Frees the variables."""
        servers = self._plan.drop()
        return [DropShards(self.ref, servers)] if servers else []

    def _release(self, worker: str, cursor: Cursor | None = None) -> list[Effect]:
        member = self._worker_group.release(worker)
        self._checkpoint_coordinator.release(member.assignment)
        self._accounting.release(worker, cursor)
        if member.stage is Stage.ASSIGNED:
            return []
        return [RemoveWorker(self.ref, worker, member.incarnation, self.servers)]

    def _succeed_when_done(self, now: float) -> list[Effect]:
        """Success needs the last one's word that it is through, or a ledger that says that nothing is left."""
        enough = self.spec.is_session or self._worker_group.finished >= self.spec.fewest_workers
        through = bool(self._worker_group.finished) and (enough or self._accounting.finished)
        if self._worker_group.active or not (through or self.stopping):
            return []
        self._checkpoint_coordinator.request_last(now)
        if not self._checkpoint_coordinator.pending:
            return self._succeed(now)
        self._lifecycle.close(now)
        return self.checkpoint_when_due(now)

    def _succeed(self, now: float) -> list[Effect]:
        failure = self.checkpoint_failure if self.closing else ""
        told = [
            self.stopping,
            "the evaluation at its end was lost with its worker"
            if self._checkpoint_coordinator.owes_evaluation
            else "",
            f"its last checkpoint failed: {failure}" if failure else "",
        ]
        return self._end(JobState.SUCCEEDED, "; ".join(filter(None, told)), now)

    def _end(self, state: JobState, reason: str, now: float) -> list[Effect]:
        if self.ended:
            return []
        # Fenced, so that nothing changes the variables any more and nobody goes on waiting at a barrier.
        effects = [effect for worker in list(self._worker_group.active) for effect in self._release(worker)]
        self._lifecycle.end(state, reason, now)
        # What never ran has nothing worth keeping.
        return effects if self._lifecycle.started else effects + self.drop()
