"""One job to be read: what its users, its workers, the scheduler and the store learn of it. `JobMachine` changes it.

Each part of a job's state has an owner: `Plan` knows what it trains and where, `WorkerGroup` who works on it, `Accounting`
what was done, `CheckpointCoordinator` its checkpoints and evaluations, `Lifecycle` its state, and `Recovery` what it
goes back to.
Nobody outside of this package asks the owners: what others need has a name here.
"""

from collections.abc import Callable, Iterator, Mapping

from google.protobuf.message import Message

from shoal import errors
from shoal._wire import Placement
from shoal.status import DataAccount, JobState, JobStatus, Progress, SavedCheckpoint, Timings
from shoal.variables import Variable
from shoal_coordinator.job.accounting import Accounting
from shoal_coordinator.job.checkpoint_coordinator import CheckpointCoordinator
from shoal_coordinator.job.counters import JobCounters
from shoal_coordinator.job.event_log import EventLog
from shoal_coordinator.job.lifecycle import Lifecycle
from shoal_coordinator.job.owners import Owners
from shoal_coordinator.job.parts import Submission
from shoal_coordinator.job.plan import Plan
from shoal_coordinator.job.records import JobRecords
from shoal_coordinator.job.recovery import Recovery
from shoal_coordinator.job.startup import JobStartup
from shoal_coordinator.job.worker_group import WorkerGroup
from shoal_coordinator.messages import HoldResult, JobRecordKind, JoinResult, ServerRef


class JobView:
    """The owners of one job's state, and what others may learn of them.

    Args:
        submission: the job, as its user submitted it.
        now: seconds of Unix time, as in every method.
        changed: told the name of a record (`messages.record_keys.JobRecordKind`) that is another one now, or gone.
        checkpoints: whether the cluster has a folder of them.
        counters: of the cluster, which it adds to.

    Attributes:
        log: what happened, for those who watch.
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
        self.ref, self.spec, self.token = submission.ref, submission.spec, submission.token
        self._changed, self._counters = changed, counters or JobCounters()
        self.log = EventLog(lambda number: changed(f"{JobRecordKind.EVENT}/{number}"), self._state_changed)
        self._lifecycle = Lifecycle(now, self.log, self._state_changed, self._counters)
        self._plan = Plan(changed)
        self._worker_group = WorkerGroup(self.spec)  # nobody works there once the job has ended
        self._accounting = Accounting(self.spec, changed)
        owners = Owners(self.log, self._lifecycle, self._plan, self._worker_group, self._accounting)
        self._checkpoint_coordinator = CheckpointCoordinator(submission, owners, now, changed, possible=checkpoints)
        self._recovery = Recovery(self.spec, self._checkpoint_coordinator.checkpoints)
        self._startup = JobStartup(submission, owners, self._checkpoint_coordinator, self._recovery, changed)
        self._records = JobRecords(submission, owners, self._checkpoint_coordinator, self._recovery)

    def _state_changed(self) -> None:
        self._changed(JobRecordKind.STATE)

    # Its state.

    @property
    def state(self) -> JobState:
        """The state."""
        return self._lifecycle.state

    @property
    def ended(self) -> bool:
        """Whether no other state follows."""
        return self._lifecycle.ended

    @property
    def finished_at(self) -> float:
        """When it ended; 0: not yet."""
        return self._lifecycle.finished_at

    @property
    def closing(self) -> bool:
        """Whether all workers are through, and the last checkpoint is being taken, or was."""
        return self._lifecycle.closing

    @property
    def stopping(self) -> str:
        """Why it ends before its data is done; empty: it does not."""
        return self._checkpoint_coordinator.stopping

    def status(self, now: float) -> JobStatus:
        """The job as its user sees it."""
        life, saving = self._lifecycle, self._checkpoint_coordinator
        return JobStatus(
            job=self.spec,
            state=life.state,
            reason=life.reason,
            submitted_at=life.submitted_at,
            started_at=life.started_at,
            finished_at=life.finished_at,
            workers=self._worker_group.names,
            progress=self._progress(now),
            checkpoint=saving.checkpoints.newest,
            checkpoint_failure=saving.checkpoints.failure,
            restarts=self._recovery.restarts,
            evaluation=saving.latest,
            best=saving.best,
        )

    def data(self) -> DataAccount:
        """What became of its data; of a job that was not described yet, nothing is known."""
        return self._accounting.account()

    def timings(self) -> Timings:
        """Where the time of its latest steps went, and how stale accepted pushes were."""
        return self._accounting.timings()

    def held(self) -> HoldResult:
        """The coordinator's part of a cut: the job's data and figures as they are now."""
        return self._accounting.held(self._worker_group.ranks)

    # Its shards.

    @property
    def placement(self) -> Placement | None:
        """Where the shards are, or are to be; None: they have no place, or were dropped."""
        return self._plan.placement

    @property
    def placed(self) -> Placement:
        """Where the variables are.

        Raises:
            NotPlaced: they are not on servers yet, or no more.
        """
        placement = self._plan.created_placement
        if placement is None:
            raise errors.NotPlaced(
                f"the variables of job {self.spec.name} are not on servers; it is {self.state.value}",
                job=self.spec.name,
            )
        return placement

    @property
    def created(self) -> bool:
        """Whether the shards are on their servers."""
        return self._plan.created

    @property
    def servers(self) -> tuple[ServerRef, ...]:
        """Who holds the shards, or is asked to."""
        return self._plan.servers

    @property
    def home(self) -> tuple[str, ...]:
        """By shard, the server that had it when it was placed last."""
        return self._plan.home

    @property
    def unplaced(self) -> Mapping[str, Variable] | None:
        """The variables that wait for a place on servers; None: none do."""
        plan = self._plan
        if plan.description is None or plan.placement is not None or self.ended or not self._worker_group.active:
            return None
        return plan.description.variables

    # Its workers.

    @property
    def workers(self) -> Mapping[str, int]:
        """The live workers' incarnations."""
        return self._worker_group.incarnations

    @property
    def staff(self) -> int:
        """How many workers it has."""
        return len(self._worker_group.active)

    @property
    def vacancies(self) -> list[int]:
        """The ranks that wait for a worker."""
        over = self.ended or self.stopping or (self.closing and not self.spec.is_session)
        return [] if over else self._worker_group.free(range(self.spec.workers))

    @property
    def openings(self) -> list[int]:
        """The ranks of extra workers, which may join it while it runs, and as long as nobody is through with it."""
        joinable = self._lifecycle.running and not (self._worker_group.finished or self.closing or self.stopping)
        return self._worker_group.free(range(self.spec.workers, self.spec.most_workers)) if joinable else []

    @property
    def wanted_workers(self) -> int:
        """How many workers it could use now, those that it has among them; sessions are not the cluster's to send."""
        if self.ended or self.spec.is_session:
            return 0
        if self._worker_group.finished or self.closing or self.stopping:
            return self.staff + len(self.vacancies)
        return self.spec.most_workers

    def employs(self, worker: str) -> bool:
        """Whether a worker has a part in it."""
        return worker in self._worker_group.active

    def assignment_of(self, worker: str) -> int:
        """The number of a worker's part in it; 0: it has none."""
        part = self._worker_group.active.get(worker)
        return part.assignment if part else 0

    def has_part(self, worker: str, assignment: int) -> bool:
        """Whether a worker speaks of the part that it has now, not of one in an earlier job of that name."""
        return self._worker_group.has_part(worker, assignment)

    def is_finished(self, worker: str) -> bool:
        """Whether a worker has done its part."""
        return self._worker_group.is_finished(worker)

    def joined(self, worker: str) -> JoinResult:
        """How far a worker's entry is; of one that has no part in the job, only what became of the job."""
        return self._startup.joined(worker)

    # Its checkpoints, and what it does without its shards.

    @property
    def can_checkpoint(self) -> bool:
        """Whether checkpoints of it can be taken: the cluster has a folder of them."""
        return self._checkpoint_coordinator.checkpoints.possible

    @property
    def checkpoint_in_progress(self) -> bool:
        """Whether a checkpoint is under way."""
        return self._checkpoint_coordinator.checkpoints.busy

    @property
    def awaits_checkpoint(self) -> bool:
        """Whether a checkpoint is under way, or asked for where it can be had."""
        return self._checkpoint_coordinator.pending

    @property
    def newest_checkpoint(self) -> SavedCheckpoint | None:
        """The newest that is whole; None: there is none."""
        return self._checkpoint_coordinator.checkpoints.newest

    @property
    def checkpoint_failure(self) -> str:
        """Why the latest attempt at a checkpoint failed; empty: it did not."""
        return self._checkpoint_coordinator.checkpoints.failure

    @property
    def can_restart(self) -> bool:
        """Whether it goes back when its shards are lost; else it fails."""
        return self._recovery.possible

    @property
    def advice(self) -> str:
        """What its user is told to do when it fails because its shards are lost; empty: it goes back."""
        return self._recovery.advice

    @property
    def storage_waited_for(self) -> str:
        """What is lacking to read its checkpoints; empty: nothing."""
        return self._recovery.waiting_for

    def waits_for_servers(self, alive: int, now: float, *, expected: bool) -> bool:
        """Whether more servers may come back, so that it is too early to place the shards; see `Recovery`."""
        return self._recovery.waits_for_servers(alive, now, expected=expected)

    def waits_for_storage(self, now: float) -> bool:
        """Whether it is too early to read its checkpoints again."""
        return self._recovery.waits_for_storage(now)

    # What is kept of it.

    @property
    def parts(self) -> Iterator[str]:
        """The names of all records that it may have."""
        return self._records.parts

    def record(self, part: str) -> Message | None:
        """The record of that name as it should be now; None: it should not be there."""
        return self._records.record(part)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        worker_group, plan = self._worker_group, self._plan
        worker_group.validate()
        assert not (self.ended and worker_group.active), "a job that ended has workers"
        self._lifecycle.validate()
        assert self.state is not JobState.PENDING or not worker_group.active
        plan.validate()
        assert plan.created or not worker_group.entering, "servers were told of a worker before they had the shards"
        self._accounting.validate()
        self._checkpoint_coordinator.validate()
        self._recovery.validate()
        waits = self.spec.is_session or self.closing or worker_group.active or self.vacancies
        assert waits or not self._lifecycle.running, "nobody is there, or will come, to end it"
        assert not (self.closing and worker_group.active), "it closes while workers work"
        self.log.validate()

    def _progress(self, now: float) -> Progress:
        return self._accounting.progress(self._lifecycle.seconds(now))
