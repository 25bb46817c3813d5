"""The task of a member that receives a signal. The test supplies the role and the time."""

import signal
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shoal
from shoal import errors
from shoal.slurm import _member_task
from shoal.slurm._allocation import Allocation
from shoal.slurm._member_task import MemberTask
from shoal.slurm._run_folder import Announcement, Phase, RunFolder, RunPlan
from shoal.slurm._signals import EndSignals

PLAN = RunPlan(job=shoal.Job("digits:Digits", name="digits"), servers=1, workers=1, path=("/programs",))
PLACE = Allocation(run="7", attempt="7.0", rank=1, tasks=3)


class Role:
    """A role that leaves as soon as it is asked to."""

    def __init__(self, *_: object, **__: object) -> None:
        self.left = False

    def drain(self) -> None:
        self.left = True

    def poll(self) -> None:
        pass

    def __enter__(self) -> "Role":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    found.prepare(PLAN)
    monkeypatch.setattr(_member_task, "RoleRunner", Role)
    monkeypatch.setattr(socket, "create_connection", lambda *_: nullcontext())
    return found


def run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, phases: dict[float, Phase], **options: Any) -> float:
    """Runs a server that receives a signal at second 20, and returns when it has ended.

    Args:
        folder: the folder of the run.
        monkeypatch: replaces the time.
        phases: when task 0 announces which phase.
        options: further arguments of the task.
    """
    signals, now = EndSignals(), 0.0
    folder.announce(said := Announcement(run="7", attempt="7.0", address="head:1"))

    def sleep(_: float) -> None:
        nonlocal now
        now += 10.0
        if now == 20.0:
            signals.received.add(signal.SIGTERM)
        if now in phases:
            folder.announce(Announcement(run="7", attempt="7.0", address=said.address, phase=phases[now]))

    monkeypatch.setattr(_member_task, "time", SimpleNamespace(sleep=sleep))
    MemberTask("server", 0, PLAN, PLACE, folder, signals, clock=lambda: now, **options).run()
    return now


def test_a_server_ends_when_task_0_has_received_the_signal_too(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(folder, monkeypatch, {60.0: Phase.STOPPING}) == 60.0


def test_a_server_that_alone_receives_the_signal_ends_the_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the job would wait for it until the time limit."""
    with pytest.raises(errors.StartFailed, match="server-0 received a signal to end, but task 0 did not"):
        run(folder, monkeypatch, {})


def test_a_worker_of_another_allocation_leaves_alone(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(folder, monkeypatch, {}, helper="worker-8-0-0") == 20.0
