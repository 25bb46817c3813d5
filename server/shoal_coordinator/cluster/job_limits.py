"""Limits of live jobs, in all and of one submitter, and the check of a submission against them (no I/O)."""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal._limits import catalogue
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import events


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of jobs, decided by the operator.

    Attributes:
        live_jobs: jobs that have not ended.
        host_jobs: jobs of one submitter that have not ended.
        variables: variables of one job.
        nbytes: bytes of all variables of one job.
    """

    live_jobs: int = catalogue.MAX_LIVE_JOBS.default
    host_jobs: int = catalogue.HOST_JOBS.default
    variables: int = catalogue.JOB_VARIABLES.default
    nbytes: int = catalogue.JOB_BYTES.default

    def check_submission(self, event: events.JobSubmitted, live: Iterable[JobMachine]) -> None:
        """Checks that one more job does not exceed a limit.

        Jobs without a known submitter, such as those that an earlier version of Shoal stored, count only in all.

        Args:
            event: the submission.
            live: the jobs that have not ended.

        Raises:
            Overloaded: it does. The message names the limit.
        """
        jobs = [job.submission for job in live]
        advice = "try again when one ends, or cancel one"
        if len(jobs) >= self.live_jobs:
            raise catalogue.MAX_LIVE_JOBS.refusal(
                f"the cluster has {len(jobs)} live jobs", advice, limit=self.live_jobs
            )
        if not event.submitter:
            return
        theirs = [job for job in jobs if job.submitter == event.submitter]
        if len(theirs) >= self.host_jobs:
            raise catalogue.HOST_JOBS.refusal(
                f"{event.submitter} has {len(theirs)} live jobs", advice, limit=self.host_jobs
            )
        held = sum(job.spec_bytes for job in theirs)
        if held + event.spec_bytes > catalogue.HOST_JOB_BYTES.default:
            raise catalogue.HOST_JOB_BYTES.refusal(
                f"the specifications of the live jobs of {event.submitter} have {held} bytes, and that of job "
                f"{event.spec.name} has {event.spec_bytes} bytes",
                advice,
            )


__all__ = ["JobLimits"]
