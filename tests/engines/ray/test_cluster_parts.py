"""The driver's part of a cluster on Ray, without Ray: its end, and the choice of workers to remove."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from shoal import errors
from shoal.status import Role

pytest.importorskip("ray", reason="Ray is not installed")
RayCluster: Any = importlib.import_module("shoal.ray").RayCluster
NAMES = ["coordinator", "server-0", "worker-0", "worker-1", "worker-2"]


class Roles:
    """The actors of a cluster. Each step of its end is noted, and fails if it is in `failing`."""

    def __init__(self, steps: list[str], failing: Sequence[str] = ()) -> None:
        self.handles, self.steps, self.failing = dict.fromkeys(NAMES), steps, failing

    def step(self, name: str) -> None:
        self.steps.append(name)
        if name in self.failing:
            raise RuntimeError(f"{name} failed")

    def refuse(self) -> None:
        self.step("refuse")

    def end(self, names: Sequence[str], how: str, timeout_s: float) -> None:
        self.step(f"{how} {' '.join(names)}")

    def close(self) -> None:
        self.step("close")


def test_each_step_of_the_end_is_done_although_others_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, steps = RayCluster(), list[str]()
    failing = ("stop worker-0 worker-1 worker-2", "stop server-0", "close")
    monkeypatch.setattr(cluster, "_roles", Roles(steps, failing))
    monkeypatch.setattr(cluster, "_certificates", SimpleNamespace(remove=lambda: steps.append("remove")))
    monkeypatch.setattr(cluster, "_scaler", SimpleNamespace(stop=lambda timeout_s: steps.append("scaler")))
    with pytest.raises(RuntimeError):
        cluster.stop()
    assert steps == ["refuse", "scaler", *failing[:2], "stop coordinator", "close", "remove"]
    cluster.stop()
    assert steps[-1] == "remove", "the second end does nothing"
    with pytest.raises(errors.NotConfigured):
        _ = cluster.actors


def test_a_worker_that_starts_again_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, steps = RayCluster(), list[str]()
    members = [SimpleNamespace(member="worker-0", job=""), SimpleNamespace(member="worker-1", job="digits")]

    @contextmanager
    def client() -> Iterator[Any]:
        yield SimpleNamespace(status=lambda: SimpleNamespace(alive=lambda role: members if role is Role.WORKER else []))

    monkeypatch.setattr(cluster, "_roles", Roles(steps))
    monkeypatch.setattr(cluster, "client", client)
    cluster.remove_worker()
    assert steps == ["leave worker-0"], "worker-2 is not alive now, and may have a job"


def test_only_workers_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, steps = RayCluster(), list[str]()
    monkeypatch.setattr(cluster, "_roles", Roles(steps))
    for name in ("server-0", "coordinator", "worker-7"):
        with pytest.raises(errors.BadRequest, match=f"there is no worker '{name}'"):
            cluster.remove_worker(name)
    assert not steps
