"""The worker group of one job: its live workers, their ranks, and the ranks that have finished (no I/O)."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from shoal._wire import PushCounts
from shoal._wire.limits import MAX_LEAD, MAX_STEPS_PER_S
from shoal.job import Job
from shoal.status import JobMember
from shoal.v1 import state_pb2
from shoal_coordinator.job.group_member import GroupMember, Stage
from shoal_coordinator.job.quarantines import Quarantines
from shoal_coordinator.messages import JobRecordKind, WorkerReported, record_keys

# Maximum number of ranks whose last workers a status names.
_MAX_NAMED = 10


class WorkerGroup:
    """The workers of one job.

    Args:
        spec: the job, as its user submitted it.
        changed: called with the name of a record that has changed.

    Attributes:
        active: the live members, by worker; empty once the job has ended. Only methods of this class change it.
        departed: by free rank, what has happened to its last worker: its id, a space, and the reason. In a job of
            workers only those that were quarantined.
        quarantines: the workers that get no assignment for a while.
    """

    def __init__(self, spec: Job, changed: Callable[[str], None] = lambda _: None) -> None:
        self._spec, self._changed = spec, changed
        self.active: dict[str, GroupMember] = {}
        # The live members again, and their number in each stage: a decision about one of a thousand must not visit all.
        self._by_assignment: dict[int, GroupMember] = {}
        self._stages: Counter[Stage] = Counter()
        # The members that have asked to enter, and that no server has been asked to admit. Not stored: a worker repeats
        # its call to the next coordinator.
        self._waiting: dict[str, GroupMember] = {}
        self.departed: dict[int, str] = {}
        self._names: dict[int, str] = {}  # by rank: its worker; kept when the worker finishes or the job ends
        self._finished: set[int] = set()  # ranks whose worker has finished
        self._finished_names: set[str] | None = None  # their workers; None: to be computed
        self._value_sender = 0  # assignment of the worker that sends the given values; 0: none
        self.quarantines = Quarantines()
        # The value of `step`, because each report asks for it; None: to be computed.
        self._furthest: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The current or last worker of each rank, in order of rank."""
        return tuple(self._names[rank] for rank in sorted(self._names))

    @property
    def unfinished(self) -> str:
        """The ranks whose sessions did not finish, in words; empty if there are none."""
        ranks = sorted(self.departed.items()) if self._spec.is_session else ()
        return "; ".join(f"rank {rank} did not finish: {why}" for rank, why in ranks)

    @property
    def why_left(self) -> str:
        """What has happened to the last workers of free ranks, in words; empty if nothing has."""
        told = [f"rank {rank}: {why}" for rank, why in sorted(self.departed.items())]
        left = len(told) - _MAX_NAMED
        return "; ".join([*told[:_MAX_NAMED], *([f"and {left} more ranks"] if left > 0 else [])])

    @property
    def members(self) -> tuple[JobMember, ...]:
        """The current or last worker of each rank, as users see it."""
        members = {rank: JobMember(worker, rank, "finished") for rank, worker in self._names.items()}
        for rank, departure in self.departed.items():
            worker, _, reason = departure.partition(" ")
            members[rank] = JobMember(worker, rank, "left", reason=reason)
        for it in self.active.values():
            members[it.rank] = JobMember(it.worker, it.rank, "present", it.current_step)
        return tuple(members[rank] for rank in sorted(members))

    @property
    def finished(self) -> int:
        """The number of ranks that have finished."""
        return len(self._finished)

    @property
    def ranks(self) -> dict[str, int]:
        """The ranks of the live workers."""
        return {worker: member.rank for worker, member in self.active.items()}

    @property
    def reported(self) -> dict[str, PushCounts]:
        """The pushes that the live workers have reported."""
        reports = ((worker, member, member.last_report) for worker, member in self.active.items())
        return {
            worker: PushCounts(member.incarnation, *((report.accepted, report.samples) if report else ()))
            for worker, member, report in reports
        }

    @property
    def assignments(self) -> set[int]:
        """The assignments of the live workers."""
        return set(self._by_assignment)

    @property
    def last_reports(self) -> dict[int, WorkerReported]:
        """By assignment, the last report of each live worker that has reported."""
        return {part.assignment: part.last_report for part in self.active.values() if part.last_report}

    @property
    def incarnations(self) -> dict[str, int]:
        """The incarnations of the live workers."""
        return {worker: member.incarnation for worker, member in self.active.items()}

    @property
    def step(self) -> int:
        """The step of the fastest worker, by the workers' reports."""
        if self._furthest is None:
            reports = [member.last_report for member in self.active.values()]
            self._furthest = max((report.step for report in reports if report), default=0)
        return self._furthest

    @property
    def value_sender(self) -> int:
        """The assignment of the worker that sends the given values; 0 if none."""
        return self._value_sender

    @property
    def entering(self) -> bool:
        """Whether servers have been asked to admit any worker."""
        return self._stages[Stage.ASSIGNED] < len(self.active)

    @property
    def admitted(self) -> bool:
        """Whether enough workers are present for the job to run, and all of them may pull and push."""
        return self._spec.fewest_workers <= len(self.active) == self._stages[Stage.ADMITTED]

    def free(self, ranks: Iterable[int]) -> list[int]:
        """Returns those of the ranks that a worker can take."""
        # A rank has a name while a worker has it, or has finished with it. A thousand workers' entries need no set.
        taken = {member.rank for member in self.active.values()} if self._spec.is_session else self._names
        return [rank for rank in ranks if rank not in taken]

    def is_finished(self, worker: str) -> bool:
        """Returns whether a worker has finished. Servers have released it, and would not admit it again."""
        if self._finished_names is None:  # asked for each idle worker, whenever workers are assigned
            self._finished_names = {self._names[rank] for rank in self._finished}
        return worker in self._finished_names

    def asked(self, worker: str, now: float) -> None:
        """Records that a worker has asked for data, so its trainer does not hang."""
        self.active[worker].asked_at = now

    def restart_watch(self, now: float) -> None:
        """Treats all workers as if they had just made a step, so that the time until now does not count as a stall."""
        for member in self.active.values():
            member.stepped_at = now

    def stalled_s(self, now: float) -> float:
        """Returns the seconds since any worker that trains made a step; 0 if none trains."""
        steps = [member.stepped_at for member in self.active.values() if member.stage is Stage.ADMITTED]
        return now - max(steps) if steps else 0.0

    def lagging(self, asked_since: float) -> list[str]:
        """Returns the workers behind the fastest one that have not asked for data since `asked_since`."""
        training = [member for member in self.active.values() if member.stage is Stage.ADMITTED]
        furthest = max((member.current_step for member in training), default=0)
        return [it.worker for it in training if it.current_step < furthest and it.asked_at < asked_since]

    def has_assignment(self, worker: str, assignment: int) -> bool:
        """Returns whether a worker has this assignment in the job.

        A session has one assignment in its life, and does not send its number.
        """
        member = self.active.get(worker)
        return member is not None and (self._spec.is_session or member.assignment == assignment)

    def add(self, member: GroupMember) -> None:
        """Adds a member at a free rank."""
        self._keep(member)
        self._names[member.rank] = member.worker
        self.departed.pop(member.rank, None)
        self._unfinish(member.rank)  # a session can take the rank of one that has finished
        self._rank_changed(member.rank)

    @property
    def waiting(self) -> list[GroupMember]:
        """The members that have asked to enter, and that no server has been asked to admit, by assignment."""
        return sorted(self._waiting.values(), key=_assignment)

    def ask_entry(self, worker: str) -> None:
        """Records that a worker has asked to enter."""
        self._waiting[worker] = self.active[worker]

    def begin_entry(self, worker: str) -> None:
        """Records that servers have been asked to admit a worker."""
        self._waiting.pop(worker, None)
        self._enter(self.active[worker], Stage.ENTERING)

    def describe(self, worker: str) -> None:
        """Records that a worker has loaded the program and the given values."""
        member = self.active[worker]
        if not member.described:
            member.described = True
            self._rank_changed(member.rank)

    def admit(self, steps: Mapping[int, int], now: float) -> None:
        """Records that all servers have admitted the workers of some assignments, if they are still present.

        Args:
            steps: the step at which the worker of each assignment starts.
            now: seconds of Unix time.
        """
        for assignment, step in steps.items():
            if member := self._by_assignment.get(assignment):
                member.step, member.stepped_at = step, now
                self._enter(member, Stage.ADMITTED)

    def step_limit(self, worker: str, seconds: float) -> int:
        """Returns the largest step that a worker may report when the job has run for so many seconds.

        The limit rises while the coordinator is away, so it never refuses an honest worker after that. It begins at
        the step at which servers admitted the worker, which is stored. After a restore it is that of the checkpoint.
        """
        possible = self.active[worker].step + int(MAX_STEPS_PER_S * max(seconds, 0.0))
        return max(possible, self.step) + MAX_LEAD

    def keep_report(self, report: WorkerReported, now: float) -> WorkerReported | None:
        """Keeps a worker's report as its last one; returns the previous one, or None."""
        member = self.active[report.worker]
        if report.step > member.current_step:
            member.stepped_at = now
        earlier, member.last_report = member.last_report, report
        if self._furthest is not None and report.step >= self._furthest:
            self._furthest = report.step
        elif earlier and earlier.step == self._furthest:
            self._furthest = None
        return earlier

    def restore_reports(self, reports: Mapping[int, WorkerReported]) -> None:
        """Restores the last reports of live workers, by assignment."""
        self._furthest = None
        for member in self.active.values():
            member.last_report = reports.get(member.assignment)

    def elect_value_sender(self) -> None:
        """Selects one of the workers that have the given values to send them, unless the selected one is present."""
        if self._value_sender not in self._by_assignment:
            knowing = (assignment for assignment, member in self._by_assignment.items() if member.described)
            self._value_sender = min(knowing, default=0)
            self._changed(JobRecordKind.STATE)

    def release(self, worker: str) -> GroupMember:
        """Removes and returns a member. If the job continues, call `finish` or `vacate` for its rank."""
        released = self.active.pop(worker)
        del self._by_assignment[released.assignment]
        self._stages[released.stage] -= 1
        self._waiting.pop(worker, None)
        self._rank_changed(released.rank)
        if released.last_report and released.last_report.step == self._furthest:
            self._furthest = None
        return released

    def finish(self, rank: int) -> None:
        """Marks the rank of a released worker as finished."""
        self._finished.add(rank)
        self._finished_names = None
        self._rank_changed(rank)

    def vacate(self, rank: int, why: str = "") -> None:
        """Frees the rank of a released worker that did not finish.

        Args:
            rank: the rank.
            why: what has happened to the worker, for users; empty if they need not know.
        """
        del self._names[rank]
        self._unfinish(rank)
        if why:
            self.departed[rank] = why
        self._rank_changed(rank)

    def clear(self) -> None:
        """Removes all workers, because the job restarts."""
        for rank in self.recorded_ranks:
            self._rank_changed(rank)
        for kept in (self.active, self._by_assignment, self._stages, self._waiting):
            kept.clear()
        self._furthest = None
        self._names.clear()
        self.departed.clear()
        self._finished.clear()
        self._finished_names = None
        self._value_sender = 0

    @property
    def recorded_ranks(self) -> set[int]:
        """The ranks that have a record."""
        return self._names.keys() | self.departed.keys()

    def rank_record(self, rank: int) -> state_pb2.RankRecord | None:
        """Returns the record of a rank; None if it has none."""
        worker, departed = self._names.get(rank, ""), self.departed.get(rank, "")
        if not (worker or departed):
            return None
        member = self.active.get(worker)
        if member and member.rank != rank:  # a session has finished this rank, and come back for another one
            member = None
        return state_pb2.RankRecord(
            worker=worker,
            member=member.to_proto() if member else None,
            finished=rank in self._finished,
            departed=departed,
        )

    def write_to(self, record: state_pb2.JobRecord) -> None:
        """Writes what concerns no single rank into the job's record."""
        record.value_sender = self._value_sender
        record.quarantined.extend(self.quarantines.to_proto())

    def restore_from(self, record: state_pb2.JobRecord, ranks: Mapping[int, state_pb2.RankRecord], now: float) -> None:
        """Restores the worker group of a new job.

        Args:
            record: the job's record.
            ranks: the records of its ranks.
            now: seconds of Unix time.
        """
        ranks = {**_earlier_ranks(record), **ranks}
        members = [GroupMember.from_proto(it.member) for it in ranks.values() if it.HasField("member")]
        for member in sorted(members, key=_assignment):  # the order in which they were added
            self._keep(member)
        self._names = {rank: it.worker for rank, it in ranks.items() if it.worker}
        self._finished, self._finished_names = {rank for rank, it in ranks.items() if it.finished}, None
        self.departed = {rank: it.departed for rank, it in ranks.items() if it.departed}
        self._value_sender = record.value_sender
        self.quarantines.restore_from(record.quarantined, now)
        self.restart_watch(now)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        ranks = [member.rank for member in self.active.values()]
        assert len(set(ranks)) == len(ranks), "two workers share a rank"
        assert self._by_assignment == {member.assignment: member for member in self.active.values()}
        assert +self._stages == Counter(member.stage for member in self.active.values())
        assert all(self.active.get(worker) is member for worker, member in self._waiting.items())
        assert all(0 <= rank < self._spec.most_workers for rank in ranks)
        assert self._names.keys() >= self._finished
        assert self._spec.is_session or len(self._names) <= len(self.active) + len(self._finished) or not self.active
        assert all(self._names[member.rank] == worker for worker, member in self.active.items())
        reported = [member.last_report.step for member in self.active.values() if member.last_report]
        assert self._furthest in {None, max(reported, default=0)}

    def _keep(self, member: GroupMember) -> None:
        self.active[member.worker] = self._by_assignment[member.assignment] = member
        self._stages[member.stage] += 1

    def _unfinish(self, rank: int) -> None:
        self._finished.discard(rank)
        self._finished_names = None

    def _enter(self, member: GroupMember, stage: Stage) -> None:
        self._stages[member.stage] -= 1
        self._stages[stage] += 1
        member.stage = stage
        self._rank_changed(member.rank)

    def _rank_changed(self, rank: int) -> None:
        self._changed(record_keys.of_rank(rank))


def _assignment(member: GroupMember) -> int:
    return member.assignment


def _earlier_ranks(record: state_pb2.JobRecord) -> dict[int, state_pb2.RankRecord]:
    """Returns the records of the ranks in a job's record of schema 2 or earlier; none if it is a later one."""
    found = {rank: state_pb2.RankRecord(worker=worker) for rank, worker in record.worker_group.items()}
    for member in record.members:
        found[member.rank].member.CopyFrom(member)
    for rank in found.keys() & record.finished:  # the name was gone if a session took a finished rank again, and died
        found[rank].finished = not found[rank].HasField("member")  # there is one while that session lives
    for rank, departed in record.departed.items():
        found.setdefault(rank, state_pb2.RankRecord()).departed = departed
    return found
