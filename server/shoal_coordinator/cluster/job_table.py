"""The jobs of a cluster, and how one is found: by name, by submission, by who works on it. Pure."""

from collections.abc import Iterator, Mapping

from shoal import errors
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import JobRef


class JobTable(Mapping[str, JobMachine]):
    """Jobs by name, in the order in which they were submitted."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobMachine] = {}

    def __getitem__(self, name: str) -> JobMachine:
        return self._jobs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def named(self, name: str) -> JobMachine:
        """A job by name.

        Raises:
            UnknownJob: there is none, or none any more.
        """
        if name not in self._jobs:
            raise errors.UnknownJob(f"there is no job {name!r}; `shoal jobs` lists those there are", job=name)
        return self._jobs[name]

    def add(self, job: JobMachine) -> None:
        """A job is submitted, whose name no other has (any more)."""
        self._jobs[job.ref.name] = job

    def remove(self, job: JobMachine) -> None:
        """A job is forgotten."""
        del self._jobs[job.ref.name]

    @property
    def live(self) -> list[JobMachine]:
        """Those that have not ended."""
        return [job for job in self._jobs.values() if not job.ended]

    def find_live(self, ref: JobRef) -> JobMachine | None:
        """A submission that has not ended; None: it has, whatever goes by its name now."""
        job = self._jobs.get(ref.name)
        return job if job and job.ref == ref and not job.ended else None

    def find_of(self, worker: str) -> JobMachine | None:
        """The one that a worker has a part in."""
        return next((job for job in self._jobs.values() if job.employs(worker)), None)
