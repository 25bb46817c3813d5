"""The jobs of a cluster, found by name, submission or worker (no I/O)."""

from collections.abc import Iterator, Mapping

from shoal import errors
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import JobRef


class JobTable(Mapping[str, JobMachine]):
    """Jobs by name, in the order of their submissions."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobMachine] = {}

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
            raise errors.UnknownJob(f"there is no job {name!r}; `shoal jobs` lists all jobs", job=name)
        return self._jobs[name]

    def add(self, job: JobMachine) -> None:
        """Adds a submitted job. No other job in the table has its name."""
        self._jobs[job.ref.name] = job

    def remove(self, job: JobMachine) -> None:
        """Removes a job."""
        del self._jobs[job.ref.name]

    @property
    def live(self) -> list[JobMachine]:
        """The jobs that have not ended."""
        return [job for job in self._jobs.values() if not job.ended]

    def find_live(self, ref: JobRef) -> JobMachine | None:
        """Returns the job of a submission; None if it has ended or its name was reused."""
        job = self._jobs.get(ref.name)
        return job if job and job.ref == ref and not job.ended else None

    @property
    def employed(self) -> set[str]:
        """The workers that have an assignment in any job."""
        return {worker for job in self._jobs.values() for worker in job.workers}

    def find_of(self, worker: str) -> JobMachine | None:
        """Returns the job in which a worker has an assignment."""
        return next((job for job in self._jobs.values() if job.employs(worker)), None)
