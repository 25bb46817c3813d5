"""Flags and environment of a local cluster's roles, without processes."""

import socket
from pathlib import Path
from typing import Any

import pytest

from shoal import errors, local_cluster
from shoal.local_cluster import LocalCluster


class Role:
    """A role that is ready at once, at ports that it was given or else chose."""

    started: list[list[str]]
    pid = 1

    def __init__(self, role: str, index: int, flags: list[str], **_options: Any) -> None:
        self.role, self.index, self.name = role, index, f"{role}-{index}"
        self.started.append(list(flags))
        self.address, self.page = (self.got(flags, it) for it in ("--listen", "--page-listen"))
        self.page = self.page and f"http://{self.page}"
        self.metrics = self.got(flags, "--metrics-listen")

    @staticmethod
    def got(flags: list[str], flag: str) -> str:
        """What it says of where it is: an address that others reach."""
        asked = flags[flags.index(flag) + 1] if flag in flags else ""
        host, _, port = asked.rpartition(":")
        return f"{'127.0.0.1' if host == '0.0.0.0' else host}:{4567 if port == '0' else port}" if asked else ""

    def wait_ready(self, seconds: float) -> None:
        pass

    def kill(self) -> None:
        pass

    def reap(self, seconds: float) -> None:
        pass

    def ask_to_stop(self) -> None:
        pass


class Forks:
    """A fork server without a process."""

    environments: list[dict[str, str]]
    running = True

    def __init__(self, env: dict[str, str], **_options: Any) -> None:
        self.environments.append(env)

    def load(self, role: str) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The flags of each coordinator that was started."""
    flags: list[list[str]] = []
    monkeypatch.setattr(Role, "started", flags, raising=False)
    monkeypatch.setattr(Forks, "environments", [], raising=False)
    monkeypatch.setattr(local_cluster, "RoleProcess", Role)
    monkeypatch.setattr(local_cluster, "ForkServer", Forks)
    return flags


def value_of(flags: list[str], flag: str) -> str:
    return flags[flags.index(flag) + 1]


def test_restarted_coordinator_keeps_its_addresses(started: list[list[str]]) -> None:
    with LocalCluster(0, 0, listen="0.0.0.0:0", page_listen="0.0.0.0:0") as cluster:
        address, page, metrics = cluster.address, cluster.page, cluster.process("coordinator").metrics
        assert metrics != "127.0.0.1:4567", "its port is known before it starts"
        cluster.restart("coordinator")
        assert (cluster.address, cluster.page) == (address, page)
        assert cluster.process("coordinator").metrics == metrics
        assert [value_of(started[-1], flag)[:8] for flag in ("--listen", "--page-listen")] == ["0.0.0.0:"] * 2


@pytest.mark.usefixtures("started")
def test_nobody_gets_the_port_of_a_coordinator_that_is_down() -> None:
    with LocalCluster(0, 0) as cluster:
        here = ("127.0.0.1", int(cluster.address.rpartition(":")[2]))
        with socket.socket() as by_chance, pytest.raises(OSError, match="in use"):
            by_chance.bind(here)
        socket.create_server(here).close()  # as the coordinator does, by name
    with socket.socket() as later:
        later.bind(here)


def test_restarted_coordinator_without_a_page_has_none(started: list[list[str]]) -> None:
    with LocalCluster(0, 0, page_listen="") as cluster:
        cluster.restart("coordinator")
    assert value_of(started[-1], "--page-listen") == ""


def test_restarted_server_takes_any_port(started: list[list[str]]) -> None:
    with LocalCluster(1, 0) as cluster:
        cluster.restart("server")
        assert value_of(started[-1], "--listen") == "127.0.0.1:0"
        assert "--page-listen" not in started[-1]


@pytest.mark.usefixtures("started")
def test_local_cluster_names_its_roles_by_flags_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may run where TF_CONFIG or a pod's name says who its own process is."""
    monkeypatch.setenv("SHOAL_POD_NAME", "notebook-0")
    env = {"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}', "KEPT": "1"}
    with LocalCluster(0, 0, env=env, checkpoints=tmp_path / "a" / "b", store=tmp_path / "c" / "jobs.db"):
        assert (tmp_path / "a" / "b").is_dir()
        assert (tmp_path / "c").is_dir()
    (environment,) = Forks.environments
    assert environment["KEPT"] == "1"
    assert not {"TF_CONFIG", "SHOAL_POD_NAME"} & environment.keys()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_of_programs_may_be_given_alone(
    started: list[list[str]], tmp_path: Path, kind: type, several: bool
) -> None:
    folder = kind(tmp_path)
    with LocalCluster(0, 1, path=[folder] if several else folder, allow_programs="vision.*", trainer_env="A=b"):
        [worker] = [flags for flags in started if "--path" in flags]
    assert (worker.count("--path"), value_of(worker, "--path")) == (1, str(tmp_path))
    assert (worker.count("--allow-program"), value_of(worker, "--allow-program")) == (1, "vision.*")
    assert (worker.count("--trainer-env"), value_of(worker, "--trainer-env")) == (1, "A=b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nope"}, r"path 'nope' is not a folder \(/.*/nope\); create it, or name another one"),
        ({"path": [".", "nope"]}, "path 'nope' is not a folder"),
        ({"path": __file__}, "is not a folder"),
        ({"path": 5}, "path is 5; give a folder, such as 'examples', or a list of folders"),
        ({"path": [5]}, "path is 5; give a folder"),
        ({"path": None}, "path is None; give a folder"),
        ({"servers": "2"}, "servers is '2'; it must be a whole number, 0 or more"),
        ({"workers": True}, "workers is True; it must be a whole number"),
        ({"allow_programs": [5]}, r"allow_programs is 5; give a pattern, such as 'vision.\*', or a list"),
        ({"trainer_env": [5]}, "trainer_env is 5; give a name, such as 'AWS_ACCESS_KEY_ID', NAME=VALUE, or a list"),
        ({"flags": ["--x"]}, "flags is .*; give a dict of lists, such as"),
        ({"flags": {"worker": "--device cuda:0"}}, "flags has 'worker': '--device cuda:0'; give a dict of lists"),
        ({"flags": {"workers": []}}, "flags has 'workers': .* with the keys coordinator, server, worker"),
        ({"checkpoints": None}, "checkpoints is None; give a path, or '' for none"),
        ({"env": "A=1"}, "env is 'A=1'; give a dict"),
        ({"listen": "localhost"}, "'localhost' is not an address; give host:port"),
        ({"page_listen": 7080}, "7080 is not an address; give host:port"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.BadRequest, match=message):
        LocalCluster(**options)


@pytest.mark.parametrize(
    ("store", "log", "wanted"),
    [
        ("a.db", "", "a.db.audit.server-1.jsonl"),
        ("a.db", "b.jsonl", "b.server-1.jsonl"),
        ("", "b.jsonl", "b.server-1.jsonl"),
        ("", "", ""),
        ("memory", "", ""),
        ("a.db", "none", ""),
        ("a.db", ".", ""),  # in a folder, each role has a file of its own
    ],
)
def test_each_server_has_an_audit_log_beside_the_coordinators(
    started: list[list[str]], store: str, log: str, wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with LocalCluster(2, 0, store=store, env={"SHOAL_AUDIT_LOG": log}):
        got = [value_of(flags, "--audit-log") for flags in started if "--audit-log" in flags]
    assert got == ([wanted.replace("server-1", "server-0"), wanted] if wanted else [])
