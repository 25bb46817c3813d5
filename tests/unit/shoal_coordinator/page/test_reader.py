"""Answers that open pages request repeatedly: their sizes, how often they are computed, and the holds of the lock."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from shoal import errors
from shoal.status import MemberStatus, Role, StepTiming, Timings
from shoal_coordinator.cluster import Cluster, ListedJob
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.groups import GroupRegistry, RankCandidate
from shoal_coordinator.messages import Registration, events
from shoal_coordinator.page.reader import Reader
from support.clusters.cluster_rig import Rig


class FakeCoordinator:
    """One with the timings of jobs, by name."""

    def __init__(self, **jobs: Timings) -> None:
        self.now, self.jobs = 1_000.0, jobs
        self.made: list[str] = []

    @contextmanager
    def reading(self) -> "Iterator[tuple[FakeCoordinator, float]]":
        yield self, self.now

    def job(self, name: str) -> "FakeJob":
        if name not in self.jobs:
            raise errors.UnknownJob(name)
        return FakeJob(self, name)


class FakeJob:
    def __init__(self, coordinator: FakeCoordinator, name: str) -> None:
        self.coordinator, self.name = coordinator, name

    def timings(self) -> Timings:
        self.coordinator.made.append(self.name)
        return self.coordinator.jobs[self.name]


def reader_of(coordinator: FakeCoordinator) -> Reader:
    return Reader(cast(Coordinator, coordinator), None, {})


def timings(workers: int, steps: int = 100) -> Timings:
    """Returns timings of workers whose latest 32 steps are fast."""
    found = tuple(StepTiming(step, 1.0, compute=0.1 if step >= steps - 32 else 0.5) for step in range(steps))
    return Timings({f"w{number}": found for number in range(workers)})


@pytest.mark.parametrize(("workers", "each"), [(0, 0), (2, 32), (128, 32), (256, 16)])
def test_a_page_gets_the_latest_steps_and_medians_of_all_kept_steps(workers: int, each: int) -> None:
    told = json.loads(reader_of(FakeCoordinator(a=timings(workers))).timings("a"))
    assert len(told["workers"]) == workers
    for worker in told["workers"]:
        assert [step["step"] for step in worker["steps"]] == [*range(100 - each, 100)]
        assert worker["typical"]["compute"] == pytest.approx(0.3), "a median of 64"


def test_pages_that_ask_within_a_second_have_the_same_answer() -> None:
    coordinator = FakeCoordinator(a=timings(1), b=timings(2))
    reader = reader_of(coordinator)
    first = reader.timings("a")
    coordinator.jobs["a"] = timings(3)
    coordinator.now += 0.9
    assert reader.timings("a") == first
    reader.timings("b")
    assert coordinator.made == ["a", "b"]
    coordinator.now += 0.2
    assert len(json.loads(reader.timings("a"))["workers"]) == 3
    assert reader.cached_timings == 2
    coordinator.now += 1.0
    reader.timings("b")
    assert reader.cached_timings == 1, "those that nobody asks for are not kept"
    del coordinator.jobs["b"]
    with pytest.raises(errors.UnknownJob):
        reader.timings("b")


def test_the_groups_have_their_ranks_up_to_a_limit() -> None:
    groups = GroupRegistry()
    for name in ("a", "b", "c", "d", "e"):
        for number in range(256):
            groups.join(name, RankCandidate(str(number), f"h:{number}"), ranks=256, min_ranks=1)
    found = json.loads(Reader(cast(Coordinator, FakeCoordinator()), None, {}, groups).groups())["groups"]
    assert [it["ranks"] and len(it["ranks"]) for it in found] == [256, 256, 256, 256, None]
    assert json.loads(reader_of(FakeCoordinator()).groups()) == {"groups": []}


class LockedRig:
    """A coordinator that counts the statuses of members made in each hold of its lock."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig, self.made = rig, [0]
        status = Member.status

        def counted(member: Member, now: float, job: str) -> MemberStatus:
            self.made[-1] += 1
            return status(member, now, job)

        monkeypatch.setattr(Member, "status", counted)

    @contextmanager
    def reading(self) -> Iterator[tuple[Cluster, float]]:
        self.made.append(0)
        yield self.rig.machine, self.rig.now
        self.made.append(0)

    def list_jobs(self, count: int, before: int | None = None) -> list[ListedJob]:
        return self.rig.machine.listing.jobs(self.rig.now, count, before)


def test_a_page_holds_the_lock_for_a_few_members_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig().servers("s0").workers("w0")
    for number in range(1_000):
        registration = Registration(Role.WORKER, f"x{number:04}", f"p-{number}")
        rig.machine.handle(events.RegistrationReceived(registration), rig.now)
    coordinator = LockedRig(rig, monkeypatch)
    overview = reader_of(cast(Any, coordinator)).overview()
    assert list(overview.members) == sorted(member.id for member in rig.machine.members)
    assert sum(coordinator.made) == 1_002
    assert max(coordinator.made) <= 200
