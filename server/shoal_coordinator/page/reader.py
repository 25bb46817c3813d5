"""What the page says of the cluster, read from the coordinator. It may wait, for a lock, the store or a folder."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from shoal import errors
from shoal._checkpoint import Catalogue, CheckpointStorage, Manifest
from shoal._display import records
from shoal.checkpoints import described
from shoal.status import JobStatus, MemberStatus
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.messages import events
from shoal_coordinator.page.history import downsampled
from shoal_coordinator.page.rates import Rates
from shoal_coordinator.page.responses import encode

# Members and jobs of which a page is told all the time, and checkpoints of a job: the newest.
MAX_MEMBERS, MAX_JOBS, MAX_CHECKPOINTS = 1_000, 200, 100
# Of why a job is where it is, in a list of jobs.
_REASON_CHARACTERS = 300
# Steps of each worker, of which a page draws the latest 24, and of all of them.
_STEPS, _STEPS_IN_ALL = 32, 4_096
# Seconds for which an answer on timings holds: of a thousand workers it is 60 ms of work in the coordinator's process.
_TIMINGS_FOR_S = 1.0
# By which a second sign of life may come late, as from a busy host, and its member is not called so.
_LATE_BY_CHANCE_S = 0.25
# Events in one message.
_EVENTS = 500
_MARK = re.compile(r"([0-9]{1,20})-([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Mark:
    """How much of a job's events a page has had.

    Attributes:
        life: which job of that name: a name may be used again.
        sequence: of the last one.
    """

    life: int = 0
    sequence: int = 0

    @classmethod
    def parse(cls, text: str) -> "Mark":
        """What `str` of a mark gave; nothing, of any other text."""
        found = _MARK.fullmatch(text)
        return cls(int(found[1]), int(found[2])) if found else cls()

    def __str__(self) -> str:
        return f"{self.life}-{self.sequence}"


@dataclass(frozen=True, slots=True)
class Overview:
    """The cluster at a moment.

    Attributes:
        text: JSON of it.
        key: what of it is worth telling again when it is another one: not for how long each has been silent.
        members: their records by id.
        quiet: the same with silences only where they are news, as they are in the key.
    """

    text: bytes
    key: bytes
    members: dict[str, dict[str, Any]]
    quiet: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class JobUpdate:
    """What became of a job since a mark.

    Attributes:
        mark: up to where.
        fresh: the events are all there are, not those behind the mark.
        job: its record.
        time: seconds of Unix time, by the coordinator's clock: when that was so.
        chunks: JSON of lists of events, each with the mark behind it.
        ended: no more events will come.
    """

    mark: Mark
    fresh: bool
    job: dict[str, Any]
    time: float
    chunks: tuple[tuple[Mark, bytes], ...]
    ended: bool


class Reader:
    """Asks the coordinator; from any thread.

    Args:
        coordinator: the shell.
        folder: of checkpoints; None: the cluster has none.
        about: what every page is told beside the cluster: its leases, and what may be done.
        heartbeat_interval_s: between two signs of life of a member.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        folder: CheckpointStorage | None,
        about: dict[str, Any],
        heartbeat_interval_s: float,
    ) -> None:
        self._coordinator = coordinator
        self._catalogue = Catalogue(folder) if folder else None
        self._about = about
        self._late_s = 2 * heartbeat_interval_s + _LATE_BY_CHANCE_S
        self._rates = Rates()
        self._timings: dict[str, tuple[float, bytes]] = {}  # by job: when the answer was made, and it; never changed

    def cluster(self) -> bytes:
        """All members."""
        with self._coordinator.reading() as (machine, now):
            status = machine.status(now)
        return encode({**records.cluster(status, self._late_s), **self._about, "time": now})

    def jobs(self) -> bytes:
        """All jobs, newest first."""
        with self._coordinator.reading() as (machine, now):
            found = machine.jobs(now)
        return encode({"jobs": [records.job(status) for status in found], "time": now})

    def overview(self) -> Overview:
        """The cluster and its jobs, of both as many as fit a page, with what servers do in a second.

        By one thread at a time: rates are of what was seen before.
        """
        with self._coordinator.reading() as (machine, now):
            status, jobs = machine.status(now), machine.jobs(now)
        rates = self._rates.update(status.members, now)
        members = {
            it.member: {
                **records.member(it, self._late_s),
                "rates": asdict(rates[it.member]) if it.member in rates else None,
            }
            for it in status.members
        }
        quiet = {it.member: {**members[it.member], "silent_s": self._silence(it)} for it in status.members}
        shown = [it.member for it in sorted(status.members, key=_by_interest)[:MAX_MEMBERS]]
        record: dict[str, Any] = {
            "jobs": [_brief(it) for it in jobs[:MAX_JOBS]],
            "cluster": {**records.totals(status), **self._about, "counts": _counts(members.values(), jobs)},
        }
        record["cluster"]["members"] = [members[it] for it in shown]
        text = encode({**record, "time": now})
        record["cluster"]["members"] = [quiet[it] for it in shown]
        return Overview(text, encode(record), members, quiet)

    def knows(self, name: str) -> bool:
        """Whether there is a job of that name."""
        try:
            with self._coordinator.reading() as (machine, _):
                machine.job(name)
        except errors.UnknownJob:
            return False
        return True

    def job(self, name: str) -> bytes:
        """A job."""
        with self._coordinator.reading() as (machine, now):
            status = machine.job(name).status(now)
        return encode(_whole(status))

    def data(self, name: str) -> bytes:
        """What became of a job's data."""
        with self._coordinator.reading() as (machine, _):
            account = machine.job(name).data()
        return encode(records.data(name, account))

    def timings(self, name: str) -> bytes:
        """Where the time of a job's latest steps went. Many pages that ask within a second have the same answer."""
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

    def checkpoints(self, name: str) -> bytes:
        """The newest checkpoints of a job that are there.

        Raises:
            UnknownJob: there is no such job.
            StorageFailed: the folder cannot be read.
        """
        with self._coordinator.reading() as (machine, _):
            machine.job(name)
        if self._catalogue is None:
            return encode({"name": name, "folder": "", "checkpoints": []})
        numbers = self._catalogue.numbers(name)[: -MAX_CHECKPOINTS - 1 : -1]
        found = [_checkpoint(self._catalogue.found(name, number)) for number in numbers]
        return encode({"name": name, "folder": self._catalogue.folder.url, "checkpoints": found})

    def cancel(self, name: str) -> bytes:
        """Cancels a job."""
        return encode(_whole(self._coordinator.handle(events.JobCancelled(name))))

    def checkpoint(self, name: str) -> bytes:
        """Begins a checkpoint of a job."""
        attempt = self._coordinator.handle(events.CheckpointRequested(name))
        return encode({"attempt": attempt.number})

    def news(self, name: str, mark: Mark) -> JobUpdate:
        """What became of a job since.

        Raises:
            UnknownJob: there is no such job.
        """
        with self._coordinator.reading() as (machine, now):
            job = machine.job(name)
            status = job.status(now)
            life = round(status.submitted_at * 1e6)
            fresh = mark.life != life or not mark.sequence
            found, ended = job.log.after(0 if fresh else mark.sequence), job.log.ended
        last = found[-1].sequence if found else 0 if fresh else mark.sequence
        picked = downsampled(found)
        chunks: list[tuple[Mark, bytes]] = []
        for start in range(0, len(picked), _EVENTS):
            some = picked[start : start + _EVENTS]
            chunks.append((Mark(life, some[-1].sequence), encode([records.event(event) for event in some])))
        return JobUpdate(Mark(life, last), fresh, _whole(status), now, tuple(chunks), ended)

    def _silence(self, member: MemberStatus) -> int:
        """Whole seconds since the last sign of life, if they are news: of a live one that is late."""
        return int(member.silent_s) if member.alive and member.silent_s > self._late_s else 0


def _counts(members: Iterable[dict[str, Any]], jobs: list[JobStatus]) -> dict[str, Any]:
    """How many there are, of which only so many are shown: in all, and by state."""
    states: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for it in members:
        states[it["role"]][it["state"]] += 1
    return {
        "members": sum(found.total() for found in states.values()),
        "members_by_state": {role: dict(sorted(found.items())) for role, found in sorted(states.items())},
        "jobs": len(jobs),
        "jobs_by_state": dict(sorted(Counter(it.state.value for it in jobs).items())),
    }


def _by_interest(member: MemberStatus) -> tuple[bool, str, str]:
    return not member.alive, member.role.value, member.member


def _whole(status: JobStatus) -> dict[str, Any]:
    """A job on its own page: with its fields as they are shown there."""
    return {**records.job(status), "specification": records.specification(status.job)}


def _brief(status: JobStatus) -> dict[str, Any]:
    """A job in a list: without its settings, and with the end of the reason, which says the most."""
    record = records.job(status)
    del record["settings"]
    return {**record, "reason": status.reason.strip().rpartition("\n")[2][-_REASON_CHARACTERS:]}


def _checkpoint(found: Manifest | errors.ShoalError) -> dict[str, Any]:
    if isinstance(found, errors.ShoalError):
        return records.damaged_checkpoint(found)
    return records.stored_checkpoint(described(found), variables=False)


__all__ = ["MAX_CHECKPOINTS", "MAX_JOBS", "MAX_MEMBERS", "JobUpdate", "Mark", "Overview", "Reader"]
