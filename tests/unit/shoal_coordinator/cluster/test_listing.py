"""Lists of jobs and members in pages, at the largest sizes that are supported."""

from base64 import urlsafe_b64encode
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from shoal import errors
from shoal.events import LogLine
from shoal.status import JobState, JobStatus, Role
from shoal_coordinator.cluster import (
    PAGE_SIZE,
    job_before,
    member_after,
    most_ended,
    page_size,
    token_after_job,
    token_after_member,
)
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.listing import Listing
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.job.event_log import EventLog
from shoal_coordinator.messages import JobRef, Registration

MANY = 100_000


@dataclass
class StubJob:
    """A job as the table sees it. It counts how often its state is looked at."""

    ref: JobRef
    state: JobState = JobState.PENDING
    finished_at: float = 0.0
    workers: dict[str, int] = field(default_factory=dict)
    servers: tuple[str, ...] = ("s0",)
    seen: int = 0
    log: EventLog = field(default_factory=EventLog)

    @property
    def ended(self) -> bool:
        self.seen += 1
        return self.state.finished

    def has_worker(self, worker: str) -> bool:
        self.seen += 1
        return worker in self.workers

    def status(self, _now: float) -> JobStatus:
        self.seen += 1
        return cast(JobStatus, self)

    def end(self, at: float) -> None:
        self.state, self.finished_at = JobState.SUCCEEDED, at
        self.log.appended()  # the end of a job is an event


def table(jobs: list[StubJob], keep_ended: int = 0) -> JobTable:
    found = JobTable(keep_ended=keep_ended)
    for job in jobs:
        found.add(cast(Any, job))
    return found


def stubs(count: int) -> list[StubJob]:
    return [StubJob(JobRef(f"j{number}", number)) for number in range(1, count + 1)]


def test_a_page_of_a_hundred_thousand_jobs_looks_only_at_its_own() -> None:
    jobs = stubs(MANY)
    for job in jobs[:-2]:
        job.end(float(job.ref.submission))
    jobs[-1].workers["w"] = 1
    listing = Listing(found := table(jobs, keep_ended=MANY - 4), Membership(5.0))
    assert listing.job_states() == {JobState.SUCCEEDED: MANY - 2, JobState.PENDING: 2}
    for job in jobs:
        job.seen = 0
    before, pages, names = None, 0, []
    while page := listing.jobs(0.0, PAGE_SIZE, before):
        names += [each.status.ref.name for each in page]  # type: ignore[attr-defined] # a stub
        before, pages = page[-1].submission, pages + 1
    assert names == [job.ref.name for job in reversed(jobs)]
    assert pages == MANY // PAGE_SIZE
    assert sum(job.seen for job in jobs) == MANY, "each was looked at once"
    assert [job.ref.name for job in found.live] == ["j99999", "j100000"]
    assert found.find_of("w") is found["j100000"]
    assert found.find_of("nobody") is None
    assert listing.job_states()[JobState.PENDING] == 2
    assert [job.ref.name for job in found.oldest_ended()] == ["j1", "j2"]
    assert sum(job.seen for job in jobs) < MANY + 50, "ended jobs cost nothing"


def test_a_list_can_be_limited_to_the_newest_ended_jobs() -> None:
    jobs = stubs(MANY)
    for job in jobs[10:]:
        job.end(0.0)
    found = table(jobs, keep_ended=MANY)
    assert found.live
    for job in jobs:
        job.seen = 0
    listing, newest = Listing(found, Membership(5.0)), [100_000, 99_999]
    for ended in range(3):
        expected = newest[:ended] + list(range(10, 0, -1))
        listed = [job.ref.submission for job in listing.newest(PAGE_SIZE, ended=ended)]
        assert listed == expected
        pages = [job.ref.submission for job in listing.newest(5, ended=ended)]
        pages += [job.ref.submission for job in listing.newest(50, pages[-1], ended=ended)]
        assert pages == expected
    assert not any(job.seen for job in jobs), "ended jobs cost nothing"
    assert most_ended(PAGE_SIZE) == PAGE_SIZE
    with pytest.raises(errors.BadRequest, match="ended is 1001; the limit PAGE_SIZE is 1000"):
        most_ended(PAGE_SIZE + 1)


def test_the_logs_of_all_jobs_have_one_limit() -> None:
    jobs, found = stubs(10), JobTable(event_bytes=30_000)
    for job in jobs:
        found.add(cast(Any, job))
        for _ in range(50):
            job.log.append(LogLine(job.log.next, 0.0, "w0", "x" * 100))
    assert 10 < sum(len(job.log.after(0)) for job in jobs) < 50
    for job in jobs[1:]:
        found.remove(cast(Any, job))
        job.log.append(LogLine(job.log.next, 0.0, "w0", "x" * 20_000))
    for _ in range(30):
        jobs[0].log.append(LogLine(jobs[0].log.next, 0.0, "w0", "x" * 100))
    assert len(jobs[0].log.after(0)) > 30, "removed jobs do not count"


def test_live_jobs_are_not_looked_at_before_something_happens_to_them() -> None:
    jobs = stubs(1_000)
    found = table(jobs)
    jobs[0].workers["w"] = 1
    found.assigned("w", cast(Any, jobs[0]))
    assert len(found.live) == 1_000
    for job in jobs:
        job.seen = 0
    jobs[5].end(1.0)
    for _ in range(10):
        assert len(found.live) == 999
        assert found.find_of("w") is found["j1"]
    assert sum(job.seen for job in jobs) < 30
    assert found.take_of("w") is found["j1"]
    assert found.find_of("w") is None


def test_the_jobs_that_ended_first_are_the_oldest() -> None:
    jobs = stubs(4)
    found = table(jobs, keep_ended=1)
    jobs[2].end(1.0)
    assert found.oldest_ended() == []
    jobs[1].end(3.0)
    jobs[0].end(3.0)
    jobs[3].end(2.0)
    assert [job.ref.submission for job in found.oldest_ended()] == [3, 4, 1]
    found.remove(cast(Any, jobs[2]))
    assert [job.ref.submission for job in found.oldest_ended()] == [4, 1]
    assert (found.states, found.live) == ({JobState.SUCCEEDED: 3}, [])


def test_ended_jobs_with_variables_and_without_do_not_push_each_other_out() -> None:
    jobs = stubs(5)
    found = table(jobs, keep_ended=1)
    for job, servers in zip(jobs, (("s0",), ("s0",), (), (), ("s0",)), strict=True):
        job.servers = servers
        job.end(float(job.ref.submission))
    assert [job.ref.submission for job in found.oldest_ended()] == [1, 2, 3]
    found.variables_lost(cast(Any, jobs[4]))
    assert [job.ref.submission for job in found.oldest_ended()] == [1, 3, 4], "job 5 is the newest of those without"
    found.variables_lost(cast(Any, jobs[4]))
    for job in jobs[:4]:
        found.remove(cast(Any, job))
    assert found.states == {JobState.SUCCEEDED: 1}


def test_jobs_that_come_and_go_do_not_move_the_next_page() -> None:
    jobs = stubs(6)
    listing = Listing(found := table(jobs), Membership(5.0))
    first = listing.jobs(0.0, 2)
    assert [each.submission for each in first] == [6, 5]
    found.remove(cast(Any, jobs[4]))
    found.remove(cast(Any, jobs[3]))
    found.add(cast(Any, StubJob(JobRef("later", 7))))
    assert [each.submission for each in listing.jobs(0.0, 2, first[-1].submission)] == [3, 2]


def test_pages_of_members_follow_their_ids() -> None:
    members = Membership(5.0)
    for name in ("w2", "s0", "w10", "w1"):
        members.register(Registration(Role.WORKER, name, process="p"), 0.0)
    job = StubJob(JobRef("a", 1), workers={"w10": 3})
    listing = Listing(table([job]), members)
    first = listing.members(0.0, 2)
    assert [(it.member, it.job) for it in first] == [("s0", ""), ("w1", "")]
    assert [(it.member, it.job) for it in listing.members(0.0, 9, "w1")] == [("w10", "a"), ("w2", "")]
    assert listing.member_states() == {(Role.WORKER, "alive"): 4}


def test_a_token_is_what_the_last_page_gave() -> None:
    assert job_before(token_after_job(2**64)) == 2**64
    assert member_after(token_after_member("w" * 63)) == "w" * 63
    assert (job_before(""), member_after("")) == (None, "")


@pytest.mark.parametrize(
    "token",
    [
        "nonsense",
        "x" * 10_000_000,
        "\x00\n",
        "ü",
        token_after_job(1) + "=",
        token_after_job(1)[:-1],
        urlsafe_b64encode(b"job:-1").decode(),
        urlsafe_b64encode(b"job:1e9").decode(),
        urlsafe_b64encode(b"job:" + b"9" * 40).decode(),
        urlsafe_b64encode(b"member:../w").decode(),
    ],
    ids=lambda token: token[:12],
)
def test_a_page_token_that_is_not_one_is_refused(token: str) -> None:
    for read, what in ((job_before, "jobs"), (member_after, "members")):
        with pytest.raises(errors.BadRequest, match=f"page_token is .* not the next_page_token of a list of {what}"):
            read(token)


def test_a_token_of_the_other_list_is_refused() -> None:
    with pytest.raises(errors.BadRequest):
        job_before(token_after_member("w0"))
    with pytest.raises(errors.BadRequest):
        member_after(token_after_job(1))


def test_the_size_of_a_page_is_bounded() -> None:
    assert (page_size(0), page_size(1), page_size(PAGE_SIZE)) == (200, 1, PAGE_SIZE)
    for size in (PAGE_SIZE + 1, 2**32 - 1):
        with pytest.raises(errors.BadRequest, match="the limit PAGE_SIZE is 1000"):
            page_size(size)
