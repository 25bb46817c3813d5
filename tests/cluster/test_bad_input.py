"""Bad input to a running cluster: the error is clear, no state is lost, and the cluster keeps working."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import optim
from shoal.status import MemberStatus
from support import run_lengths

pytestmark = pytest.mark.cluster


def job(program: str, **options: Any) -> shoal.Job:
    return shoal.Job(f"support.programs.broken:{program}", optimizer=optim.SGD(1.0), batch_size=8, **options)


@pytest.fixture(autouse=True)
def healthy_afterwards(client: shoal.Client) -> Iterator[None]:
    """Checks afterwards that every server takes a push and every worker is alive. The last test trains a job."""
    yield
    variables = {f"v{index}": np.zeros(2) for index in range(3)}
    with client.session("healthy", variables=variables, optimizer=optim.SGD(1.0), shards=3) as session:
        session.push({name: np.ones(2) for name in variables})
    for value in client.pull("healthy").values():
        np.testing.assert_array_equal(value, -1.0)
    workers = [member for member in client.status().members if member.role.value == "worker" and member.alive]
    assert len(workers) == 4


class TestPrograms:
    @pytest.mark.parametrize(
        ("program", "settings", "messages"),
        [
            ("no_such_module:x", {}, ["no_such_module", "No module named"]),
            ("yaml:load", {}, ["PROGRAM_NOT_ALLOWED", "not under --path", "--allow-program"]),
            ("support.programs.broken:Path", {}, ["is a class that has no method variables()"]),
            ("support.programs.broken:no_such_factory", {}, ["no_such_factory", "broken"]),
            ("support.programs.broken:factory_raises", {}, ["Traceback", "the factory is out of order"]),
            ("support.programs.broken:fine", {"sice": 3}, ["sice"]),
            ("support.programs.broken:Raises", {}, ["Traceback", "ValueError: the loss is out of order"]),
            ("support.programs.broken:Gradients", {"kind": "name"}, ["'w' is missing", "'v' is"]),
            ("support.programs.broken:Gradients", {"kind": "shape"}, ["'w' has shape (5,), not (4,)"]),
            ("support.programs.broken:Gradients", {"kind": "dtype"}, ["'w' is float64: cast it to float32"]),
            ("support.programs.broken:NotFinite", {"every": 1, "size": 512}, ["NaN", "in a row"]),
        ],
        ids=[
            "module",
            "elsewhere",
            "no program",
            "factory",
            "factory raises",
            "setting",
            "loss raises",
            "name",
            "shape",
            "dtype",
            "nan",
        ],
    )
    def test_failing_program_fails_its_job_with_the_reason(
        self, client: shoal.Client, program: str, settings: dict[str, Any], messages: list[str]
    ) -> None:
        workers = 2 if "Traceback" in messages else 1  # at the start and at a step, trainers of several workers fail
        submitted = client.submit(shoal.Job(program, workers=workers, settings=settings, batch_size=8))
        with pytest.raises(shoal.JobFailed) as failure:
            submitted.wait(timeout_s=40)
        for message in messages:
            assert message.lower() in failure.value.message.lower()
        assert submitted.status().state is shoal.JobState.FAILED

    @pytest.mark.parametrize("program", ["subprocess:run", "os:system", "builtins:eval"])
    def test_the_standard_library_is_refused_at_once(self, client: shoal.Client, program: str, tmp_path: Path) -> None:
        settings = {"args": ["touch", str(tmp_path / "owned")]}
        with pytest.raises(shoal.ProgramNotAllowed, match="standard library, which has no programs"):
            client.submit(shoal.Job(program, settings=settings))
        assert not (tmp_path / "owned").exists()

    def test_a_batch_that_gives_nan_is_rejected_counted_and_skipped(self, client: shoal.Client) -> None:
        submitted = client.submit(job("NotFinite", workers=1, settings={"every": 4}))
        result = submitted.wait(timeout_s=40)
        assert result.progress.rejected == 2
        assert result.progress.steps == 6
        np.testing.assert_array_equal(client.pull(submitted)["w"], -6.0)


class TestJobs:
    def test_name_of_running_job_is_refused(self, client: shoal.Client, tmp_path: Path) -> None:
        gated = job("Gated", name="twice", settings={"gate": str(tmp_path / "gate")})
        first = client.submit(gated)
        with pytest.raises(shoal.JobExists, match=r"twice is .*: choose another name, or cancel it first"):
            client.submit(gated)
        first.cancel()
        with pytest.raises(shoal.Cancelled):
            first.wait(timeout_s=30)

    def test_unknown_job_is_refused(self, client: shoal.Client) -> None:
        for call in (client.pull, client.cancel, client.drop):
            with pytest.raises(shoal.UnknownJob, match="nobody-knows"):
                call("nobody-knows")

    def test_session_with_different_variables_is_refused(self, client: shoal.Client) -> None:
        with (
            client.session("mine", variables={"w": np.zeros(3)}),
            pytest.raises(shoal.ShoalError, match="mine"),
            client.session("mine", variables={"w": np.zeros(4)}),
        ):
            pass


class TestProcesses:
    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shoal", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def check_refused(self, *arguments: str, status: int = 1) -> tuple[str, str]:
        """Checks that a role does not start. Returns the code and the reason that it logs."""
        done = self.run(*arguments, "--log-format", "json")
        assert done.returncode == status
        last = json.loads(done.stderr.splitlines()[-1])
        assert last["event"] == "cannot start"
        return last["code"], last["reason"]

    @pytest.mark.parametrize("role", run_lengths.size(["coordinator"], ["server", "coordinator"]))
    def test_a_port_in_use(self, shared_cluster: shoal.LocalCluster, role: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            extra = ["--coordinator", shared_cluster.address, "--name", "another"] if role == "server" else []
            done = self.run(role, "--listen", address, *extra)
        assert done.returncode == 3
        assert f"cannot listen on {address}" in done.stderr
        assert "choose another port" in done.stderr

    @pytest.mark.parametrize("role", run_lengths.size(["server"], ["coordinator", "server", "worker"]))
    def test_a_role_that_would_be_open_to_the_network(self, role: str) -> None:
        done = self.run(role, "--metrics-listen", "0.0.0.0:0")
        assert done.returncode == 2
        assert f"the {role} would listen on 0.0.0.0:0 without TLS" in done.stderr

    def test_a_pattern_of_programs_that_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHOAL_ALLOW_PROGRAM", ". shoal_nn ./models")
        code, reason = self.check_refused("worker", "--retry-for", "0", status=2)
        assert code == "BAD_REQUEST"
        assert "'./models' is not a pattern of programs; give --allow-program" in reason

    def test_a_metrics_port_in_use(self, shared_cluster: shoal.LocalCluster) -> None:
        done = self.run(
            "coordinator", "--listen", "127.0.0.1:0", "--metrics-listen", shared_cluster.metrics["server-0"]
        )
        assert done.returncode == 3
        assert "cannot serve metrics" in done.stderr

    @pytest.mark.parametrize("role", run_lengths.size(["worker"], ["server", "worker"]))
    def test_unreachable_coordinator_ends_the_role(self, role: str) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{closed.getsockname()[1]}"
            done = self.run(role, "--coordinator", address, "--retry-for", "1")
        assert done.returncode == 3
        assert f"{address} did not answer within 1 s" in done.stderr

    @pytest.mark.parametrize(
        ("volume", "advice"),
        [
            ("missing", "there is no such folder: create it, or mount its volume"),
            ("file/below", "it, or a part of its path, is not a folder: choose another folder"),
        ][: run_lengths.size(1, 2)],
    )
    @pytest.mark.parametrize(
        ("role", "flags", "code"),
        [
            ("coordinator", ["--store", "{}/coordinator.db"], "STORE_FAILED"),
            ("coordinator", ["--store", "memory", "--checkpoints", "{}"], "STORAGE_FAILED"),
            ("server", ["--checkpoints", "{}"], "STORAGE_FAILED"),
        ],
        ids=["store", "checkpoints", "server"],
    )
    def test_missing_volume_is_refused(
        self,
        shared_cluster: shoal.LocalCluster,
        tmp_path: Path,
        role: str,
        flags: list[str],
        code: str,
        volume: str,
        advice: str,
    ) -> None:
        """The role does not create the folder, because a folder inside the container would be lost with it."""
        (tmp_path / "file").touch()
        path = tmp_path / volume
        where = ["--coordinator", shared_cluster.address] if role == "server" else ["--listen", "127.0.0.1:0"]
        said, reason = self.check_refused(role, *where, *[flag.format(path) for flag in flags])
        assert said == code
        assert f"{path}/" in reason
        assert advice in reason
        assert [each.name for each in tmp_path.iterdir()] == ["file"]

    @pytest.mark.parametrize("role", run_lengths.size(["server"], ["server", "worker"]))
    def test_second_process_of_a_name_is_refused(
        self, shared_cluster: shoal.LocalCluster, client: shoal.Client, role: str
    ) -> None:
        """The error of the second process names the first one, which continues in the same incarnation."""
        name = f"{role}-0"
        first = status_of(client, name)
        code, reason = self.check_refused(role, "--coordinator", shared_cluster.address, "--name", name)
        assert code == "DUPLICATE_MEMBER"
        address = shared_cluster.process(role, 0).address
        assert f"a live process at {address} has the member id {name}: give each process its own" in reason
        now = status_of(client, name)
        assert (now.alive, now.incarnation, now.metrics_address) == (True, first.incarnation, first.metrics_address)


def status_of(client: shoal.Client, name: str) -> MemberStatus:
    [status] = [member for member in client.status().members if member.member == name]
    return status


def test_job_trains_after_bad_input(client: shoal.Client) -> None:
    fine = client.submit(job("fine", workers=2))
    assert fine.wait(timeout_s=30).progress.steps == 8
    np.testing.assert_array_equal(client.pull(fine)["w"], -4.0)
