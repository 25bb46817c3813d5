"""Read access to one job, for users, workers, the scheduler and the store. `JobMachine` changes the job.

Each part of a job's state has an owner: `Plan` for what it trains and where, `WorkerGroup` for its workers,
`Accounting` for what was done, `CheckpointCoordinator` for checkpoints and evaluations, `Lifecycle` for its state, and
`Recovery` for restarts. Code outside this package uses only the methods and properties of this module.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Self

from google.protobuf.message import Message

from shoal import errors
from shoal._wire import Placement
from shoal.status import DataAccount, JobState, JobStatus, Progress, SavedCheckpoint, Timings
from shoal_coordinator.job.accounting import Accounting
from shoal_coordinator.job.checkpoints import CheckpointCoordinator
from shoal_coordinator.job.copies import CopyMachine
from shoal_coordinator.job.counters import JobCounters
from shoal_coordinator.job.event_log import EventLog
from shoal_coordinator.job.lifecycle import Lifecycle
from shoal_coordinator.job.owners import Owners
from shoal_coordinator.job.plan import Plan
from shoal_coordinator.job.records import JobRecords
from shoal_coordinator.job.recovery import Recovery
from shoal_coordinator.job.startup import JobStartup
from shoal_coordinator.job.submission import Submission
from shoal_coordinator.job.worker_group import WorkerGroup
from shoal_coordinator.messages import HoldResult, JobRecordKind, JobSnapshot, JoinResult, ProgramDescription, ServerRef


class JobView:
    """The owners of one job's state, and what other packages can read of them.

    Args:
        submission: the job, as its user submitted it.
        now: seconds of Unix time, as in every method.
        changed: called with the name of a record (`messages.record_keys.JobRecordKind`) that was changed or removed.
        checkpoints: whether the cluster has checkpoint storage.
        counters: the cluster's counters, to add to.

    Attributes:
        submission: as given.
        ref: its name and submission number.
        spec: the job specification.
        token: identifies repeats of the same submission.
        log: events for watchers.
        copies: decides about the copies of its shards.
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
        self.submission, self.ref, self.spec = submission, submission.ref, submission.spec
        self._changed, self._counters = changed, counters or JobCounters()
        state_changed = partial(changed, JobRecordKind.STATE)
        self.log = EventLog(lambda number: changed(f"{JobRecordKind.EVENT}/{number}"), state_changed)
        self._lifecycle = Lifecycle(now, self.log, state_changed, self._counters)
        self._plan = Plan(changed, replicated=self.spec.replicas > 1)
        self.copies = CopyMachine(
            submission, self._plan.copies, self._lifecycle, lambda: self._plan.has_values, self._counters
        )
        self._worker_group = WorkerGroup(self.spec, changed)
        self._accounting = Accounting(self.spec, changed)
        self._owners = owners = Owners(self.log, self._lifecycle, self._plan, self._worker_group, self._accounting)
        self._checkpoint_coordinator = CheckpointCoordinator(submission, owners, now, changed, possible=checkpoints)
        self._recovery = Recovery(self.spec, self._checkpoint_coordinator.checkpoints)
        self._startup = JobStartup(submission, owners, self._checkpoint_coordinator, self._recovery, changed)
        self._records = JobRecords(submission, owners, self._checkpoint_coordinator, self._recovery, self.copies)

    # State.

    @property
    def state(self) -> JobState:
        """The job's state."""
        return self._lifecycle.state

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self._lifecycle.ended

    @property
    def started_at(self) -> float:
        """When it first ran, in seconds of Unix time; 0 if never."""
        return self._lifecycle.started_at

    @property
    def finished_at(self) -> float:
        """When it ended, in seconds of Unix time; 0 if it has not."""
        return self._lifecycle.finished_at

    @property
    def all_workers_finished(self) -> bool:
        """Whether all workers have finished and the final checkpoint is taken; stays True afterwards."""
        return self._lifecycle.all_workers_finished

    @property
    def stopping(self) -> str:
        """Why it ends before its data is done; empty if it does not."""
        return self._checkpoint_coordinator.stopping

    def status(self, now: float) -> JobStatus:
        """Returns the status that users see."""
        life, coordinator, group = self._lifecycle, self._checkpoint_coordinator, self._worker_group
        return JobStatus(
            job=self.spec,
            state=life.state,
            reason="; ".join(filter(None, [life.reason, "" if life.ended else group.why_left])),
            submitted_at=life.submitted_at,
            started_at=life.started_at,
            finished_at=life.finished_at,
            workers=group.names,
            progress=self._progress(now),
            checkpoint=coordinator.checkpoints.newest,
            checkpoint_failure=coordinator.checkpoints.failure,
            restarts=self._recovery.restarts,
            evaluation=coordinator.latest,
            best=coordinator.best,
            members=group.members,
            restart_point=self._recovery.restart_point,
            restore_note=self._recovery.restore_note,
            copies=self.copies.complete,
            failovers=self.copies.failovers,
        )

    def data(self) -> DataAccount:
        """Returns the state of its data; empty until the job is described."""
        return self._accounting.account()

    def timings(self) -> Timings:
        """Returns the timings of its latest steps, and the staleness of accepted pushes."""
        return self._accounting.timings()

    def held(self) -> HoldResult:
        """Returns the coordinator's part of a cut: the job's data and progress."""
        return self._accounting.held(self._worker_group.ranks, self._worker_group.reported)

    def conflict(self, worker: str, description: ProgramDescription) -> str:
        """Returns how a worker's description differs from the job's, and what to do; empty if it does not."""
        return self._startup.conflict(worker, description)

    # Shards.

    @property
    def placement(self) -> Placement | None:
        """Where the shards are, or will be; None if they are not placed, or were dropped."""
        return self._plan.placement

    @property
    def placed(self) -> Placement:
        """The placement of shards that are on their servers.

        Raises:
            NotPlaced: the shards are not on servers.
        """
        placement, life = self._plan.created_placement, self._lifecycle
        if placement is None:
            raise errors.NotPlaced(self._recovery.not_placed(life.state, had_values=life.started), job=self.spec.name)
        return placement

    @property
    def created(self) -> bool:
        """Whether the shards are on their servers."""
        return self._plan.created

    @property
    def servers(self) -> tuple[ServerRef, ...]:
        """The servers that serve the shards, or will: the primaries."""
        return self._plan.servers

    @property
    def previous_servers(self) -> tuple[str, ...]:
        """By shard, the server of its last placement."""
        return self._plan.previous_servers

    @property
    def described(self) -> ProgramDescription | None:
        """What the program trains; None until a worker has described it."""
        return self._plan.description

    @property
    def unplaced(self) -> ProgramDescription | None:
        """The description whose variables wait for placement; None if none do."""
        waits = self._plan.placement is None and not self.ended and self._worker_group.active
        return self._plan.description if waits else None

    # Workers.

    @property
    def workers(self) -> Mapping[str, int]:
        """The incarnations of the live workers."""
        return self._worker_group.incarnations

    @property
    def live_workers(self) -> int:
        """The number of live workers."""
        return len(self._worker_group.active)

    @property
    def free_ranks(self) -> list[int]:
        """The ranks that need a worker."""
        is_full = self.ended or self.stopping or self.all_workers_finished
        return [] if is_full else self._worker_group.free(range(self.spec.workers))

    @property
    def free_extra_ranks(self) -> list[int]:
        """The free ranks for extra workers, which may join while the job runs and no worker has finished."""
        is_ending = self._worker_group.finished or self.all_workers_finished or self.stopping
        ranks = range(self.spec.workers, self.spec.most_workers)
        return self._worker_group.free(ranks) if self._lifecycle.running and not is_ending else []

    @property
    def wanted_workers(self) -> int:
        """The number of workers that it could use now, including those that it has; 0 for a session job."""
        if self.ended or self.spec.is_session:
            return 0
        if self._worker_group.finished or self.all_workers_finished or self.stopping:
            return self.live_workers + len(self.free_ranks)
        return self.spec.most_workers

    def has_worker(self, worker: str) -> bool:
        """Returns whether a worker has an assignment in it."""
        return worker in self._worker_group.active

    def assignment_of(self, worker: str) -> int:
        """Returns a worker's assignment; 0 if it has none."""
        member = self._worker_group.active.get(worker)
        return member.assignment if member else 0

    def has_assignment(self, worker: str, assignment: int) -> bool:
        """Returns whether a worker has this assignment in the job."""
        return self._worker_group.has_assignment(worker, assignment)

    def had_worker(self, worker: str) -> bool:
        """Returns whether a worker is the current or the last one of a rank."""
        return worker in self._worker_group.names

    def is_finished(self, worker: str) -> bool:
        """Returns whether a worker has finished."""
        return self._worker_group.is_finished(worker)

    def is_quarantined(self, worker: str, now: float) -> bool:
        """Returns whether a worker must not get an assignment in it now."""
        return self._worker_group.quarantines.has(worker, now)

    @property
    def has_quarantines(self) -> bool:
        """Whether a worker may be quarantined now."""
        return bool(self._worker_group.quarantines)

    def step_limit(self, worker: str, now: float) -> int:
        """Returns the largest step that one of its workers may report; see `WorkerGroup.step_limit`."""
        return self._worker_group.step_limit(worker, self._lifecycle.seconds(now))

    def quarantine_note(self, now: float) -> str:
        """Returns which workers are quarantined and until when; empty if none are."""
        return self._worker_group.quarantines.note(now)

    def joined(self, worker: str) -> JoinResult:
        """Returns the state of a worker's entry; only the job's state if the worker has no assignment."""
        return self._startup.joined(worker)

    def answerable(self, workers: Collection[str]) -> list[str]:
        """Returns those of the workers that need not wait for their entry any longer; see `JobStartup.answerable`."""
        return self._startup.answerable(workers)

    # Checkpoints and recovery.

    @property
    def can_checkpoint(self) -> bool:
        """Whether the cluster has checkpoint storage."""
        return self._checkpoint_coordinator.checkpoints.possible

    @property
    def checkpoint_in_progress(self) -> bool:
        """Whether a checkpoint is in progress."""
        return self._checkpoint_coordinator.checkpoints.busy

    @property
    def awaits_checkpoint(self) -> bool:
        """Whether a checkpoint is in progress, or requested and possible."""
        return self._checkpoint_coordinator.pending

    @property
    def newest_checkpoint(self) -> SavedCheckpoint | None:
        """The newest complete checkpoint; None if there is none."""
        return self._checkpoint_coordinator.checkpoints.newest

    @property
    def best_checkpoint(self) -> int:
        """The number of the checkpoint of the best evaluation; 0 if there is none."""
        return schedule.kept if (schedule := self._checkpoint_coordinator.evaluation_schedule) else 0

    @property
    def checkpoint_failure(self) -> str:
        """Why the latest checkpoint attempt failed; empty if it did not."""
        return self._checkpoint_coordinator.checkpoints.failure

    @property
    def can_restart(self) -> bool:
        """Whether the job restarts when its shards are lost; otherwise it fails."""
        return self._recovery.possible

    @property
    def advice(self) -> str:
        """What its user should do when the job fails because of lost shards; empty if it restarts."""
        return self._recovery.advice

    @property
    def storage_waited_for(self) -> str:
        """What the job needs to read its checkpoints; empty if nothing."""
        return self._recovery.waiting_for

    def waits_for_servers(self, alive: int, now: float, *, expected: bool) -> bool:
        """Returns whether it is too early to place the shards, because more servers may return; see `Recovery`.

        Args:
            alive: number of servers that can take shards.
            now: seconds of Unix time.
            expected: whether a drained server is expected back.
        """
        return self._recovery.waits_for_servers(alive, now, expected=expected)

    def waits_for_storage(self, now: float) -> bool:
        """Returns whether it is too early to read its checkpoints again."""
        return self._recovery.waits_for_storage(now)

    # Stored state.

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
    ) -> Self:
        """Returns a job as an earlier coordinator stored it.

        Args:
            number: number of the submission.
            saved: the job's records.
            now, changed, checkpoints, counters: as for the class.

        Returns:
            The restored job.

        Raises:
            ShoalError, ValueError: the records are invalid.
        """
        submission = Submission.from_proto(number, saved.spec)
        job = cls(submission, now, changed, checkpoints=checkpoints, counters=counters)
        for name in job._records.restore(saved, now):
            changed(name)
        return job

    @property
    def record_names(self) -> Iterator[str]:
        """The names of all records that it may have."""
        return self._records.record_names

    def record(self, name: str) -> Message | None:
        """Returns the record of that name; None if it does not exist."""
        return self._records.record(name)

    def record_later(self, name: str) -> Callable[[], Message | None]:
        """Returns a function that makes the record as it is now, at any time and on any thread."""
        return self._records.record_later(name)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        worker_group, plan = self._worker_group, self._plan
        worker_group.validate()
        assert not (self.ended and worker_group.active), "a job that ended has workers"
        self._lifecycle.validate()
        assert self.state is not JobState.PENDING or not worker_group.active
        plan.validate()
        assert plan.created or not worker_group.entering, "a worker enters before the servers hold the shards"
        self._accounting.validate()
        self._checkpoint_coordinator.validate()
        self._recovery.validate()
        self.copies.validate()
        waits = self.spec.is_session or self.all_workers_finished or worker_group.active or self.free_ranks
        assert waits or not self._lifecycle.running, "a running job has no worker, and none will come"
        assert not (self.all_workers_finished and worker_group.active), "all workers have finished, yet some train"
        self.log.validate()

    def _progress(self, now: float) -> Progress:
        return self._accounting.progress(self._lifecycle.trained_s(now), ended=self.ended)
