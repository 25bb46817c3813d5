"""The actor of one role, without Ray: what it tries again, and that it starts nothing after its end."""

import errno
import importlib
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal import errors
from shoal._engines import RoleSpec, pause_after_death
from support.waiting import wait_until

# The exit of a process is an exception of its thread here.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
pytest.importorskip("ray", reason="Ray is not installed")
_actor: Any = importlib.import_module("shoal.ray._actor")


class Child:
    """A child process that ends when the test says so."""

    def __init__(self, arguments: list[str], variables: dict[str, str]) -> None:
        self.arguments, self.variables = arguments, variables
        self.ready: dict[str, Any] | None = None
        self.ready_at = 0.0
        self.status: int | None = None
        self.ended = threading.Event()

    def be_ready(self) -> None:
        self.ready_at, self.ready = time.monotonic(), {"pid": 1}

    def end(self, status: int) -> None:
        self.status = status
        self.ended.set()

    def wait(self, timeout_s: float) -> int | None:
        self.ended.wait(timeout_s)
        return self.status

    def stop(self, timeout_s: float) -> None:
        self.end(-9)


class Node:
    """A node with a coordinator somewhere, on which actors start children.

    Attributes:
        returned: whether Ray has started the actor before.
        address: address of the coordinator.
        refusals: errors of the next starts of children.
        exits: whether a process has exited.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.returned, self.address, self.refusals = folder, False, "a:1", list[Exception]()
        self.children: list[Child] = []
        self.exits, self.starting, self.may_start = threading.Event(), threading.Event(), threading.Event()
        self.may_start.set()
        ray = SimpleNamespace(
            get_runtime_context=lambda: SimpleNamespace(
                was_current_actor_reconstructed=self.returned, get_node_id=lambda: "node"
            ),
            util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
            nodes=list,
            exceptions=SimpleNamespace(RayError=RuntimeError),
            get_actor=lambda name, namespace: SimpleNamespace(address=SimpleNamespace(remote=lambda: None)),
            get=lambda reference, timeout: self.address,
        )
        patch.setattr(_actor, "ray", ray)
        patch.setattr(_actor, "claim", lambda *_: folder)
        patch.setattr(_actor, "release", lambda _: None)
        patch.setattr(_actor, "RoleChild", self.start)
        patch.setattr(
            _actor, "os", SimpleNamespace(_exit=self.exit, environ=os.environ, getpid=os.getpid, cpu_count=int)
        )
        for name in ("LOOK_S", "ADDRESS_S", "PAUSE_S"):
            patch.setattr(_actor, name, 0.01)

    def start(self, arguments: list[str], variables: dict[str, str]) -> Child:
        self.starting.set()
        assert self.may_start.wait(20)
        if self.refusals:
            raise self.refusals.pop()
        self.children.append(Child(arguments, variables))
        return self.children[-1]

    def exit(self, status: int) -> None:
        self.exits.set()
        raise SystemExit(status)

    def actor(self, role: str = "worker") -> Any:
        name = role if role == "coordinator" else f"{role}-0"
        spec = RoleSpec(cluster="1a2b", role=role, name=name, ca=b"", certificate=b"", key=b"")
        return _actor.RoleActor(spec, "" if role == "coordinator" else "shoal:coordinator", "tests")

    def child(self, number: int) -> Child:
        wait_until(lambda: len(self.children) > number, what="the start of a child")
        return self.children[number]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_ready_answers_at_once(node: Node) -> None:
    actor = node.actor()
    node.child(0)
    assert actor.ready() == {}
    node.child(0).be_ready()
    assert actor.ready()["node"] == "node"
    actor.stop()
    assert actor.ready() == {}


def test_a_member_that_is_not_ready_follows_a_coordinator_that_moves(node: Node) -> None:
    actor = node.actor()
    node.child(0)
    node.address = "b:2"
    moved = node.child(1)
    assert moved.arguments[moved.arguments.index("--coordinator") + 1] == "b:2"
    assert node.child(0).ended.is_set()
    moved.be_ready()
    assert "failure" not in actor.ready()
    actor.stop()


def test_a_ready_member_follows_too_and_is_tried_again_there(node: Node) -> None:
    actor = node.actor()
    node.child(0).be_ready()
    node.address = "b:2"
    node.child(1).end(1)
    node.child(2).be_ready()
    assert actor.ready()["pid"] == 1
    assert not node.exits.is_set()
    actor.stop()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_a_returned_actor_exits_if_its_child_cannot_start(node: Node, number: int) -> None:
    node.returned = True
    node.refusals = [OSError(number, "cannot fork")]
    node.actor()
    assert node.exits.wait(20), "it must be started again"


def test_a_worker_that_ends_by_itself_is_started_again_and_a_drained_server_is_not(node: Node) -> None:
    server = node.actor("server")
    node.child(0).be_ready()
    node.child(0).end(0)
    wait_until(lambda: "has left the cluster" in server.ready().get("failure", ""), what="the end of the server")
    assert not node.exits.is_set()
    node.actor("worker")
    node.child(1).be_ready()
    node.child(1).end(0)
    assert node.exits.wait(20), "Ray must start it again"


def test_the_first_start_fails_with_the_reason(node: Node) -> None:
    node.refusals = [OSError(errno.ENOMEM, "no memory")]
    actor = node.actor()
    wait_until(actor.ready, what="the failure")
    assert actor.ready()["failure"].startswith("worker-0 could not be started: [Errno 12] no memory")
    assert not node.exits.is_set()


@pytest.mark.parametrize("returned", [True, False])
def test_a_constructor_that_fails_exits_in_a_returned_actor(
    node: Node, monkeypatch: pytest.MonkeyPatch, returned: bool
) -> None:
    def refuse(*_: Any) -> Path:
        raise errors.StartFailed("no space")

    monkeypatch.setattr(_actor, "claim", refuse)
    node.returned = returned
    with pytest.raises(SystemExit if returned else errors.StartFailed):
        node.actor()
    assert node.exits.is_set() == returned


@pytest.mark.parametrize("content", ["", "[1, 2", "{}", '["a", 2, 3]', "[1, 2]", "[70000, 0, 0]"])
def test_ports_that_cannot_be_read_are_chosen_again(node: Node, content: str) -> None:
    (node.folder / "ports.json").write_text(content)
    actor = node.actor("coordinator")
    ports = json.loads((node.folder / "ports.json").read_text())
    assert len({*ports}) == 3
    assert actor.address() == f"127.0.0.1:{ports[0]}"
    assert sorted(it.name for it in node.folder.iterdir()) == ["ports.json"]
    actor.stop()


def test_a_child_that_starts_during_the_end_is_stopped(node: Node) -> None:
    node.may_start.clear()
    actor = node.actor()
    assert node.starting.wait(20)
    end = threading.Thread(target=actor.stop)
    end.start()
    node.may_start.set()
    end.join(20)
    assert all(child.ended.is_set() for child in node.children)
    assert len(node.children) == 1


def test_no_child_starts_after_the_end(node: Node) -> None:
    node.address = ""
    actor = node.actor()
    actor.stop()
    node.address = "a:1"
    assert not node.children


def test_a_role_that_keeps_dying_is_started_later_each_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    backoffs: list[float] = []

    def note(folder: Path, lived_s: float) -> float:
        backoffs.append(pause_after_death(folder, lived_s))
        return 0.0

    monkeypatch.setattr(_actor, "pause_after_death", note)
    for number in range(4):
        node.returned = number > 0
        actor = node.actor()
        node.child(number).be_ready()
        node.child(number).end(1)
        wait_until(lambda: len(backoffs) > number, what="the end of the actor")  # noqa: B023
        actor.stop()
    assert backoffs == [1, 2, 4, 8]


def test_a_number_of_threads_from_ray_is_left_out_and_that_of_a_user_stays(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_actor.Path, "read_bytes", lambda _: b"PATH=/bin\0MKL_NUM_THREADS=3\0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    actor = node.actor()
    found = node.child(0).variables
    assert "OMP_NUM_THREADS" not in found
    assert found["MKL_NUM_THREADS"] == "3"
    actor.stop()
