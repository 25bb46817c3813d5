"""The jobs of a cluster, found by name, submission or worker. Many jobs may have ended, but few are live (no I/O)."""

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice

from shoal import errors
from shoal.status import JobState
from shoal_coordinator.job import EventLog, GroupCopies, JobMachine, LogBudget
from shoal_coordinator.messages import JobRef

# Of a job that takes no more sessions, and whose name is not free yet.
LAST_CHECKPOINT = "has finished, and its last checkpoint is being written; try again when it has ended"

# Names of forgotten jobs that are remembered, for a message that says so. They are not in the store.
FORGOTTEN_NAMES = 1_000


class JobTable(Mapping[str, JobMachine]):
    """Jobs by name, in the order of their submissions.

    Args:
        on_event: called with the submission of a job that has a new event.
        keep_ended: number of ended jobs with variables that the cluster keeps. It keeps as many without variables.
        event_bytes: maximum bytes of the events of all jobs.
    """

    def __init__(
        self, on_event: Callable[[int], None] = lambda _: None, keep_ended: int = 0, event_bytes: int = sys.maxsize
    ) -> None:
        self._on_event, self._keep_ended = on_event, keep_ended
        self._log_budget = LogBudget(event_bytes)
        self._jobs: dict[str, JobMachine] = {}
        self._by_submission: dict[int, JobMachine] = {}  # has the same jobs
        self._submissions: list[int] = []  # the keys of _by_submission, in order
        # By submission. A job that has ended moves from _live to the end of one of the others when one is next read.
        self._live: dict[int, JobMachine] = {}
        # Ended jobs whose variables are on servers, and all others. Apart, so that jobs that fail at once do not push
        # out a trained one.
        self._with_variables: dict[int, JobMachine] = {}
        self._without_variables: dict[int, JobMachine] = {}
        self._ended_states: Counter[JobState] = Counter()  # of both
        # The live jobs that may have ended since a job was last moved: the end of a job is an event of it.
        self._changed: dict[int, None] = {}
        self._job_of: dict[str, JobMachine] = {}  # the latest job of each worker, which it may have left
        self._forgotten: dict[str, None] = {}  # names, oldest first; at most FORGOTTEN_NAMES

    def __getitem__(self, name: str) -> JobMachine:
        return self._jobs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def named(self, name: str) -> JobMachine:
        """Returns a job by name.

        Raises:
            UnknownJob: no job has this name.
        """
        if name not in self._jobs:
            kept = self._keep_ended
            if name in self._forgotten:
                raise errors.UnknownJob(
                    f"job {name!r:.80} has ended and is forgotten: of the ended jobs, the coordinator keeps the "
                    f"newest {kept} with variables and the newest {kept} without (--keep-finished-jobs). The "
                    "checkpoints of the job remain: `shoal checkpoints ls` lists them",
                    job=name,
                )
            raise errors.UnknownJob(f"there is no job {name!r:.80}; `shoal jobs --all` lists all jobs", job=name)
        return self._jobs[name]

    def add(self, job: JobMachine) -> None:
        """Adds a submitted job. No other job in the table has its name, and no submission in it is later."""
        number = job.ref.submission
        self._jobs[job.ref.name] = self._by_submission[number] = job
        self._submissions.append(number)
        self._live[number] = job
        self._changed[number] = None  # a restored job may have ended
        self._job_of |= dict.fromkeys(job.workers, job)
        job.log.appended = partial(self._event_appended, number, job.log)
        self._log_budget.count(job.log)

    def remove(self, job: JobMachine) -> None:
        """Removes a job."""
        number = job.ref.submission
        self._log_budget.forget(job.log)
        del self._jobs[job.ref.name], self._by_submission[number]
        del self._submissions[bisect_left(self._submissions, number)]
        if self._live.pop(number, None) is not None:
            return
        ended = self._with_variables if number in self._with_variables else self._without_variables
        if len(ended) > self._keep_ended:  # else it was dropped, or its name is used again
            self._forgotten.pop(job.ref.name, None)
            self._forgotten[job.ref.name] = None
            if len(self._forgotten) > FORGOTTEN_NAMES:
                del self._forgotten[next(iter(self._forgotten))]
        del ended[number]
        self._ended_states[job.state] -= 1

    def variables_lost(self, job: JobMachine) -> None:
        """Counts a job that has ended as one without variables, because they are not on servers any more."""
        self._settle()
        if self._with_variables.pop(job.ref.submission, None) is not None:
            others = sorted([*self._without_variables.values(), job], key=_end_of)
            self._without_variables = {other.ref.submission: other for other in others}

    @property
    def by_submission(self) -> Mapping[int, JobMachine]:
        """All jobs by the number of their submission, for reading only."""
        return self._by_submission

    @property
    def live(self) -> list[JobMachine]:
        """The jobs that have not ended."""
        self._settle()
        return list(self._live.values())

    @property
    def states(self) -> Counter[JobState]:
        """The number of jobs in each state."""
        self._settle()
        return +self._ended_states + Counter(job.state for job in self._live.values())

    def oldest_ended(self) -> list[JobMachine]:
        """Returns the ended jobs that the cluster no longer keeps; see `keep_ended`."""
        self._settle()
        return [
            job
            for ended in (self._with_variables, self._without_variables)
            for job in islice(ended.values(), max(0, len(ended) - self._keep_ended))
        ]

    def newest(self, count: int, before: int | None = None, ended: int | None = None) -> list[JobMachine]:
        """Returns jobs, newest first.

        Args:
            count: maximum number of jobs.
            before: only jobs with an earlier submission than this one; None means all.
            ended: only this many of the newest ended jobs, even if those before them are asked for; None means all.
        """
        numbers = self._submissions if ended is None else self._live_and_ended(ended)
        end = len(numbers) if before is None else bisect_left(numbers, before)
        chosen = numbers[max(0, end - count) : end]
        return [self._by_submission[number] for number in reversed(chosen)]

    @property
    def live_groups(self) -> Iterator[GroupCopies]:
        """The lock groups of the jobs that have not ended."""
        return (group for job in self.live for group in job.copies.groups)

    def find_live(self, ref: JobRef) -> JobMachine | None:
        """Returns the job of a submission; None if it has ended or its name was reused."""
        job = self._jobs.get(ref.name)
        return job if job and job.ref == ref and not job.ended else None

    @property
    def employed(self) -> set[str]:
        """The workers that have an assignment in any job."""
        return {worker for job in self._live.values() for worker in job.workers}

    def assigned(self, worker: str, job: JobMachine) -> None:
        """Records that a worker has an assignment in a job, and in no other one."""
        self._job_of[worker] = job

    def was_assigned(self, worker: str, job: JobMachine) -> bool:
        """Returns whether a live worker has or had an assignment in a job, as far as that is remembered."""
        return self._job_of.get(worker) is job or job.had_worker(worker)

    def find_of(self, worker: str) -> JobMachine | None:
        """Returns the job in which a worker has an assignment. Ended jobs have no workers."""
        job = self._job_of.get(worker)
        return job if job and job.has_worker(worker) else None

    def take_of(self, worker: str) -> JobMachine | None:
        """Returns the job of a worker that has died, as `find_of`, and forgets the worker."""
        job = self.find_of(worker)
        self._job_of.pop(worker, None)
        return job

    def _live_and_ended(self, ended: int) -> list[int]:
        """Returns the submissions of all live jobs and of the newest ended ones, in order."""
        self._settle()
        newest = islice((number for number in reversed(self._submissions) if number not in self._live), ended)
        return sorted([*self._live, *newest])

    def _event_appended(self, number: int, log: EventLog) -> None:
        self._changed[number] = None
        if number in self._by_submission:
            self._log_budget.count(log)
        self._on_event(number)

    def _settle(self) -> None:
        """Moves jobs that have ended from the live jobs to the ended ones, in the order of their ends."""
        if not self._changed:
            return
        changed = (self._live.get(number) for number in self._changed)
        ended = [job for job in changed if job and job.ended]
        self._changed.clear()
        if ended:
            self._job_of = {worker: job for worker, job in self._job_of.items() if job.has_worker(worker)}
        for job in sorted(ended, key=_end_of):
            number = job.ref.submission
            kind = self._with_variables if job.servers else self._without_variables
            kind[number] = self._live.pop(number)
            self._ended_states[job.state] += 1


def exists(job: JobMachine) -> errors.JobExists:
    """Returns the refusal of a submission under the name of a live job."""
    name = job.spec.name
    if job.all_workers_finished:
        return errors.JobExists(f"job {name} {LAST_CHECKPOINT}", job=name, ending=1)
    return errors.JobExists(f"job {name} is {job.state.value}: choose another name, or cancel it first", job=name)


def _end_of(job: JobMachine) -> tuple[float, int]:
    """The place of an ended job in the order in which jobs are forgotten."""
    return job.finished_at, job.ref.submission
