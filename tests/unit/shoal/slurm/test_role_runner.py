"""Role of a task that dies again and again, or does not become ready. The test supplies the time."""

import itertools
import os
from pathlib import Path

import psutil
import pytest

from shoal import errors
from shoal.slurm._role_runner import RoleRunner
from support.waiting import wait_until


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_role_is_started_again_after_growing_pauses_and_then_abandoned(tmp_path: Path) -> None:
    clock, starts, others = Clock(), list[float](), psutil.Process().children()

    def flags(earlier: str) -> list[str]:
        assert not earlier
        starts.append(clock.now)
        return ["--nonsense"]

    def look() -> bool:
        """Looks at the role, and lets time pass while no process runs. Returns False, since the role never works."""
        role.poll()
        if not set(psutil.Process().children()) - set(others):
            clock.now += 0.25
        return False

    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    with (
        RoleRunner("server", "server-0", flags, environment, start_timeout_s=1.0, clock=clock) as role,
        pytest.raises(errors.StartFailed, match="server-0 ended with exit status 2, 5 times in a row, and is not"),
    ):
        wait_until(look, timeout_s=60, what="the end of the attempts")
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == [1.0, 2.0, 4.0, 8.0]


def test_a_role_that_is_not_ready_in_time_ends_the_task(tmp_path: Path) -> None:
    clock, environment = Clock(), {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    flags = ["--coordinator", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--name", "worker-0"]
    with RoleRunner("worker", "worker-0", lambda _: flags, environment, start_timeout_s=5, clock=clock) as role:
        role.poll()
        clock.now = 6.0
        with pytest.raises(errors.StartFailed, match="worker-0 was not ready after 5 s"):
            role.poll()


def test_a_role_that_has_died_is_not_started_again_when_it_should_leave(tmp_path: Path) -> None:
    clock, environment = Clock(), {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    starts: list[float] = []

    def flags(_: str) -> list[str]:
        starts.append(clock.now)
        return ["--nonsense"]

    def dead() -> bool:
        role.poll()
        return role.dead

    with RoleRunner("server", "server-0", flags, environment, start_timeout_s=5, clock=clock) as role:
        wait_until(dead, timeout_s=60, what="the death of the role")
        role.drain()
        clock.now = 100.0
        role.poll()
        assert role.left
    assert starts == [0.0]
