"""Heartbeat interval that the coordinator sets: its bounds, and that members that keep it are never lost."""

import random

import pytest
from typer.testing import CliRunner

from shoal._cli.app import app
from shoal.consistency import Synchronous
from shoal.job import Job
from shoal.status import Role
from shoal_coordinator.cluster import ClusterPolicy, membership
from shoal_coordinator.cluster.heartbeat_interval import (
    CALLS_PER_S,
    LONGEST_S,
    heartbeat_interval_s,
    interval_told_s,
)
from shoal_coordinator.cluster.member import Member
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.messages import Registration, events
from support.clusters.cluster_rig import Rig

START = 1_000.0


def worker(number: int) -> Registration:
    return Registration(Role.WORKER, f"w{number}", f"p{number}")


@pytest.mark.parametrize(
    ("members", "timeout_s", "interval_s"),
    [
        (0, 5.0, 0.5),
        (170, 5.0, 0.5),
        (340, 5.0, 1.0),
        (850, 10.0, 2.5),
        (1_000, 5.0, 5.0 / 3),  # of the timeout
        (100_000, 300.0, LONGEST_S),
        (1_000, 1.2, 0.5),  # the operator's choice stays
    ],
)
def test_bounds(members: int, timeout_s: float, interval_s: float) -> None:
    assert heartbeat_interval_s(members, timeout_s, 0.5) == pytest.approx(interval_s)


def test_a_server_of_any_cluster_learns_of_a_revoked_token_within_five_seconds() -> None:
    for interval_s in (0.5, 3.0, 4.9, LONGEST_S):  # a heartbeat comes after at most one interval; see HeartbeatPace
        assert interval_told_s(interval_s, server=True) == min(interval_s, 2.0)
        # A server closes idle lanes of revoked tokens with its second heartbeat, and the first may be late.
        assert 2 * interval_told_s(interval_s, server=True) <= 4.0
        assert interval_told_s(interval_s, server=False) == interval_s


@pytest.mark.parametrize("timeout_s", [5.0, 10.0, 60.0])
def test_a_thousand_workers_on_a_hundred_servers_learn_of_a_cancelled_job_within_three_seconds(
    timeout_s: float,
) -> None:
    latest_report, least_report = 0.88, 0.80  # parts of the interval; see HeartbeatPace
    interval_s = heartbeat_interval_s(1_100, timeout_s, 0.5)
    assert latest_report * interval_s <= 2.85
    assert 1_100 / interval_s <= 2 * CALLS_PER_S
    if timeout_s >= 10:
        assert 1_000 / (least_report * interval_s) <= 400


@pytest.mark.parametrize("seed", range(3))
def test_members_that_keep_to_the_interval_are_never_lost(seed: int) -> None:
    """They come and go in crowds, and the interval changes with them. The ticker looks every half second."""
    chance, timeout_s = random.Random(seed), 6.0
    members = Membership(timeout_s)
    due: dict[str, tuple[float, int]] = {}
    now = START
    for _ in range(80):
        now += 0.5
        while due and (first := min(due, key=lambda name: due[name][0])) and due[first][0] <= now:
            at, life = due[first]
            members.mark_alive(first, life, at)
            due[first] = at + members.heartbeat_interval_s, life
        assert members.expire(now) == []
        if chance.random() < 0.1:
            for number in range(chance.randrange(900)):
                member = members.register(worker(number), now)
                due[member.id] = now + members.heartbeat_interval_s, member.incarnation
        if chance.random() < 0.1:
            for name in chance.sample(sorted(due), len(due) // 2):
                members.leave(name, due.pop(name)[1], now)
        members.validate()


def test_members_of_an_earlier_coordinator_with_a_longer_timeout_have_time_to_return() -> None:
    before, crowd = Membership(60.0), 1_700
    lives = [before.register(worker(number), START) for number in range(crowd)]
    told_s = before.heartbeat_interval_s
    assert told_s == 5.0
    members = Membership(2.0)
    members.restore((Member.from_proto(member.to_proto()) for member in lives), crowd, START)
    members.validate()
    assert members.expire(START + told_s + membership.RETURN_S) == []
    assert members.heartbeat_interval_s == pytest.approx(2.0 / 3)


def test_a_report_shows_that_its_worker_is_alive() -> None:
    rig = Rig().servers("s0").workers("w0", "w1")
    rig.submit(Job("m:f", name="a", workers=2, consistency=Synchronous()))
    rig.start("a", "w0", "w1")
    for step in range(1, 20):
        rig.now += 1.0
        rig.beat("s0", "w1")
        rig.report("a", "w0", step=step, accepted=step)
        rig.handle(events.TimePassed())
    assert rig.machine.members.is_alive("w0")
    rig.now += 1.0
    [silent_s] = [it.silent_s for it in rig.machine.status(rig.now).members if it.member == "w0"]
    assert silent_s == 1.0


def test_a_step_that_is_reported_late_is_no_hang() -> None:
    rig = Rig(ClusterPolicy(heartbeat_timeout_s=30.0, heartbeat_interval_s=2.6)).servers("s0").workers("w0", "w1")
    rig.submit(Job("m:f", name="a", workers=2, consistency=Synchronous(), step_timeout_s=1))
    rig.start("a", "w0", "w1")
    for step in range(1, 4):
        rig.report("a", "w0", step=2 * step, accepted=2 * step)
        rig.report("a", "w1", step=2 * step - 1, accepted=2 * step - 1)
        rig.now += 2.5
        rig.handle(events.TimePassed())
    assert set(rig.machine.job("a").workers) == {"w0", "w1"}
    rig.now += 2.0
    rig.handle(events.TimePassed())
    assert set(rig.machine.job("a").workers) == {"w0"}


def test_help_names_the_number_of_members_for_each_second() -> None:
    found = CliRunner().invoke(app, ["coordinator", "--help"], env={"COLUMNS": "200"})
    assert f"one second for each {CALLS_PER_S:.0f} members" in " ".join(found.output.replace("│", " ").split())
