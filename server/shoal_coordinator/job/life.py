"""One job's life, from submission to its end. Pure: no clock, no I/O; what is to be done comes back as effects.

A job begins to run when its `workers` have entered, or `min_workers` of them if no more are idle, so that no barrier is
passed by too few. From then on it goes on with those that are there: who dies or leaves is taken out of the barriers,
another enters in its place, and up to `max_workers` may join. Workers stop by themselves, when the data is out or
`max_steps` are taken, and are not replaced then; the job succeeds when all have.
The workers of a session job come and go as their users please; it succeeds when the last one present finishes, while
the death of the last one leaves it running, for its user to come back to.

A job whose shards are lost goes back: to its newest whole checkpoint, or to its beginning if it has none yet; its
workers start anew. A session job fails instead, for its users' programs would not know. `recovery` decides it.

What it trains and where, who works on it, what was done, and which checkpoints and evaluations there are, its parts
know: `plan`, `crew`, `accounting`, `checkpointing`, `evaluating`. How the latter two play together is in `milestones`.
"""

from collections.abc import Callable, Iterator, Mapping

from google.protobuf.message import Message

from shoal import errors
from shoal._wire.cursor import Cursor
from shoal._wire.layout import Placement
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.events import CheckpointEnded, LogLine, MetricsReported, StateChanged
from shoal.events import from_proto as event_from_proto
from shoal.job import Job
from shoal.status import DataAccount, JobState, JobStatus, Progress, SavedCheckpoint, Timings
from shoal.v1 import state_pb2
from shoal.variables import Variable
from shoal_coordinator.job.accounting import Accounting
from shoal_coordinator.job.checkpointing import Checkpointing
from shoal_coordinator.job.crew import Crew
from shoal_coordinator.job.evaluating import Evaluating
from shoal_coordinator.job.event_log import EventLog, Kept
from shoal_coordinator.job.parts import Description, Participant, Stage
from shoal_coordinator.job.plan import Plan
from shoal_coordinator.job.progress import told_from_proto
from shoal_coordinator.job.recovery import Recovery
from shoal_coordinator.job.snapshot import JobSnapshot
from shoal_coordinator.job.tallies import Loss, Tallies
from shoal_coordinator.messages.answers import Described, Joined, Restored
from shoal_coordinator.messages.effects import (
    AdmitWorker,
    CountCheckpoints,
    CreateShards,
    DropShards,
    Effect,
    RemoveWorker,
)
from shoal_coordinator.messages.event_codec import event_message, state_code
from shoal_coordinator.messages.events import JobDescribed, WorkerReported
from shoal_coordinator.messages.leases import Lease, NoRange
from shoal_coordinator.messages.record_keys import Part
from shoal_coordinator.messages.refs import JobRef


class JobLife:
    """The state machine of one job.

    Args:
        ref: its name and which submission of that name it is.
        spec: what the user asked for.
        now: seconds of Unix time, as in every method.
        token: of the submission, by which a repeat of it is known.
        changed: told the name of a record (`messages.record_keys.Part`) that is another one now, or gone.
        checkpoints: whether the cluster has a folder of them.
        tallies: of the cluster, which it adds to.
        begins: False: it is filled with what is known of it (`restored`).
    """

    def __init__(
        self,
        ref: JobRef,
        spec: Job,
        now: float,
        token: str = "",
        changed: Callable[[str], None] = lambda _: None,
        *,
        checkpoints: bool = False,
        tallies: Tallies | None = None,
        begins: bool = True,
    ) -> None:
        self.ref, self.spec, self.token = ref, spec, token
        self._changed, self._tallies = changed, tallies or Tallies()
        self.log = EventLog(lambda number: changed(f"{Part.EVENT}/{number}"), lambda: changed(Part.STATE))
        self.state = JobState.PENDING
        self._reason = ""  # why it failed
        self._lack = ""  # what it waits for
        self._submitted_at, self._started_at, self._finished_at = now, 0.0, 0.0
        self.closing = False  # all workers are through, and the last checkpoint is being taken, or was
        self.plan = Plan(changed)
        self.crew = Crew(spec)  # nobody works there once the job has ended
        self.accounting = Accounting(spec, changed)
        policy = spec.checkpoints or CheckpointPolicy()
        self.checkpoints = Checkpointing(policy, now, lambda: changed(Part.CHECKPOINTS), possible=checkpoints)
        self.recovery = Recovery(spec, self.checkpoints)
        self.evaluating = Evaluating(spec.evaluation, lambda: changed(Part.EVALUATION)) if spec.evaluation else None
        if begins:
            changed(Part.SPEC)
            changed(Part.CHECKPOINTS)
            changed(Part.EVALUATION)
            self._enter(JobState.PENDING, "", now)

    @classmethod
    def restored(
        cls,
        submission: int,
        saved: JobSnapshot,
        now: float,
        changed: Callable[[str], None] = lambda _: None,
        *,
        checkpoints: bool = False,
        tallies: Tallies | None = None,
    ) -> "JobLife":
        """Returns a job as an earlier coordinator knew it.

        Args:
            submission: which it was.
            saved: what is kept of it.
            now, changed, checkpoints, tallies: as for a new job.

        Raises:
            ShoalError, ValueError: what is kept makes no sense.
        """
        spec, token = Job.from_proto(saved.spec.spec), saved.spec.token
        job = cls(
            JobRef(spec.name, submission),
            spec,
            now,
            token,
            changed,
            checkpoints=checkpoints,
            tallies=tallies,
            begins=False,
        )
        job._restore(saved)
        return job

    # What it is like now.

    @property
    def ended(self) -> bool:
        """Whether no other state follows."""
        return self.state.finished

    @property
    def finished_at(self) -> float:
        """When it ended; 0: not yet."""
        return self._finished_at

    @property
    def placed(self) -> Placement:
        """Where the variables are.

        Raises:
            NotPlaced: they are not on servers yet, or no more.
        """
        placement = self.plan.created_placement
        if placement is None:
            raise errors.NotPlaced(
                f"the variables of job {self.spec.name} are not on servers; it is {self.state.value}",
                job=self.spec.name,
            )
        return placement

    @property
    def vacancies(self) -> list[int]:
        """The ranks that wait for a worker."""
        over = self.ended or self.stopping or (self.closing and not self.spec.is_session)
        return [] if over else self.crew.free(range(self.spec.workers))

    @property
    def openings(self) -> list[int]:
        """The ranks of extra workers, which may join it while it runs, and as long as nobody is through with it."""
        joinable = self.state is JobState.RUNNING and not (self.crew.finished or self.closing or self.stopping)
        return self.crew.free(range(self.spec.workers, self.spec.most_workers)) if joinable else []

    @property
    def wanted_workers(self) -> int:
        """How many workers it could use now, those that it has among them; sessions are not the cluster's to send."""
        if self.ended or self.spec.is_session:
            return 0
        if self.crew.finished or self.closing or self.stopping:
            return len(self.crew.active) + len(self.vacancies)
        return self.spec.most_workers

    @property
    def unplaced(self) -> Mapping[str, Variable] | None:
        """The variables that wait for a place on servers; None: none do."""
        plan = self.plan
        if plan.description is None or plan.placement is not None or self.ended or not self.crew.active:
            return None
        return plan.description.variables

    def status(self, now: float) -> JobStatus:
        """The job as its user sees it."""
        return JobStatus(
            job=self.spec,
            state=self.state,
            reason=self._reason or self._lack,
            submitted_at=self._submitted_at,
            started_at=self._started_at,
            finished_at=self._finished_at,
            workers=self.crew.names,
            progress=self._progress(now),
            checkpoint=self.checkpoints.newest,
            checkpoint_failure=self.checkpoints.failure,
            restarts=self.recovery.restarts,
            evaluation=self.evaluating.latest if self.evaluating else None,
            best=self.evaluating.best if self.evaluating else None,
        )

    def joined(self, worker: str) -> Joined:
        """How far a worker's entry is; of one that has no part in the job, only what became of the job."""
        participant = self.crew.active.get(worker)
        if participant is None:
            return Joined(self.state, self.spec)
        ready = self.state is JobState.RUNNING and participant.stage is Stage.ADMITTED
        assigns = participant.assignment == self.crew.assigner and not self.plan.assigned
        restored = self.plan.restored if assigns else frozenset()
        placement, rank, step = self.plan.created_placement, participant.rank, participant.step
        return Joined(self.state, self.spec, ready, placement, rank, step, assigns, restored)

    def wait_for(self, what: str, now: float) -> None:
        """Tells the user what the job lacks, once when that changes; "" is nothing."""
        if what and what != self._lack:
            self._enter(self.state, what, now)
        if what != self._lack:
            self._lack = what
            self._changed(Part.STATE)

    # Workers come.

    def enrol(self, worker: str, incarnation: int, assignment: int, now: float) -> Participant:
        """Gives a worker the first vacant rank, or else the first that is open to it."""
        participant = Participant(worker, incarnation, (self.vacancies or self.openings)[0], assignment)
        self.crew.enrol(participant)
        self.closing = False
        state = JobState.STARTING if self.state is JobState.PENDING else self.state
        self._enter(state, f"worker {worker} enters as rank {participant.rank}", now)
        return participant

    def describe(self, event: JobDescribed, now: float) -> tuple[Described, list[Effect]]:
        """Takes what a worker says of its program; a second, different description ends the job."""
        participant = self.crew.active[event.worker]
        description = Description(dict(event.variables), event.examples)
        if not description.variables:
            raise errors.InvalidJob(f"the program of job {self.spec.name} has no variables; there is nothing to train")
        if self.plan.description is None:
            self.plan.describe(description)
            self.accounting.begin(event.examples)
        elif conflict := self.plan.description.conflict(description):
            reason = f"{event.worker} describes the job in another way than its first worker: {conflict}"
            return Described(conflict=reason), self.fail(reason, now)
        participant.described = True
        if self.plan.lacks_values:
            self.crew.elect_assigner()
        self._changed(Part.STATE)
        return Described(), []

    def place(self, placement: Placement, now: float) -> list[Effect]:
        """Has the shards allocated where they are planned."""
        self.plan.place(placement)
        if self.state is not JobState.PLACING:  # or it tries again, of which there is nothing to tell
            self._enter(JobState.PLACING, "", now)
        return [CreateShards(self.ref, placement, self.spec, self.recovery.sources)]

    def shards_created(self, now: float, restored: Restored | None = None) -> list[Effect]:
        """All servers hold the shards."""
        self.plan.created = True
        self._changed(Part.STATE)
        if restored and (problem := self._go_on_from(restored, now)):
            return self.fail(problem, now)
        self._run_when_ready(now)
        return []

    def join(self, worker: str, assigned: bool, now: float) -> list[Effect]:
        """Lets a worker in as far as it can go: servers are told of it once they have the shards and it has come."""
        part = self.crew.active[worker]
        if assigned and part.assignment == self.crew.assigner and not self.plan.assigned:
            self.plan.assigned = True
            self._changed(Part.STATE)
        if self.plan.created and part.stage is Stage.ASSIGNED:
            part.stage = Stage.ENTERING
            self._changed(Part.STATE)
            return [AdmitWorker(self.ref, worker, part.incarnation, part.rank, part.assignment, self.plan.servers)]
        self._run_when_ready(now)
        return []

    def admitted(self, assignment: int, step: int, now: float) -> None:
        """All servers let a worker in."""
        self.crew.admit(assignment, step)
        self._changed(Part.STATE)
        self._run_when_ready(now)

    # They work.

    def lease(self, worker: str, done: int) -> Lease | NoRange:
        """Gives a worker the next range, after marking an earlier one as done."""
        ledger = self.accounting.ledger
        if ledger is None or self.state is not JobState.RUNNING:
            return NoRange.WAIT
        if done:
            ledger.complete(worker, done)
        if self.stopping:
            return NoRange.FINISHED
        return ledger.lease(worker, self.crew.active[worker].rank, len(self.crew.active))

    def data(self) -> DataAccount:
        """What became of its data; of a job that was not described yet, nothing is known."""
        return self.accounting.account()

    def timings(self) -> Timings:
        """Where the time of its latest steps went, and how stale accepted pushes were."""
        return self.accounting.timings()

    def report(self, report: WorkerReported, now: float) -> None:
        """Counts in what a worker did, and shows it to those who watch."""
        fresh = self.accounting.count(self.crew.active[report.worker], report, now)
        for line in report.log:
            self.log.append(LogLine(self.log.next, now, report.worker, line))
        if fresh.accepted or fresh.rejected or fresh.dropped:
            values, progress = dict(report.values), self._progress(now)
            self.log.append(MetricsReported(self.log.next, now, report.worker, report.step, values, progress))

    # They evaluate, and checkpoints are taken: see `shoal_coordinator.job.milestones`.

    @property
    def stopping(self) -> str:
        """Why it ends before its data is done; empty: it does not."""
        return self.evaluating.stopping if self.evaluating else ""

    def checkpoint_when_due(self, now: float) -> list[Effect]:
        """Begins a checkpoint, if it is time."""
        placed = self.state is JobState.RUNNING and self.plan.placement is not None
        if not placed or not self.checkpoints.due(now, self.crew.step):
            return []
        self.checkpoints.begin(now, self.crew.step)
        return [CountCheckpoints(self.ref)]

    def checkpoint_ended(self, attempt: int, saved: SavedCheckpoint | None, failure: str, now: float) -> None:
        """Tells those who wait for an attempt at a checkpoint what became of it."""
        if saved:
            self.recovery.checkpointed()
            self._changed(Part.STATE)
        seconds = max(0.0, now - self.checkpoints.began_at)
        self.log.append(CheckpointEnded(self.log.next, now, attempt, saved, seconds, failure))

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
        if self.ended or self.plan.placement is None:
            return []
        goes_back, follows = self.recovery.lose(reason, len(self.plan.servers), now + patience_s, announced=announced)
        if not goes_back:
            return self.fail(follows, now) + self.drop()
        self._tallies.restarts[Loss.LEAVING if announced else Loss.LOST] += 1
        for worker in list(self.crew.active):
            self._release(worker)  # what servers know of it goes with the shards
        self.crew.clear()
        self.closing = False
        servers = self.plan.drop()
        self.plan.restart()
        self.accounting.restart()
        if self.checkpoints.pending:  # somebody may wait for it
            self.checkpoint_ended(self.checkpoints.pending_attempt, saved, "" if saved else reason, now)
        self.checkpoints.restart(now, 0)
        if self.evaluating:
            self.evaluating.restart()
        self._enter(JobState.PENDING, follows, now)
        return [DropShards(self.ref, servers)]

    def put_off(self, reason: str, now: float) -> list[Effect]:
        """Its checkpoints cannot be read for now: it is placed again in a while, and till then it holds no memory."""
        self.recovery.put_off(reason, now)
        return self.drop()

    def _go_on_from(self, restored: Restored, now: float) -> str:
        """Takes up where a checkpoint was; what is wrong with that, if anything is."""
        assert self.plan.description is not None
        resumption = self.recovery.resume(restored, self.plan.description, self.accounting.ledger_changed)
        self.plan.assigned, self.plan.restored = self.plan.assigned or resumption.assigned, resumption.given
        if resumption.ledger:
            self.accounting.resume_data(resumption.ledger)
        if resumption.problem:
            return resumption.problem
        self.accounting.resume_figures(restored.tally, of_another=not self._started_at)
        self.checkpoints.restart(now, restored.step)
        self._enter(self.state, resumption.note, now)
        return ""

    # They go, and the job ends.

    def finish(self, worker: str, error: str, now: float) -> list[Effect]:
        """A worker is through: done, or with an error, which ends the job. Before it runs, sessions may still leave."""
        if error:
            return self.fail(f"worker {worker} failed: {error}", now)
        if self.state is not JobState.RUNNING and self.spec.is_session:
            return self.lose(worker, now)
        if self.state is not JobState.RUNNING:
            return self.fail(f"worker {worker} was through before the job ran; its daemon's log may say why", now)
        rank = self.crew.active[worker].rank
        effects = self._release(worker)
        self.crew.finish(rank)
        self._changed(Part.STATE)
        return effects + self._succeed_when_done(now)

    def lose(self, worker: str, now: float, cursor: Cursor | None = None) -> list[Effect]:
        """A worker died or left in the midst of its work; what it held goes to others.

        Args:
            worker: that is gone.
            now: as ever.
            cursor: how far it was in its data, if it could say so.
        """
        participant = self.crew.active[worker]
        effects = self._release(worker, cursor)
        self.crew.vacate(participant.rank)
        if self.plan.lacks_values:
            self.crew.elect_assigner()
        self._enter(self.state, f"worker {worker} (rank {participant.rank}) is gone", now)
        return effects if self.spec.is_session else effects + self._succeed_when_done(now)

    def end_when_saved(self, now: float) -> list[Effect]:
        """Ends a job that is closing, once its last checkpoint is whole or given up, or there is no folder for it."""
        if not self.closing or self.checkpoints.pending:
            return []
        return self._succeed(now)

    def fail(self, reason: str, now: float) -> list[Effect]:
        """Ends the job for a reason that its user is told."""
        return self._end(JobState.FAILED, reason, now)

    def cancel(self, now: float) -> list[Effect]:
        """Ends the job because its user wants so."""
        return self._end(JobState.CANCELLED, "", now)

    def drop(self) -> list[Effect]:
        """Frees the variables."""
        servers = self.plan.drop()
        self._changed(Part.STATE)
        return [DropShards(self.ref, servers)] if servers else []

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        self.crew.validate()
        assert not (self.ended and self.crew.active), "a job that ended has workers"
        assert self.ended == bool(self._finished_at) == self.log.ended
        assert self._started_at or self.state is not JobState.RUNNING
        assert self.state is not JobState.PENDING or not self.crew.active
        self.plan.validate()
        assert self.plan.created or not self.crew.entering, "servers were told of a worker before they had the shards"
        self.accounting.validate()
        self.checkpoints.validate()
        self.recovery.validate()
        if self.evaluating:
            self.evaluating.validate({participant.assignment for participant in self.crew.active.values()})
        waits = self.spec.is_session or self.closing or self.crew.active or self.vacancies
        assert waits or self.state is not JobState.RUNNING, "nobody is there, or will come, to end it"
        assert not (self.closing and self.crew.active), "it closes while workers work"
        self.log.validate()

    # What is kept of it.

    @property
    def parts(self) -> Iterator[str]:
        """The names of all records that it may have."""
        yield from (Part.SPEC, Part.PLAN, Part.STATE, Part.LEDGER, Part.TALLY, Part.CHECKPOINTS, Part.EVALUATION)
        yield from (f"{Part.EVENT}/{number}" for number in self.log.kept)

    def record(self, part: str) -> Message | None:
        """The record of that name as it should be now; None: it should not be there."""
        kind, _, number = part.partition("/")
        match kind:
            case Part.SPEC:
                return state_pb2.SubmissionRecord(spec=self.spec.to_proto(), token=self.token)
            case Part.PLAN:
                return self.plan.to_proto()
            case Part.STATE:
                return self._state_record()
            case Part.LEDGER:
                return self.accounting.ledger.to_proto() if self.accounting.ledger else None
            case Part.TALLY:
                parts = self.crew.active.values()
                return self.accounting.tally.to_proto({part.assignment: part.told for part in parts if part.told})
            case Part.CHECKPOINTS:
                return self.checkpoints.to_proto()
            case Part.EVALUATION:
                return self.evaluating.to_proto() if self.evaluating else None
        event = self.log.find(int(number))
        return event_message(event) if event else None

    def _state_record(self) -> state_pb2.JobRecord:
        record = state_pb2.JobRecord(
            state=state_code(self.state),
            reason=self._reason,
            lack=self._lack,
            submitted_at=self._submitted_at,
            started_at=self._started_at,
            finished_at=self._finished_at,
            numbered=self.log.numbered,
            closing=self.closing,
        )
        self.plan.write_to(record)
        self.crew.write_to(record)
        self.recovery.write_to(record)
        return record

    def _restore(self, saved: JobSnapshot) -> None:
        state = saved.state
        self.state = JobState.from_proto(state.state)
        self._reason, self._lack = state.reason, state.lack
        self._submitted_at, self._started_at, self._finished_at = (
            state.submitted_at,
            state.started_at,
            state.finished_at,
        )
        self.closing = state.closing
        self.plan.take_up(state, saved.plan)
        self.crew.take_up(state)
        self.recovery.take_up(state)
        if saved.checkpoints:
            self.checkpoints.take_up(saved.checkpoints)
        else:  # an earlier Shoal kept none of a job in a cluster without a folder of them
            self._changed(Part.CHECKPOINTS)
        if self.evaluating and saved.evaluation:
            self.evaluating.take_up(saved.evaluation)
        self.accounting.take_up(saved)
        for participant in self.crew.active.values():
            if participant.assignment in saved.tally.told:
                participant.told = told_from_proto(saved.tally.told[participant.assignment])
        events = [event_from_proto(event) for event in saved.events]
        self.log.restore([event for event in events if isinstance(event, Kept)], state.numbered)

    def _enter(self, state: JobState, reason: str, now: float) -> None:
        self.state = state
        self._changed(Part.STATE)
        self.log.append(StateChanged(self.log.next, now, state, reason))

    def _run_when_ready(self, now: float) -> None:
        if self.state is JobState.PLACING and self.plan.created and self.crew.admitted and not self.plan.lacks_values:
            self._started_at = self._started_at or now
            self._enter(JobState.RUNNING, "", now)

    def _release(self, worker: str, cursor: Cursor | None = None) -> list[Effect]:
        participant = self.crew.active.pop(worker)
        if self.evaluating:
            self.evaluating.release(participant.assignment)
        self.accounting.release(worker, cursor)
        if participant.stage is Stage.ASSIGNED:
            return []
        return [RemoveWorker(self.ref, worker, participant.incarnation, self.plan.servers)]

    def _succeed_when_done(self, now: float) -> list[Effect]:
        """Success needs the last one's word that it is through, or a ledger that says that nothing is left."""
        enough = self.spec.is_session or self.crew.finished >= self.spec.fewest_workers
        through = bool(self.crew.finished) and (enough or self.accounting.finished)
        if self.crew.active or not (through or self.stopping):
            return []
        if self.checkpoints.at_end:
            self.checkpoints.request(now)
        if not self.checkpoints.pending:
            return self._succeed(now)
        self.closing = True
        self._enter(self.state, "all workers are through; the last checkpoint is taken", now)
        return self.checkpoint_when_due(now)

    def _succeed(self, now: float) -> list[Effect]:
        failure = self.checkpoints.failure if self.closing else ""
        told = [
            self.stopping,
            "the evaluation at its end was lost with its worker" if self.evaluating and self.evaluating.owes else "",
            f"its last checkpoint failed: {failure}" if failure else "",
        ]
        return self._end(JobState.SUCCEEDED, "; ".join(filter(None, told)), now)

    def _end(self, state: JobState, reason: str, now: float) -> list[Effect]:
        if self.ended:
            return []
        # Fenced, so that nothing changes the variables any more and nobody goes on waiting at a barrier.
        effects = [effect for worker in list(self.crew.active) for effect in self._release(worker)]
        self._finished_at, self._reason, self._lack = now, reason, ""
        self._enter(state, reason, now)
        self._tallies.ended[state] += 1
        # What never ran has nothing worth keeping.
        return effects if self._started_at else effects + self.drop()

    def _progress(self, now: float) -> Progress:
        return self.accounting.progress((self._finished_at or now) - self._started_at if self._started_at else 0.0)
