"""Supervisor of `shoal up`, without processes: it restarts dead roles after growing pauses, and finally gives up."""

import json
from typing import Any, cast

import pytest

from shoal import errors
from shoal._cli.cluster import Supervisor, announce, up
from shoal._cli.output import Output
from shoal._role import supervision
from shoal.local_cluster import LocalCluster


class Role:
    def __init__(self, role: str, index: int, pid: int) -> None:
        self.role, self.index, self.pid = role, index, pid
        self.name, self.metrics = f"{role}-{index}", "h:1"
        self.returncode: int | None = None

    def tail(self) -> str:
        return "cannot bind: in use"


class Cluster:
    """Two servers; `lives` says whether a server that is started again lives."""

    def __init__(self) -> None:
        self.roles = {("server", 0): Role("server", 0, 1), ("server", 1): Role("server", 1, 2)}
        self.restarts: list[int] = []
        self.lives = True

    @property
    def processes(self) -> list[Role]:
        return list(self.roles.values())

    def restart(self, role: str, index: int) -> Role:
        self.restarts.append(index)
        self.roles[role, index] = again = Role(role, index, 10 + len(self.restarts))
        if not self.lives:
            again.returncode = 3
            raise errors.StartFailed("it ended")
        return again


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def supervisor(cluster: Cluster, clock: Clock) -> Supervisor:
    return Supervisor(cast(LocalCluster, cluster), Output(as_json=True), clock)


def said(capsys: pytest.CaptureFixture[str]) -> list[Any]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_role_that_dies_is_started_again_after_a_pause(
    supervisor: Supervisor, cluster: Cluster, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor.poll()
    cluster.roles["server", 1].returncode = -9
    supervisor.poll()
    assert said(capsys) == [{"event": "ended", "name": "server-1", "exit_status": -9, "restart_in_s": 1.0}]
    clock.now = 0.9
    supervisor.poll()
    assert cluster.restarts == []
    clock.now = 1.0
    supervisor.poll()
    assert cluster.restarts == [1]
    assert said(capsys) == [{"event": "restarted", "name": "server-1", "pid": 11, "metrics": "h:1"}]
    supervisor.poll()
    assert said(capsys) == []


def test_one_that_does_not_live_is_abandoned_with_its_last_lines(
    cluster: Cluster, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = Supervisor(cast(LocalCluster, cluster), Output(as_json=False), clock)
    cluster.lives = False
    cluster.roles["server", 0].returncode = 3
    delays: list[float] = []
    before = 0.0
    for _ in range(1000):
        supervisor.poll()
        if len(cluster.restarts) > len(delays):
            delays.append(clock.now - before)
            before = clock.now
        clock.now += 0.5
    assert delays == [1, 2.5, 4.5, 8.5], "each is noticed half a second later"
    assert len(cluster.restarts) == supervision.MAX_DEATHS - 1
    shown = capsys.readouterr().out
    assert shown.count("ended with exit status 3") == supervision.MAX_DEATHS
    assert shown.rstrip().endswith("start it again. End of its log:\ncannot bind: in use")


def test_a_long_life_is_a_new_beginning(
    supervisor: Supervisor, cluster: Cluster, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3 * supervision.MAX_DEATHS):
        clock.now += supervision.STEADY_S
        cluster.roles["server", 0].returncode = -11
        supervisor.poll()
        clock.now += supervision.FIRST_PAUSE_S
        supervisor.poll()
    assert len(cluster.restarts) == 3 * supervision.MAX_DEATHS


def test_one_that_was_asked_to_stop_stays_away(
    supervisor: Supervisor, cluster: Cluster, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.roles["server", 0].returncode = 0
    for _ in range(100):
        clock.now += 1
        supervisor.poll()
    assert cluster.restarts == []
    assert [it["restart_in_s"] for it in said(capsys)] == [None]


def test_the_help_gives_the_rule_by_which_deaths_are_in_a_row() -> None:
    shown = " ".join((up.__doc__ or "").split())
    policy = supervision.RestartPolicy(0.0)
    deaths = [policy.died(1, 0.0) for _ in range(supervision.MAX_DEATHS)]
    assert [death.restart_at for death in deaths] == [1.0, 2.0, 4.0, 8.0, None]
    rule = f"after 1 s, and after 2, 4 and 8 s if it keeps dying within {supervision.STEADY_S:g} s."
    assert f"{rule} After the fifth death the role is not restarted, and the others continue." in shown
    assert supervision.MAX_DEATHS == 5


def test_a_cluster_that_is_ready_says_where_its_metrics_are_and_how_to_begin(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"address": "h:7070", "page": "http://h:7080", "metrics": {"coordinator": "h:9"}}.items():
        setattr(cluster, name, value)
    announce(cast(LocalCluster, cluster), Output(as_json=False))
    shown = capsys.readouterr().out
    assert "Watch it at http://h:7080\nMetrics of the coordinator: http://h:9/metrics\n" in shown
    assert "python SCRIPT    # a script that calls shoal.connect()" in shown, "there are no workers for a program"
