"""The worker group of one job: its live workers, their ranks, and the ranks that have finished (no I/O)."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal._wire import PushCounts
from shoal._wire.limits import MAX_LEAD, MAX_STEPS_PER_S
from shoal.job import Job
from shoal.status import JobMember
from shoal.v1 import state_pb2
from shoal_coordinator.job.group_member import GroupMember, Stage
from shoal_coordinator.messages import WorkerReported

# Seconds of a worker's first quarantine in a job, doubled each time, up to the maximum.
_QUARANTINE_S, _MAX_QUARANTINE_S = 60.0, 3600.0
_DOUBLED = 6  # doublings until the maximum is reached
# Hangs of a worker in one job after which it is quarantined, as after so many deaths of its trainer in a row.
HANGS = 3
# Maximum number of quarantined workers that a status names.
_MAX_NAMED = 10


@dataclass(slots=True)
class Quarantine:
    """The quarantines of one worker in one job, after its failures there.

    Attributes:
        count: number of its quarantines.
        until: end of the latest one, in seconds of Unix time.
    """

    count: int = 0
    until: float = 0.0


class WorkerGroup:
    """The workers of one job.

    Args:
        spec: the job, as its user submitted it.

    Attributes:
        active: the live members, by worker; empty once the job has ended. Only methods of this class change it.
        departed: by free rank, what has happened to its last worker: its id, a space, and the reason. In a job of
            workers only those that were quarantined.
    """

    def __init__(self, spec: Job) -> None:
        self._spec = spec
        self.active: dict[str, GroupMember] = {}
        self.departed: dict[int, str] = {}
        self._names: dict[int, str] = {}  # by rank: its worker; kept when the worker finishes or the job ends
        self._finished: set[int] = set()  # ranks that have finished; a session can take one again
        self._value_sender = 0  # assignment of the worker that sends the given values; 0: none
        self._quarantines: dict[str, Quarantine] = {}  # by worker, earlier workers included
        self._hangs: Counter[str] = Counter()  # by worker; not stored, so a restart of the coordinator clears it
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
        return {member.assignment for member in self.active.values()}

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
        return any(member.stage is not Stage.ASSIGNED for member in self.active.values())

    @property
    def admitted(self) -> bool:
        """Whether enough workers are present for the job to run, and all of them may pull and push."""
        return len(self.active) >= self._spec.fewest_workers and all(
            member.stage is Stage.ADMITTED for member in self.active.values()
        )

    def free(self, ranks: Iterable[int]) -> list[int]:
        """Returns those of the ranks that a worker can take."""
        # A rank has a name while a worker has it, or has finished with it. A thousand workers' entries need no set.
        taken = {member.rank for member in self.active.values()} if self._spec.is_session else self._names
        return [rank for rank in ranks if rank not in taken]

    def is_finished(self, worker: str) -> bool:
        """Returns whether a worker has finished. Servers have released it, and would not admit it again."""
        return any(self._names.get(rank) == worker for rank in self._finished)

    # Workers that fail again and again, or hang.

    def quarantine(self, worker: str, now: float) -> float:
        """Quarantines a worker, longer each time; returns the seconds."""
        found = self._quarantines.setdefault(worker, Quarantine())
        seconds = min(_QUARANTINE_S * 2.0 ** min(found.count, _DOUBLED), _MAX_QUARANTINE_S)
        found.count, found.until = found.count + 1, now + seconds
        self._hangs.pop(worker, None)
        return seconds

    def quarantine_note(self, now: float) -> str:
        """Returns which workers are quarantined and until when, for users; empty if none are."""
        if not self._quarantines:  # asked for each live job, whenever workers are assigned
            return ""
        ends = {worker: time.gmtime(it.until) for worker, it in sorted(self._quarantines.items()) if now < it.until}
        found = [f"worker {worker} until {time.strftime('%H:%M:%S UTC', end)}" for worker, end in ends.items()]
        left = len(found) - _MAX_NAMED
        return f"quarantined: {', '.join(found[:_MAX_NAMED])}{f' and {left} more' if left > 0 else ''}" if found else ""

    @property
    def has_quarantines(self) -> bool:
        """Whether a worker is, or was, quarantined."""
        return bool(self._quarantines)

    def is_quarantined(self, worker: str, now: float) -> bool:
        """Returns whether a worker must not get an assignment now."""
        found = self._quarantines.get(worker)
        return found is not None and now < found.until

    def count_hang(self, worker: str) -> bool:
        """Counts a hang of a worker; returns whether there were so many that it should be quarantined."""
        self._hangs[worker] += 1
        return self._hangs[worker] >= HANGS

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
        self.active[member.worker] = member
        self._names[member.rank] = member.worker
        self.departed.pop(member.rank, None)

    @property
    def waiting(self) -> list[GroupMember]:
        """The members that have asked to enter, and that no server has been asked to admit."""
        return [member for member in self.active.values() if member.waits]

    def ask_entry(self, worker: str) -> None:
        """Records that a worker has asked to enter."""
        self.active[worker].waits = True

    def begin_entry(self, worker: str) -> None:
        """Records that servers have been asked to admit a worker."""
        self.active[worker].stage, self.active[worker].waits = Stage.ENTERING, False

    def describe(self, worker: str) -> None:
        """Records that a worker has loaded the program and the given values."""
        self.active[worker].described = True

    def admit(self, steps: Mapping[int, int], now: float) -> None:
        """Records that all servers have admitted the workers of some assignments, if they are still present.

        Args:
            steps: the step at which the worker of each assignment starts.
            now: seconds of Unix time.
        """
        for member in self.active.values():
            if member.assignment in steps:
                member.stage, member.step, member.stepped_at = Stage.ADMITTED, steps[member.assignment], now

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
        """Selects one of the workers that have the given values to send them, if there is any."""
        knowing = [member.assignment for member in self.active.values() if member.described]
        if self._value_sender not in knowing:
            self._value_sender = min(knowing, default=0)

    def release(self, worker: str) -> GroupMember:
        """Removes and returns a member. If the job continues, call `finish` or `vacate` for its rank."""
        released = self.active.pop(worker)
        if released.last_report and released.last_report.step == self._furthest:
            self._furthest = None
        return released

    def finish(self, rank: int) -> None:
        """Marks the rank of a released worker as finished."""
        self._finished.add(rank)

    def vacate(self, rank: int, why: str = "") -> None:
        """Frees the rank of a released worker that did not finish.

        Args:
            rank: the rank.
            why: what has happened to the worker, for users; empty if they need not know.
        """
        del self._names[rank]
        if why:
            self.departed[rank] = why

    def clear(self) -> None:
        """Removes all workers, because the job restarts."""
        self.active.clear()
        self._furthest = None
        self._names.clear()
        self.departed.clear()
        self._finished.clear()
        self._value_sender = 0

    def write_to(self, record: state_pb2.JobRecord) -> None:
        """Writes the worker group into the job's record."""
        record.members.extend(member.to_proto() for member in self.active.values())
        record.worker_group.update(self._names)
        record.departed.update(self.departed)
        record.finished.extend(sorted(self._finished))
        record.value_sender = self._value_sender
        record.quarantined.extend(
            state_pb2.QuarantineRecord(worker=worker, count=it.count, until=it.until)
            for worker, it in sorted(self._quarantines.items())
        )

    def restore_from(self, record: state_pb2.JobRecord, now: float) -> None:
        """Restores the worker group from the job's record. A quarantine ends no later than if it began now."""
        self.active = {part.worker: GroupMember.from_proto(part) for part in record.members}
        self._furthest = None
        self._names, self._finished = dict(record.worker_group), set(record.finished)
        self._value_sender = record.value_sender
        self.departed = dict(record.departed)
        self._quarantines = {
            it.worker: Quarantine(it.count, min(it.until, now + _MAX_QUARANTINE_S)) for it in record.quarantined
        }
        self.restart_watch(now)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        ranks = [member.rank for member in self.active.values()]
        assert len(set(ranks)) == len(ranks), "two workers share a rank"
        assert all(0 <= rank < self._spec.most_workers for rank in ranks)
        assert self._names.keys() >= self._finished
        assert self._spec.is_session or len(self._names) <= len(self.active) + len(self._finished) or not self.active
        assert all(self._names[member.rank] == worker for worker, member in self.active.items())
        reported = [member.last_report.step for member in self.active.values() if member.last_report]
        assert self._furthest in {None, max(reported, default=0)}
