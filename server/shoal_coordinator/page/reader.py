"""The reader of the page's data from the coordinator. It may wait for a lock, the store or the checkpoint storage."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from shoal import errors
from shoal._checkpoint import Catalogue, CheckpointStorage, Manifest
from shoal._display import group_records, records
from shoal._security import Principal
from shoal.checkpoints import described
from shoal.status import ClusterStatus, JobState, JobStatus, MemberStatus
from shoal_coordinator.cluster import job_before, member_after, token_after_job, token_after_member
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.groups import GroupRegistry
from shoal_coordinator.member_holders import changes
from shoal_coordinator.messages import events
from shoal_coordinator.page.history import downsampled
from shoal_coordinator.page.rates import Rates
from shoal_coordinator.page.responses import encode

# The limits of members and jobs in the stream of a page, and of a job's newest checkpoints.
MAX_MEMBERS, MAX_JOBS, MAX_CHECKPOINTS = 1_000, 200, 100
# The number of members whose status is read in one hold of the coordinator's lock, about 2 ms.
_MEMBERS_AT_A_TIME = 200
# The length of a job's reason in a list of jobs.
_REASON_CHARACTERS = 300
# The limits of steps in timings: of each worker, and of all workers. A page draws the latest 24 of each worker.
_STEPS, _STEPS_IN_ALL = 32, 4_096
# The limit of ranks in the list of groups.
_RANKS = 1_024
# Seconds for which timings are cached. Those of a thousand workers take 60 ms to encode.
_TIMINGS_FOR_S = 1.0
# The limit of events in one message.
_EVENTS = 500
_MARK = re.compile(r"([0-9]{1,20})-([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class EventPosition:
    """The position of a page in a job's events.

    Attributes:
        submission: Identifies the job among those of the same name, since a name can be used again.
        sequence: The sequence number of the last event.
    """

    submission: int = 0
    sequence: int = 0

    @classmethod
    def parse(cls, text: str) -> "EventPosition":
        """Parses the text of a position. Any other text gives the position before all events."""
        found = _MARK.fullmatch(text)
        return cls(int(found[1]), int(found[2])) if found else cls()

    def __str__(self) -> str:
        return f"{self.submission}-{self.sequence}"


@dataclass(frozen=True, slots=True)
class Overview:
    """The cluster at one moment.

    Attributes:
        text: The cluster as JSON.
        key: The part of `text` whose change is worth a new message. It omits the time since the last heartbeat of
            members that are not late.
        members: Records of members by id.
        quiet: The records of `members`, with the time omitted as in `key`.
    """

    text: bytes
    key: bytes
    members: dict[str, dict[str, Any]]
    quiet: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class JobUpdate:
    """The changes of a job since a mark, which is a position in the job's events.

    Attributes:
        mark: The mark after these changes.
        fresh: Whether the events are all events of the job, not only those after the given mark.
        job: The job's record.
        time: The time of the record, in seconds of Unix time by the coordinator's clock.
        chunks: Lists of events as JSON, each with the mark after it.
        ended: Whether no more events will come.
    """

    mark: EventPosition
    fresh: bool
    job: dict[str, Any]
    time: float
    chunks: tuple[tuple[EventPosition, bytes], ...]
    ended: bool


class Reader:
    """The reader of the page's data, for calls from any thread.

    Args:
        coordinator: The shell.
        storage: The checkpoint storage. None means that the cluster has none.
        about: Fixed fields of the cluster's record: heartbeat timeout, version and whether actions are refused.
        groups: The elastic groups. None means that there are none.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        storage: CheckpointStorage | None,
        about: dict[str, Any],
        groups: GroupRegistry | None = None,
    ) -> None:
        self._coordinator, self._groups = coordinator, groups or GroupRegistry()
        self._catalogue = Catalogue(storage) if storage else None
        self._about = about
        self._rates = Rates()
        self._timings: dict[str, tuple[float, bytes]] = {}  # by job, the time and the text; replaced, never changed

    def cluster(self, token: str = "") -> bytes:
        """Returns a page of the members as JSON, in order of id, and the totals of the page.

        Raises:
            BadRequest: The text is not a page token.
        """
        after = member_after(token)
        with self._coordinator.reading() as (machine, now):
            found = machine.listing.members(now, MAX_MEMBERS + 1, after)
            counts, interval_s = machine.counts, machine.members.heartbeat_interval_s
        status = ClusterStatus(counts.cluster, counts.generation, tuple(found[:MAX_MEMBERS]), interval_s)
        following = token_after_member(found[MAX_MEMBERS - 1].member) if len(found) > MAX_MEMBERS else ""
        record = records.cluster(status, records.late_after_s(status, at_least_s=0.0))
        return encode({**record, **self._about, "next_page_token": following, "time": now})

    def jobs(self, token: str = "") -> bytes:
        """Returns a page of the jobs as JSON, newest first.

        Raises:
            BadRequest: The text is not a page token.
        """
        before = job_before(token)
        with self._coordinator.reading() as (machine, now):
            found = machine.listing.jobs(now, MAX_JOBS + 1, before)
        following = token_after_job(found[MAX_JOBS - 1].submission) if len(found) > MAX_JOBS else ""
        jobs = [_brief(each.status) for each in found[:MAX_JOBS]]
        return encode({"jobs": jobs, "next_page_token": following, "time": now})

    def overview(self) -> Overview:
        """Returns the cluster and its jobs, up to the limits of a page, with the rates of servers.

        Only one thread at a time may call it, because rates depend on the previous call.
        """
        status, states, now = self._read_cluster()
        jobs = [each.status for each in self._coordinator.list_jobs(MAX_JOBS)]
        rates, late_s = self._rates.update(status.members, now), records.late_after_s(status, at_least_s=0.0)
        members = {
            it.member: {
                **records.member(it, late_s),
                "rates": asdict(rates[it.member]) if it.member in rates else None,
            }
            for it in status.members
        }
        quiet = {it.member: {**members[it.member], "silent_s": _silence(it, late_s)} for it in status.members}
        shown = [it.member for it in sorted(status.members, key=_by_interest)[:MAX_MEMBERS]]
        record: dict[str, Any] = {
            "jobs": [_brief(it) for it in jobs],
            "cluster": {**records.totals(status), **self._about, "counts": _counts(members.values(), states)},
        }
        record["cluster"]["members"] = [members[it] for it in shown]
        text = encode({**record, "time": now})
        record["cluster"]["members"] = [quiet[it] for it in shown]
        return Overview(text, encode(record), members, quiet)

    def _read_cluster(self) -> tuple[ClusterStatus, Counter[JobState], float]:
        """Returns the status of all members, in order of id, the number of jobs in each state, and the time.

        It takes the lock for a few members at a time: an open page asks every second, for thousands of members.
        """
        with self._coordinator.reading() as (machine, now):
            members, states = machine.listing.all_members(), machine.listing.job_states()
            counts, interval_s = machine.counts, machine.members.heartbeat_interval_s
        members.sort(key=lambda member: member.id)
        found: list[MemberStatus] = []
        while len(found) < len(members):
            with self._coordinator.reading() as (machine, _):
                found += machine.listing.statuses(members[len(found) : len(found) + _MEMBERS_AT_A_TIME], now)
        return ClusterStatus(counts.cluster, counts.generation, tuple(found), interval_s), states, now

    def knows(self, name: str) -> bool:
        """Returns whether a job of that name exists."""
        try:
            with self._coordinator.reading() as (machine, _):
                machine.job(name)
        except errors.UnknownJob:
            return False
        return True

    def job(self, name: str) -> bytes:
        """Returns a job as JSON."""
        with self._coordinator.reading() as (machine, now):
            status = machine.job(name).status(now)
        return encode(_whole(status))

    def data(self, name: str) -> bytes:
        """Returns the account of a job's data as JSON."""
        with self._coordinator.reading() as (machine, _):
            account = machine.job(name).data()
        return encode(records.data(name, account))

    @property
    def cached_timings(self) -> int:
        """The number of jobs whose timings are cached."""
        return len(self._timings)

    def timings(self, name: str) -> bytes:
        """Returns the timings of a job's latest steps as JSON. Calls within a second get the same text."""
        with self._coordinator.reading() as (machine, now):
            job = machine.job(name)
            fresh = {it: made for it, made in self._timings.items() if now - made[0] < _TIMINGS_FOR_S}
            if name in fresh:
                return fresh[name][1]
            timings = job.timings()
        last = max(1, min(_STEPS, _STEPS_IN_ALL // max(1, len(timings.steps))))
        text = encode(records.timings(name, timings, last))
        self._timings = {**fresh, name: (now, text)}
        return text

    def groups(self, _token: str = "") -> bytes:
        """Returns the elastic groups as JSON. The first ones have the times of their ranks, up to a limit."""
        found = self._groups.statuses(_RANKS)
        return encode({"groups": [group_records.group(it) for it in found]})

    def checkpoints(self, name: str) -> bytes:
        """Returns the newest stored checkpoints of a job as JSON.

        Raises:
            UnknownJob: The job does not exist.
            StorageFailed: The checkpoint storage cannot be read.
        """
        with self._coordinator.reading() as (machine, _):
            machine.job(name)
        if self._catalogue is None:
            return encode({"name": name, "folder": "", "checkpoints": []})
        numbers = self._catalogue.numbers(name)[: -MAX_CHECKPOINTS - 1 : -1]
        found = [_checkpoint(self._catalogue.found(name, number)) for number in numbers]
        return encode({"name": name, "folder": self._catalogue.folder.url, "checkpoints": found})

    def cancel(self, name: str, principal: Principal | None) -> bytes:
        """Cancels a job for a caller, and returns its record as JSON; raises as `submitters.check_submitter`."""
        return encode(_whole(self._coordinator.handle(events.JobCancelled(name), changes(principal, name))))

    def checkpoint(self, name: str, principal: Principal | None) -> bytes:
        """Begins a checkpoint of a job for a caller, and returns the number of the attempt as JSON.

        Raises as `submitters.check_submitter`.
        """
        attempt = self._coordinator.handle(events.CheckpointRequested(name), changes(principal, name))
        return encode({"attempt": attempt.number})

    def update(self, name: str, mark: EventPosition) -> JobUpdate:
        """Returns the changes of a job since a mark.

        Raises:
            UnknownJob: The job does not exist.
        """
        with self._coordinator.reading() as (machine, now):
            job = machine.job(name)
            status = job.status(now)
            submission = round(status.submitted_at * 1e6)
            fresh = mark.submission != submission or not mark.sequence
            newer, ended = job.log.copied_after(0 if fresh else mark.sequence), job.log.ended
        found = newer()
        last = found[-1].sequence if found else 0 if fresh else mark.sequence
        picked = downsampled(found)
        chunks: list[tuple[EventPosition, bytes]] = []
        for start in range(0, len(picked), _EVENTS):
            some = picked[start : start + _EVENTS]
            chunks.append(
                (EventPosition(submission, some[-1].sequence), encode([records.event(event) for event in some]))
            )
        return JobUpdate(EventPosition(submission, last), fresh, _whole(status), now, tuple(chunks), ended)


def _silence(member: MemberStatus, late_s: float) -> int:
    """Returns the whole seconds since the last heartbeat of a late live member, and 0 for any other member."""
    return int(member.silent_s) if member.alive and member.silent_s > late_s else 0


def _counts(members: Iterable[dict[str, Any]], jobs: Counter[JobState]) -> dict[str, Any]:
    """Counts all members and jobs, in total and by state, since a page shows only some of them."""
    states: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for it in members:
        states[it["role"]][it["state"]] += 1
    return {
        "members": sum(found.total() for found in states.values()),
        "members_by_state": {role: dict(sorted(found.items())) for role, found in sorted(states.items())},
        "jobs": jobs.total(),
        "jobs_by_state": dict(sorted((state.value, count) for state, count in jobs.items())),
    }


def _by_interest(member: MemberStatus) -> tuple[bool, str, str]:
    return not member.alive, member.role.value, member.member


def _whole(status: JobStatus) -> dict[str, Any]:
    """Returns the record of a job for its own page, with the fields of its specification."""
    return {**records.job(status), "specification": records.specification(status.job)}


def _brief(status: JobStatus) -> dict[str, Any]:
    """Returns the record of a job for a list: without its settings, and with only the end of its reason."""
    record = records.listed_job(status)
    return {**record, "reason": status.reason.strip().rpartition("\n")[2][-_REASON_CHARACTERS:]}


def _checkpoint(found: Manifest | errors.ShoalError) -> dict[str, Any]:
    if isinstance(found, errors.ShoalError):
        return records.damaged_checkpoint(found)
    return records.stored_checkpoint(described(found), variables=False)


__all__ = ["MAX_CHECKPOINTS", "MAX_JOBS", "MAX_MEMBERS", "EventPosition", "JobUpdate", "Overview", "Reader"]
