"""One job's life, from submission to its end. Pure: no clock, no I/O; what is to be done comes back as effects.

A job begins to run when its `workers` have entered, or `min_workers` of them if no more are idle, so that no barrier is
passed by too few. From then on it goes on with those that are there: who dies or leaves is taken out of the barriers,
another enters in its place, and up to `max_workers` may join. Workers stop by themselves, when the data is out or
`max_steps` are taken, and are not replaced then; the job succeeds when all have.
The workers of a session job come and go as their users please; it succeeds when the last one present finishes, while
the death of the last one leaves it running, for its user to come back to.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from google.protobuf.message import Message

from shoal import errors
from shoal._cursor import Cursor
from shoal._layout import Placement
from shoal.events import LogLine, MetricsReported, StateChanged
from shoal.events import from_proto as event_from_proto
from shoal.job import Job
from shoal.status import DataAccount, JobState, JobStatus, Progress
from shoal.v1 import state_pb2, tensor_pb2
from shoal.variables import Variable
from shoal.variables import from_proto as variable_from_proto
from shoal_coordinator import codecs
from shoal_coordinator.event_log import EventLog
from shoal_coordinator.events import (
    AdmitWorker,
    CreateShards,
    Described,
    DropShards,
    Effect,
    JobDescribed,
    JobRef,
    Joined,
    RemoveWorker,
    ServerRef,
    WorkerReported,
)
from shoal_coordinator.ledger import Lease, Ledger, NoRange, default_range_size
from shoal_coordinator.parts import Description, Participant, Stage
from shoal_coordinator.progress import Tally, told_from_proto
from shoal_coordinator.records import Part, SavedJob


class JobLife:
    """The state machine of one job.

    Args:
        ref: its name and which submission of that name it is.
        spec: what the user asked for.
        now: seconds of Unix time, as in every method.
        token: of the submission, by which a repeat of it is known.
        saved: what an earlier coordinator knew of it; None: it is new.
        changed: told the name of a record (`shoal_coordinator.records`) that is another one now, or gone.
    """

    def __init__(
        self,
        ref: JobRef,
        spec: Job,
        now: float,
        token: str = "",
        saved: SavedJob | None = None,
        changed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.ref, self.spec, self.token = ref, spec, token
        self._changed = changed
        self.log = EventLog(lambda number: changed(f"{Part.EVENT}/{number}"), lambda: changed(Part.STATE))
        self.state = JobState.PENDING
        self.placement: Placement | None = None  # set when the shards are planned; None again when they are dropped
        self.active: dict[str, Participant] = {}  # by worker; empty once the job has ended
        self._reason = ""  # why it failed
        self._lack = ""  # what it waits for
        self._submitted_at, self._started_at, self._finished_at = now, 0.0, 0.0
        self._crew: dict[int, str] = {}  # by rank: who works there, or did until it finished or the job ended
        self._finished: set[int] = set()  # ranks of those that were through; a session's may be taken again
        self._description: Description | None = None
        self._assigner = 0  # assignment of who sends the given values; 0: nobody
        self._assigned = False  # the given values are in place
        self._created = False  # the shards are on the servers
        self._ledger: Ledger | None = None  # None until the job is described
        self._tally = Tally()
        if saved:
            self._restore(saved)
        else:
            changed(Part.SPEC)
            self._enter(JobState.PENDING, "", now)

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
        if self.placement is None or not self._created:
            raise errors.NotPlaced(
                f"the variables of job {self.spec.name} are not on servers; it is {self.state.value}",
                job=self.spec.name,
            )
        return self.placement

    @property
    def servers(self) -> tuple[ServerRef, ...]:
        """Who holds its shards, or is asked to."""
        if self.placement is None:
            return ()
        return tuple(sorted({ServerRef(shard.server, shard.address) for shard in self.placement.shards}))

    @property
    def vacancies(self) -> list[int]:
        """The ranks that wait for a worker."""
        return [] if self.ended else self._free(range(self.spec.workers))

    @property
    def openings(self) -> list[int]:
        """The ranks of extra workers, which may join it while it runs, and as long as nobody is through with it."""
        joinable = self.state is JobState.RUNNING and not self._finished
        return self._free(range(self.spec.workers, self.spec.most_workers)) if joinable else []

    def is_through(self, worker: str) -> bool:
        """Whether a worker has done its part in it. Servers have let go of it, and would not let it in again."""
        return any(self._crew.get(rank) == worker for rank in self._finished)

    def has_part(self, worker: str, assignment: int) -> bool:
        """Whether a worker speaks of the part that it has now, not of one in an earlier job of that name.

        A session has one part in its life, and no number for it.
        """
        participant = self.active.get(worker)
        return participant is not None and (self.spec.is_session or participant.assignment == assignment)

    @property
    def unplaced(self) -> Mapping[str, Variable] | None:
        """The variables that wait for a place on servers; None: none do."""
        if self._description is None or self.placement is not None or self.ended:
            return None
        return self._description.variables

    def status(self, now: float) -> JobStatus:
        """The job as its user sees it."""
        return JobStatus(
            job=self.spec,
            state=self.state,
            reason=self._reason or self._lack,
            submitted_at=self._submitted_at,
            started_at=self._started_at,
            finished_at=self._finished_at,
            workers=tuple(self._crew[rank] for rank in sorted(self._crew)),
            progress=self._progress(now),
        )

    def joined(self, worker: str) -> Joined:
        """How far a worker's entry is; of one that has no part in the job, only what became of the job."""
        participant = self.active.get(worker)
        if participant is None:
            return Joined(self.state, self.spec)
        ready = self.state is JobState.RUNNING and participant.stage is Stage.ADMITTED
        placement = self.placement if self._created else None
        assigns = participant.assignment == self._assigner and not self._assigned
        return Joined(self.state, self.spec, ready, placement, participant.rank, participant.step, assigns)

    # Workers come.

    def wait_for(self, what: str, now: float) -> None:
        """Tells the user what the job lacks, once when that changes; "" is nothing."""
        if what and what != self._lack:
            self._enter(self.state, what, now)
        if what != self._lack:
            self._lack = what
            self._changed(Part.STATE)

    def enrol(self, worker: str, incarnation: int, assignment: int, now: float) -> Participant:
        """Gives a worker the first vacant rank, or else the first that is open to it."""
        participant = Participant(worker, incarnation, (self.vacancies or self.openings)[0], assignment)
        self.active[worker] = participant
        self._crew[participant.rank] = worker
        state = JobState.STARTING if self.state is JobState.PENDING else self.state
        self._enter(state, f"worker {worker} enters as rank {participant.rank}", now)
        return participant

    def describe(self, event: JobDescribed, now: float) -> tuple[Described, list[Effect]]:
        """Takes what a worker says of its program; a second, different description ends the job."""
        participant = self.active[event.worker]
        description = Description(dict(event.variables), event.examples)
        if not description.variables:
            raise errors.InvalidJob(f"the program of job {self.spec.name} has no variables; there is nothing to train")
        if self._description is None:
            self._description = description
            self._ledger = self._new_ledger(event.examples)
            self._changed(Part.PLAN)
            self._changed(Part.LEDGER)
        elif conflict := self._description.conflict(description):
            reason = f"{event.worker} describes the job in another way than its first worker: {conflict}"
            return Described(conflict=reason), self.fail(reason, now)
        participant.described = True
        self._elect_assigner()
        self._changed(Part.STATE)
        return Described(), []

    def place(self, placement: Placement, now: float) -> list[Effect]:
        """Has the shards allocated where they are planned."""
        self.placement = placement
        self._changed(Part.PLAN)
        self._enter(JobState.PLACING, "", now)
        return [CreateShards(self.ref, placement, self.spec)]

    def shards_created(self, now: float) -> None:
        """All servers hold the shards."""
        self._created = True
        self._changed(Part.STATE)
        self._run_when_ready(now)

    def join(self, worker: str, assigned: bool, now: float) -> list[Effect]:
        """Lets a worker in as far as it can go: servers are told of it once they have the shards and it has come."""
        participant = self.active[worker]
        if assigned and participant.assignment == self._assigner and not self._assigned:
            self._assigned = True
            self._changed(Part.STATE)
        if self._created and participant.stage is Stage.ASSIGNED:
            participant.stage = Stage.ENTERING
            self._changed(Part.STATE)
            return [
                AdmitWorker(
                    self.ref, worker, participant.incarnation, participant.rank, participant.assignment, self.servers
                )
            ]
        self._run_when_ready(now)
        return []

    def admitted(self, assignment: int, step: int, now: float) -> None:
        """All servers let a worker in."""
        for participant in self.active.values():
            if participant.assignment == assignment:
                participant.stage, participant.step = Stage.ADMITTED, step
                self._changed(Part.STATE)
        self._run_when_ready(now)

    # They work.

    def lease(self, worker: str, done: int) -> Lease | NoRange:
        """Gives a worker the next range, after marking an earlier one as done."""
        if self._ledger is None or self.state is not JobState.RUNNING:
            return NoRange.WAIT
        if done:
            self._ledger.complete(worker, done)
        return self._ledger.lease(worker, self.active[worker].rank, len(self.active))

    def data(self) -> DataAccount:
        """What became of its data; of a job that was not described yet, nothing is known."""
        return self._ledger.account() if self._ledger else DataAccount()

    def report(self, report: WorkerReported, now: float) -> None:
        """Counts in what a worker did, and shows it to those who watch."""
        participant = self.active[report.worker]
        fresh = report.since(participant.told)
        participant.told = report
        self._tally.add(fresh)
        for line in report.log:
            self.log.append(LogLine(self.log.next, now, report.worker, line))
        if fresh.accepted or fresh.rejected or fresh.dropped:
            values, progress = dict(report.values), self._progress(now)
            self.log.append(MetricsReported(self.log.next, now, report.worker, report.step, values, progress))

    # They go, and the job ends.

    def finish(self, worker: str, error: str, now: float) -> list[Effect]:
        """A worker is through: done, or with an error, which ends the job. Before it runs, sessions may still leave."""
        if error:
            return self.fail(f"worker {worker} failed: {error}", now)
        if self.state is not JobState.RUNNING and self.spec.is_session:
            return self.lose(worker, now)
        if self.state is not JobState.RUNNING:
            return self.fail(f"worker {worker} was through before the job ran; its daemon's log may say why", now)
        rank = self.active[worker].rank
        effects = self._release(worker)
        self._finished.add(rank)
        self._changed(Part.STATE)
        return effects + self._succeed_when_done(now)

    def lose(self, worker: str, now: float, cursor: Cursor | None = None) -> list[Effect]:
        """A worker died or left in the midst of its work; what it held goes to others.

        Args:
            worker: that is gone.
            now: as ever.
            cursor: how far it was in its data, if it could say so.
        """
        participant = self.active[worker]
        effects = self._release(worker, cursor)
        del self._crew[participant.rank]
        self._elect_assigner()
        self._enter(self.state, f"worker {worker} (rank {participant.rank}) is gone", now)
        return effects if self.spec.is_session else effects + self._succeed_when_done(now)

    def fail(self, reason: str, now: float) -> list[Effect]:
        """Ends the job for a reason that its user is told."""
        return self._end(JobState.FAILED, reason, now)

    def cancel(self, now: float) -> list[Effect]:
        """Ends the job because its user wants so."""
        return self._end(JobState.CANCELLED, "", now)

    def drop(self) -> list[Effect]:
        """Frees the variables."""
        servers, self.placement, self._created = self.servers, None, False
        self._changed(Part.PLAN)
        self._changed(Part.STATE)
        return [DropShards(self.ref, servers)] if servers else []

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        ranks = [participant.rank for participant in self.active.values()]
        assert len(set(ranks)) == len(ranks), "two workers share a rank"
        assert all(0 <= rank < self.spec.most_workers for rank in ranks)
        assert all(self._crew[participant.rank] == worker for worker, participant in self.active.items())
        assert not (self.ended and self.active), "a job that ended has workers"
        assert self.ended == bool(self._finished_at) == self.log.ended
        assert not self._created or self.placement is not None
        assert self._started_at or self.state is not JobState.RUNNING
        assert self.state is not JobState.PENDING or not self.active
        admitted = any(participant.stage is not Stage.ASSIGNED for participant in self.active.values())
        assert self._description is None or self._description.variables, "there is nothing to train"
        assert self._created or not admitted, "servers were told of a worker before they had the shards"
        if self._ledger:
            self._ledger.validate()
        self.log.validate()

    def _enter(self, state: JobState, reason: str, now: float) -> None:
        self.state = state
        self._changed(Part.STATE)
        self.log.append(StateChanged(self.log.next, now, state, reason))

    def _new_ledger(self, examples: int) -> Ledger:
        spec = self.spec
        size = spec.range_size or default_range_size(examples, spec.workers, spec.batch_size)
        return Ledger(examples, spec.epochs, size, lambda: self._changed(Part.LEDGER))

    def _free(self, ranks: Iterable[int]) -> list[int]:
        taken = {participant.rank for participant in self.active.values()}
        if not self.spec.is_session:
            taken |= self._finished
        return [rank for rank in ranks if rank not in taken]

    def _run_when_ready(self, now: float) -> None:
        everyone = len(self.active) >= self.spec.fewest_workers and all(
            participant.stage is Stage.ADMITTED for participant in self.active.values()
        )
        given = self._description is not None and self._description.given
        if self.state is JobState.PLACING and self._created and everyone and (self._assigned or not given):
            self._started_at = now
            self._enter(JobState.RUNNING, "", now)

    def _release(self, worker: str, cursor: Cursor | None = None) -> list[Effect]:
        participant = self.active.pop(worker)
        self._changed(Part.TALLY)  # nobody will report again what this one did
        if self._ledger:
            held = self._ledger.held_by(worker)
            known = cursor is not None and held is not None and cursor.lease == held.number
            self._ledger.take_back(worker, cursor.consumed if cursor and known else 0)
        if participant.stage is Stage.ASSIGNED:
            return []
        return [RemoveWorker(self.ref, worker, participant.incarnation, self.servers)]

    def _elect_assigner(self) -> None:
        """Sees to it that one of those that know the given values is to send them, as long as they are not in place."""
        knowing = [participant.assignment for participant in self.active.values() if participant.described]
        given = self._description is not None and self._description.given
        if given and not self._assigned and self._assigner not in knowing:
            self._assigner = min(knowing, default=0)

    def _succeed_when_done(self, now: float) -> list[Effect]:
        """Success needs the last one's word that it is through, or a ledger that says that nothing is left."""
        enough = self.spec.is_session or len(self._finished) >= self.spec.fewest_workers
        through = enough or (self._ledger is not None and self._ledger.finished)
        return self._end(JobState.SUCCEEDED, "", now) if self._finished and not self.active and through else []

    def _end(self, state: JobState, reason: str, now: float) -> list[Effect]:
        if self.ended:
            return []
        # Fenced, so that nothing changes the variables any more and nobody goes on waiting at a barrier.
        effects = [effect for worker in list(self.active) for effect in self._release(worker)]
        self._finished_at, self._reason, self._lack = now, reason, ""
        self._enter(state, reason, now)
        # What never ran has nothing worth keeping.
        return effects if self._started_at else effects + self.drop()

    def _progress(self, now: float) -> Progress:
        ledger = self._ledger
        return self._tally.progress(
            total_samples=ledger.samples if ledger else 0,
            epoch=ledger.epoch if ledger else 0,
            seconds=(self._finished_at or now) - self._started_at if self._started_at else 0.0,
        )

    # What is kept of it.

    @property
    def parts(self) -> Iterator[str]:
        """The names of all records that it may have."""
        yield from (Part.SPEC, Part.PLAN, Part.STATE, Part.LEDGER, Part.TALLY)
        yield from (f"{Part.EVENT}/{number}" for number in self.log.kept)

    def record(self, part: str) -> Message | None:
        """The record of that name as it should be now; None: it should not be there."""
        kind, _, number = part.partition("/")
        match kind:
            case Part.SPEC:
                return state_pb2.SubmissionRecord(spec=self.spec.to_proto(), token=self.token)
            case Part.PLAN:
                return self._plan_record()
            case Part.STATE:
                return self._state_record()
            case Part.LEDGER:
                return self._ledger.to_proto() if self._ledger else None
            case Part.TALLY:
                parts = self.active.values()
                return self._tally.to_proto({part.assignment: part.told for part in parts if part.told})
        event = self.log.find(int(number))
        return codecs.event_message(event) if event else None

    def _plan_record(self) -> state_pb2.PlanRecord | None:
        if self._description is None:
            return None
        record = state_pb2.PlanRecord(
            variables=[variable.to_proto(name) for name, variable in self._description.variables.items()],
            examples=self._description.examples,
            placement=self.placement.to_proto() if self.placement else None,
        )
        if self.placement:
            record.placement.ClearField("variables")
        return record

    def _state_record(self) -> state_pb2.JobRecord:
        return state_pb2.JobRecord(
            state=codecs.state_code(self.state),
            reason=self._reason,
            lack=self._lack,
            submitted_at=self._submitted_at,
            started_at=self._started_at,
            finished_at=self._finished_at,
            parts=[participant.to_proto() for participant in self.active.values()],
            crew=self._crew,
            finished=sorted(self._finished),
            assigner=self._assigner,
            assigned=self._assigned,
            created=self._created,
            numbered=self.log.numbered,
        )

    def _restore(self, saved: SavedJob) -> None:
        state = saved.state
        self.state = JobState.from_proto(state.state)
        self._reason, self._lack = state.reason, state.lack
        self._submitted_at, self._started_at, self._finished_at = (
            state.submitted_at,
            state.started_at,
            state.finished_at,
        )
        self.active = {part.worker: Participant.from_proto(part) for part in state.parts}
        self._crew, self._finished = dict(state.crew), set(state.finished)
        self._assigner, self._assigned, self._created = state.assigner, state.assigned, state.created
        if plan := saved.plan:
            self._restore_plan(plan)
        if saved.ledger:
            self._ledger = Ledger.from_proto(saved.ledger, lambda: self._changed(Part.LEDGER))
        self._tally = Tally.from_proto(saved.tally)
        for participant in self.active.values():
            if participant.assignment in saved.tally.told:
                participant.told = told_from_proto(saved.tally.told[participant.assignment])
        events = [event_from_proto(event) for event in saved.events]
        self.log.restore([event for event in events if isinstance(event, StateChanged)], state.numbered)

    def _restore_plan(self, plan: state_pb2.PlanRecord) -> None:
        variables = dict(variable_from_proto(variable) for variable in plan.variables)
        self._description = Description(variables, plan.examples)
        if plan.HasField("placement"):
            placement = tensor_pb2.Placement()
            placement.CopyFrom(plan.placement)
            placement.variables.extend(plan.variables)
            self.placement = Placement.from_proto(placement)
