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
_cluster: Any = importlib.import_module("shoal.ray._cluster")
_flags: Any = importlib.import_module("shoal.ray._flags")
STOPS = ["stop worker-0 worker-1 worker-2", "stop server-0", "stop coordinator"]


class Engine:
    """Stands for Ray: the actors, the certificates and the autoscaler of a cluster.

    Attributes:
        handles: the actors.
        steps: what the cluster did at its end, in order.
        failing: the steps that raise an exception.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.handles, self.steps, self.failing = dict[str, None](), list[str](), list[str]()
        context = SimpleNamespace(namespace="tests", runtime_env={})
        ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context, nodes=list)
        for module in (_cluster, _flags):
            patch.setattr(module, "ray", ray)
        certificates = SimpleNamespace(
            cluster="1a2b", ca=b"", issue=lambda *_: (b"", b""), remove=lambda: self.step("remove")
        )
        scaler = SimpleNamespace(start=lambda: None, stop=lambda _: self.step("autoscaler"))
        patch.setattr(_cluster, "RoleActors", lambda *_: self)
        patch.setattr(_cluster, "ClusterCertificates", lambda: certificates)
        patch.setattr(_cluster, "Autoscaler", lambda *_, **__: scaler)

    def step(self, name: str) -> None:
        self.steps.append(name)
        if name in self.failing:
            raise RuntimeError(f"{name} failed")

    @property
    def workers(self) -> list[str]:
        return [name for name in self.handles if name.startswith("worker-")]

    def name_worker(self) -> str:
        return f"worker-{len(self.workers)}"

    def check_name(self) -> None: ...

    def place(self, wanted: Any, deadline: float, *, wait_for_nodes: bool) -> None: ...

    def launch(self, spec: Any) -> None:
        self.handles[spec.name] = None

    def wait_ready(self, names: Any, deadline: float) -> None: ...

    def refuse(self) -> None:
        self.step("refuse")

    def end(self, names: Sequence[str], how: str, timeout_s: float) -> None:
        self.step(f"{how} {' '.join(names)}")

    def close(self) -> None:
        self.step("close")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


@pytest.fixture
def cluster(engine: Engine) -> Any:
    """A cluster that has started."""
    cluster = _cluster.RayCluster(1, 3, max_workers=4)
    cluster.start()
    return cluster


@pytest.mark.parametrize("failing", [[], STOPS, ["close"], ["autoscaler", STOPS[1], "close"]])
def test_each_step_of_the_end_is_done_although_others_fail(engine: Engine, cluster: Any, failing: list[str]) -> None:
    engine.failing = failing
    try:
        cluster.stop()
    except RuntimeError:
        assert failing
    assert engine.steps == ["refuse", "autoscaler", *STOPS, "close", "remove"]
    cluster.stop()
    assert engine.steps[-1] == "remove", "the second end does nothing"
    with pytest.raises(errors.NotConfigured):
        _ = cluster.actors


def test_a_start_that_fails_ends_what_has_started(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise errors.StartFailed("not ready")

    monkeypatch.setattr(engine, "wait_ready", refuse)
    with pytest.raises(errors.StartFailed, match="not ready"):
        _cluster.RayCluster(1, 3).start()
    assert engine.steps == ["refuse", *STOPS, "close", "remove"]


def test_a_worker_that_starts_again_is_not_idle(engine: Engine, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    members = [SimpleNamespace(member="worker-0", job=""), SimpleNamespace(member="worker-1", job="digits")]

    @contextmanager
    def client() -> Iterator[Any]:
        status = SimpleNamespace(alive=lambda role: members if role is Role.WORKER else [])
        yield SimpleNamespace(status=lambda: status)

    monkeypatch.setattr(cluster, "client", client)
    cluster.remove_worker()
    assert engine.steps == ["leave worker-0"], "worker-2 is not alive now, and may have a job"


def test_a_worker_that_is_coming_is_not_chosen(engine: Engine, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def client() -> Iterator[Any]:
        yield SimpleNamespace(status=lambda: SimpleNamespace(alive=lambda _: []))

    monkeypatch.setattr(cluster, "client", client)
    monkeypatch.setattr(Engine, "workers", property(lambda _: ["worker-0", "worker-1", "worker-2", "worker-9"]))
    cluster.remove_worker()
    assert engine.steps == ["leave worker-2"]


@pytest.mark.parametrize("name", ["server-0", "coordinator", "worker-7"])
def test_only_workers_are_removed(engine: Engine, cluster: Any, name: str) -> None:
    with pytest.raises(errors.BadRequest, match=f"there is no worker '{name}'"):
        cluster.remove_worker(name)
    assert not engine.steps


def test_threads_follow_the_cpus_that_the_user_gave(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    specs: dict[str, Any] = {}
    monkeypatch.setattr(engine, "launch", lambda spec: specs.update({spec.name: spec}))
    given = {"worker": {"CPU": 4.5, "GPU": 1}, "coordinator": {"CPU": 0.2}, "server": {"memory": 1e6}}
    _cluster.RayCluster(1, 2, resources=given).start()
    assert [specs[name].threads for name in ("worker-0", "coordinator", "server-0")] == [4, 1, 0]
    assert specs["server-0"].sharing == 2
