"""Rules that relate several fields of a job. Each raises InvalidJob, whose message says how to fix the job."""

from typing import Any

from shoal import errors


def check_ranges(job: Any) -> None:
    """Raises InvalidJob if a lease would end within a batch."""
    if job.range_size % job.batch_size:
        raise errors.InvalidJob(
            f"range_size is {job.range_size}; it must be a multiple of batch_size ({job.batch_size}), or 0",
            range_size=job.range_size,
            batch_size=job.batch_size,
        )


def check_session(job: Any) -> None:
    """Raises InvalidJob if a session job has settings of other jobs."""
    if job.evaluation and job.is_session:
        raise errors.InvalidJob("evaluation does not apply to session jobs; evaluate in the session's own loop")
    if job.is_session and (job.min_workers or job.max_workers):
        raise errors.InvalidJob(
            "min_workers and max_workers do not apply to session jobs; leave them at 0",
            min_workers=job.min_workers,
            max_workers=job.max_workers,
        )


def check_workers(job: Any) -> None:
    """Raises InvalidJob if the numbers of workers contradict each other."""
    if not job.fewest_workers <= job.workers <= job.most_workers:
        raise errors.InvalidJob(
            f"workers is {job.workers}; it must be from min_workers ({job.fewest_workers}) to max_workers "
            f"({job.most_workers})",
            workers=job.workers,
            min_workers=job.min_workers,
            max_workers=job.max_workers,
        )


def check_replicas(job: Any) -> None:
    """Raises InvalidJob if the job cannot have so many copies."""
    if job.min_replicas > job.replicas:
        raise errors.InvalidJob(
            f"min_replicas is {job.min_replicas}; it must be from 1 to replicas ({job.replicas}), or 0",
            min_replicas=job.min_replicas,
            replicas=job.replicas,
        )


__all__ = ["check_ranges", "check_replicas", "check_session", "check_workers"]
