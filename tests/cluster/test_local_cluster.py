"""Local cluster of real processes: it starts, explains a failed start, and leaves nothing behind if a process dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import shoal
from shoal import local_cluster
from shoal._role import ForkServer, RoleProcess
from shoal.status import Role
from support.waiting import wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def own_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each cluster start its own fork server, as outside of the tests."""
    monkeypatch.setattr(local_cluster, "ForkServer", ForkServer)


def our_files() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("shoal-*"))


def descendants() -> set[psutil.Process]:
    return {child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def environment_of(process: RoleProcess) -> dict[str, str]:
    return psutil.Process(process.pid).environ()


def test_cluster_restarts_a_killed_role_and_leaves_nothing(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before, files = descendants(), our_files()
    with shoal.LocalCluster(servers=1, workers=1, flags={"coordinator": ["--heartbeat-timeout", "2"]}) as cluster:
        assert [process.name for process in cluster.processes] == ["coordinator", "server-0", "worker-0"]
        assert set(cluster.metrics) == {"coordinator", "server-0", "worker-0"}
        with cluster.client() as client:
            assert [member.member for member in client.status().alive(Role.WORKER)] == ["worker-0"]
            cluster.kill("worker")
            assert cluster.process("worker").returncode == -signal.SIGKILL
            wait_until(lambda: not client.status().alive(Role.WORKER), what="the end of the worker's lease")
            cluster.restart("worker")
            assert [member.member for member in client.status().alive(Role.WORKER)] == ["worker-0"]
    assert cluster.processes == []
    assert descendants() == before
    assert our_files() == files


def test_roles_outlive_their_fork_server_and_the_next_role_gets_a_new_one() -> None:
    before = descendants()
    with shoal.LocalCluster(servers=0, workers=1) as cluster:
        forks = psutil.Process(cluster.process("worker").pid).parent()
        assert forks in descendants() - before
        forks.kill()
        forks.wait()
        assert [process.returncode for process in cluster.processes] == [None, None]
        cluster.kill("worker")
        assert cluster.process("worker").returncode == -signal.SIGKILL
        cluster.restart("worker")
        assert cluster.process("worker").returncode is None
    assert descendants() == before


def test_a_session_trains_without_workers() -> None:
    with shoal.LocalCluster(servers=1, workers=0) as cluster, cluster.client() as client:
        variables = {"w": shoal.Variable(3, "float64")}
        with client.session("loop", variables=variables, optimizer=shoal.optim.SGD(1.0)) as session:
            session.push({"w": [1.0, 2.0, 3.0]}, metrics={"loss": 0.5})
        result = client.job("loop").wait(timeout_s=20)
        assert (result.progress.steps, result.progress.loss) == (1, 0.5)
        assert client.pull("loop")["w"].tolist() == [-1.0, -2.0, -3.0]
        assert cluster.login_link().startswith(f"{cluster.page}/#login=")


def test_failed_start_of_a_role_gives_the_reason(tmp_path: Path) -> None:
    before = descendants()
    cluster = shoal.LocalCluster(1, 0, flags={"server": ["--rpc-threads", "0"]}, log_dir=tmp_path)
    with pytest.raises(shoal.StartFailed, match=r"(?s)server-0 ended with exit status 2 before.*--rpc-threads"):
        cluster.start()
    assert descendants() == before
    assert "--rpc-threads" in (tmp_path / "server-0.log").read_text()


@pytest.mark.parametrize("counts", [{"servers": -1}, {"workers": -1}, {"servers": 1.5}, {"workers": True}])
def test_invalid_number_of_roles_is_refused(counts: dict[str, Any]) -> None:
    ((name, count),) = counts.items()
    with pytest.raises(shoal.errors.BadRequest, match=rf"{name} is {count!r}; it must be a whole number, 0 or more"):
        shoal.LocalCluster(**counts)


def test_it_is_not_started_twice() -> None:
    with shoal.LocalCluster(0, 0) as cluster:
        roles = cluster.processes
        with pytest.raises(shoal.StartFailed, match="already running"):
            cluster.start()
        assert cluster.processes == roles
        with cluster.client() as client:
            assert client.status().members == ()


def test_threads_are_shared_out_unless_the_environment_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    with shoal.LocalCluster(servers=0, workers=2) as cluster:
        assert environment_of(cluster.process("worker"))["OPENBLAS_NUM_THREADS"] == "4"
    with shoal.LocalCluster(servers=0, workers=2, env={"OMP_NUM_THREADS": "3"}) as cluster:
        given = environment_of(cluster.process("worker"))
    assert given["OMP_NUM_THREADS"] == "3"
    assert "OPENBLAS_NUM_THREADS" not in given


def test_listen_address_of_one_role_does_not_apply_to_others() -> None:
    nowhere = "192.0.2.1:7070"  # no machine's, by RFC 5737
    with shoal.LocalCluster(1, 1, env={"SHOAL_LISTEN": nowhere}) as cluster, cluster.client() as client:
        assert len(client.status().members) == 2


def test_job_log_has_the_traceback_of_its_program() -> None:
    path = [Path(__file__).parents[1]]
    with shoal.LocalCluster(1, 1, path=path) as cluster, cluster.client() as client:
        job = client.submit(shoal.Job("support.programs.broken:Raises"))
        with pytest.raises(shoal.JobFailed, match="ValueError: the loss is out of order"):
            job.wait(timeout_s=60)
        lines = list(job.logs())
    assert "worker-0: Traceback (most recent call last):" in lines
    assert "worker-0: ValueError: the loss is out of order" in lines


def test_a_port_in_use_is_named() -> None:
    with (
        shoal.LocalCluster(0, 0) as first,
        pytest.raises(shoal.StartFailed, match=rf"(?s)coordinator ended.*{first.address}.*uses the port"),
    ):
        shoal.LocalCluster(0, 0, listen=first.address).start()


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Returns a folder for the temporary files of `up`, apart from those of other clusters on this machine."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def up(scratch: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Yields `shoal up` in a process of its own, and what it printed when it was ready."""
    command = [sys.executable, "-m", "shoal", "up", "--servers", "1", "--workers", "1"]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--page-listen", "127.0.0.1:0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert process.stdout
    said = json.loads(process.stdout.readline())
    yield process, said
    process.kill()
    process.wait()
    process.stdout.close()
    assert process.stderr
    process.stderr.close()


# The chaos tests stop one by SIGTERM and by SIGKILL, with a job running.
def test_up_restarts_a_role_that_dies_and_ends_at_ctrl_c(
    up: tuple[subprocess.Popen[str], dict[str, Any]], scratch: Path
) -> None:
    process, said = up
    os.kill(said["pids"]["server-0"], signal.SIGKILL)
    assert process.stdout
    ended = {"event": "ended", "name": "server-0", "exit_status": -9, "restart_in_s": 1.0}
    assert json.loads(process.stdout.readline()) == ended
    again = json.loads(process.stdout.readline())
    assert (again["event"], again["name"]) == ("restarted", "server-0")
    assert again["pid"] != said["pids"]["server-0"]
    with shoal.connect(said["address"]) as client:
        members = client.status().members
        assert len(members) == 2
        assert all(member.alive for member in members)
    roles = psutil.Process(process.pid).children(recursive=True)
    assert len(roles) == 4  # and their fork server
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0
    assert gone([role.pid for role in roles])
    assert not list(scratch.iterdir())


def test_a_page_that_had_to_take_another_port_keeps_it_after_a_restart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = {"coordinator": ["--page-or-any"]}
        with shoal.LocalCluster(1, 0, page_listen=wanted, flags=flags) as cluster:
            page = cluster.page
            assert page.startswith("http://127.0.0.1:")
            assert page != f"http://{wanted}"
            cluster.restart("coordinator")
            assert cluster.page == page
