"""Lists of jobs and members, a page at a time, so that no reader holds the coordinator's lock for long (no I/O)."""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import islice
from operator import attrgetter

from shoal import errors
from shoal._limits import catalogue
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.status import JobState, JobStatus, MemberStatus, Role, SavedCheckpoint
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.job import JobMachine

# Jobs or members of a page: the default, and the limit PAGE_SIZE.
DEFAULT_PAGE_SIZE, PAGE_SIZE = 200, catalogue.PAGE_SIZE.default
# Jobs that the status of a draining server names.
_NAMED_JOBS = 100
_ID = attrgetter("registration.member")
# Limit of a token. The longest has 94 characters.
_TOKEN_CHARACTERS = 256
_JOB_POSITION, _MEMBER_POSITION = re.compile(r"job:([0-9]{1,20})"), re.compile(r"member:([a-z0-9-]{1,63})")


@dataclass(frozen=True, slots=True)
class ListedJob:
    """The status of a job in a list, and the number of its submission, after which the next page begins."""

    submission: int
    status: JobStatus


@dataclass(frozen=True, slots=True)
class CheckpointAge:
    """A job's policy of checkpoints, when it first ran (0 if never), its newest checkpoint, and the latest failure."""

    policy: CheckpointPolicy | None
    started_at: float
    newest: SavedCheckpoint | None
    failure: str


class Listing:
    """The jobs and members of a cluster, for readers.

    Args:
        jobs: the jobs.
        members: the members.
        needs: returns whether a draining server has to stay because of a live job.
    """

    def __init__(
        self,
        jobs: JobTable,
        members: Membership,
        needs: Callable[[JobMachine, Member], bool] = lambda _job, _member: False,
    ) -> None:
        self._jobs, self._members, self._needs = jobs, members, needs

    def jobs(self, now: float, count: int, before: int | None = None) -> list[ListedJob]:
        """Returns the status of jobs, newest first.

        Args:
            now: seconds of Unix time.
            count: maximum number of jobs.
            before: only jobs with an earlier submission than this one; None means all.
        """
        return [listed(job, now) for job in self.newest(count, before)]

    def newest(self, count: int, before: int | None = None, ended: int | None = None) -> list[JobMachine]:
        """Returns jobs, newest first, for `listed`. They stay readable if they are dropped meanwhile.

        Args:
            count: maximum number of jobs.
            before: only jobs with an earlier submission than this one; None means all.
            ended: only this many of the newest ended jobs; None means all.
        """
        return self._jobs.newest(count, before, ended)

    def live_checkpoints(self) -> list[CheckpointAge]:
        """Returns what is known of the checkpoints of all jobs that have not ended, oldest job first."""
        return [
            CheckpointAge(job.spec.checkpoints, job.started_at, job.newest_checkpoint, job.checkpoint_failure)
            for job in self._jobs.live
        ]

    @property
    def live_jobs(self) -> int:
        """The number of jobs that have not ended."""
        return len(self._jobs.live)

    def job_states(self) -> Counter[JobState]:
        """Returns the number of jobs in each state."""
        return self._jobs.states

    def member_states(self) -> Counter[tuple[Role, str]]:
        """Returns the number of members by their role and their state: alive, left or lost."""
        return Counter((member.role, _state(member)) for member in self._members.unordered())

    def is_live(self, name: str) -> bool:
        """Returns whether a job of this name exists and has not ended."""
        return name in self._jobs and not self._jobs[name].ended

    def members(self, now: float, count: int, after: str = "") -> list[MemberStatus]:
        """Returns the status of members in order of id, including those that died in the last minutes.

        Args:
            now: seconds of Unix time.
            count: maximum number of members.
            after: only members with a larger id.
        """
        later = (member for member in self._members.unordered() if member.id > after)
        return self.statuses(nsmallest(count, later, key=_ID), now)

    def all_members(self) -> list[Member]:
        """Returns all members as `members` does, but in any order, for `statuses`. They stay readable if they end."""
        return list(self._members.unordered())

    def statuses(self, members: Iterable[Member], now: float) -> list[MemberStatus]:
        """Returns the status of some members.

        Args:
            members: the members.
            now: seconds of Unix time.
        """
        return [self._status(member, now) for member in members]

    def _status(self, member: Member, now: float) -> MemberStatus:
        status = member.status(now, self._job_of(member))
        if not (member.draining and member.alive and member.role is Role.SERVER):
            return status
        groups = sum(it.has_copy_on(member.id) for it in self._jobs.live_groups)
        waiting = (job.ref.name for job in self._jobs.live if self._needs(job, member))
        ended_jobs = self._jobs.values() if member.order else ()
        ended = (job.ref.name for job in ended_jobs if job.ended and _only_copy_on(job, member))
        return replace(
            status,
            moving_groups=groups,
            waiting_jobs=tuple(islice(waiting, _NAMED_JOBS)),
            ended_jobs=tuple(islice(ended, _NAMED_JOBS)),
        )

    def _job_of(self, member: Member) -> str:
        job = self._jobs.find_of(member.id) if member.alive else None
        return job.ref.name if job else ""


def _only_copy_on(job: JobMachine, member: Member) -> bool:
    """Returns whether a job loses values if a server leaves."""
    if job.copies.groups:
        return any(it.primary.member == member.id and not it.backup for it in job.copies.groups)
    return any(server.member == member.id for server in job.servers)


def listed(job: JobMachine, now: float) -> ListedJob:
    """Returns the status of a job in a list."""
    return ListedJob(job.ref.submission, job.status(now))


def _state(member: Member) -> str:
    return "alive" if member.alive else "left" if member.draining else "lost"


def page_size(requested: int) -> int:
    """Returns the number of items of a page; 0 means the default.

    Raises:
        BadRequest: it is above the limit.
    """
    if requested > PAGE_SIZE:
        raise catalogue.PAGE_SIZE.refusal(f"page_size is {requested}")
    return requested or DEFAULT_PAGE_SIZE


def most_ended(requested: int) -> int:
    """Returns the number of ended jobs that a list may have.

    Raises:
        BadRequest: it is above the limit.
    """
    if requested > PAGE_SIZE:
        raise catalogue.PAGE_SIZE.refusal(f"ended is {requested}")
    return requested


def token_after_job(submission: int) -> str:
    """Returns the token of the page after a job."""
    return _encoded(f"job:{submission}")


def token_after_member(member: str) -> str:
    """Returns the token of the page after a member."""
    return _encoded(f"member:{member}")


def job_before(token: str) -> int | None:
    """Returns the submission after which a page of jobs begins; None for the first page.

    Raises:
        BadRequest: the token is not one of a list of jobs.
    """
    return int(_position(token, _JOB_POSITION, "jobs")) if token else None


def member_after(token: str) -> str:
    """Returns the member after which a page of members begins; empty for the first page.

    Raises:
        BadRequest: the token is not one of a list of members.
    """
    return _position(token, _MEMBER_POSITION, "members") if token else ""


def _encoded(position: str) -> str:
    return urlsafe_b64encode(position.encode()).decode()


def _position(token: str, form: re.Pattern[str], what: str) -> str:
    try:
        text = urlsafe_b64decode(token).decode() if len(token) <= _TOKEN_CHARACTERS else ""
    except ValueError:  # not base64, or not text
        text = ""
    found = form.fullmatch(text)
    if not found or _encoded(text) != token:
        raise errors.BadRequest(
            f"page_token is {token!r:.80}, which is not the next_page_token of a list of {what}; list again without one"
        )
    return found[1]


__all__ = [
    "DEFAULT_PAGE_SIZE",
    "PAGE_SIZE",
    "CheckpointAge",
    "ListedJob",
    "Listing",
    "job_before",
    "listed",
    "member_after",
    "most_ended",
    "page_size",
    "token_after_job",
    "token_after_member",
]
