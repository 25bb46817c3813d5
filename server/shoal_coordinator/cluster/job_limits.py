"""Limits on live jobs, in total and for each submitter, and the checks of submissions and descriptions (no I/O)."""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal._limits import catalogue
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import ProgramDescription, events

_ADVICE = "try again when one ends, or cancel one"


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of jobs, decided by the operator.

    Attributes:
        live_jobs: jobs that have not ended.
        submitter_jobs: jobs of one submitter that have not ended.
        submitter_value_bytes: bytes of all variables of one submitter's jobs that have not ended; 0 for no limit.
        variables: variables of one job.
        nbytes: bytes of all variables of one job.
    """

    live_jobs: int = catalogue.MAX_LIVE_JOBS.default
    submitter_jobs: int = catalogue.SUBMITTER_JOBS.default
    submitter_value_bytes: int = catalogue.SUBMITTER_VALUE_BYTES.default
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
        if len(jobs) >= self.live_jobs:
            raise catalogue.MAX_LIVE_JOBS.refusal(
                f"the cluster has {len(jobs)} live jobs", _ADVICE, limit=self.live_jobs
            )
        if not event.submitter:
            return
        theirs = [job for job in jobs if job.submitter == event.submitter]
        if len(theirs) >= self.submitter_jobs:
            raise catalogue.SUBMITTER_JOBS.refusal(
                f"{event.submitter} has {len(theirs)} live jobs", _ADVICE, limit=self.submitter_jobs
            )
        held = sum(job.spec_bytes for job in theirs)
        if held + event.spec_bytes > catalogue.SUBMITTER_JOB_BYTES.default:
            raise catalogue.SUBMITTER_JOB_BYTES.refusal(
                f"the specifications of the live jobs of {event.submitter} have {held} bytes, and that of job "
                f"{event.spec.name} has {event.spec_bytes} bytes",
                _ADVICE,
            )

    def check_description(self, job: JobMachine, description: ProgramDescription, live: Iterable[JobMachine]) -> None:
        """Checks that a job's variables, with those of its submitter's other live jobs, do not exceed a limit.

        A job whose variables are known is not checked: they count already. A job that restarts keeps them.

        Args:
            job: the job that a worker describes.
            description: its variables.
            live: the jobs that have not ended.

        Raises:
            Overloaded: they do. The message names the limit.
        """
        submitter = job.submission.submitter
        if not (self.submitter_value_bytes and submitter) or job.described:
            return
        theirs = (each.described for each in live if each.submission.submitter == submitter)
        held = sum(each.nbytes for each in theirs if each)
        if held + description.nbytes > self.submitter_value_bytes:
            raise catalogue.SUBMITTER_VALUE_BYTES.refusal(
                f"the variables of the live jobs of {submitter} have {held} bytes, and those of job {job.spec.name} "
                f"have {description.nbytes} bytes",
                _ADVICE,
                limit=self.submitter_value_bytes,
            )


__all__ = ["JobLimits"]
