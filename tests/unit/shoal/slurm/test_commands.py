"""The commands `python -m shoal.slurm`, without a cluster."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import errors
from shoal._system.exit_codes import CONFLICT, INVALID, UNREACHABLE
from shoal.slurm._allocation import Allocation
from shoal.slurm._commands import app, parse_flags
from shoal.slurm._run_folder import Announcement, Phase, RunFolder

JOB = ["digits:Digits", "--name", "digits"]


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def command(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, arguments)
    return found.exit_code, found.output


def prepare(folder: Path, *arguments: str) -> tuple[int, str]:
    return command("prepare", "--folder", str(folder), "--path", str(folder.parent), *JOB, *arguments)


def test_a_second_allocation_does_not_change_the_plan_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    assert prepare(folder.path) == (0, "")
    with folder.claim(Allocation(run="417", attempt="417.0", rank=0, tasks=3)):
        monkeypatch.setenv("SLURM_JOB_ID", "500")
        status, output = prepare(folder.path, "--servers", "4")
        assert status == CONFLICT
        assert "goes on in another allocation (417" in " ".join(output.split())
        assert folder.plan().servers == 1
        monkeypatch.setenv("SLURM_JOB_ID", "417")  # it was requeued
        assert prepare(folder.path, "--servers", "4") == (0, "")


def test_a_job_without_a_name_is_refused_because_a_requeue_would_not_find_it(tmp_path: Path) -> None:
    status, output = command("prepare", "--folder", str(tmp_path / "run"), "--path", str(tmp_path), "digits:Digits")
    assert (status, "give it a --name" in output) == (INVALID, True)


def test_options_of_roles_are_part_of_the_plan(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert prepare(folder.path, "--flag", "server=--log-level=info", "--device", "cpu") == (0, "")
    assert folder.plan().flags == {"server": ["--log-level=info"], "worker": ["--device", "cpu"]}
    trainers = ("--allow-program", "vision.*", "--trainer-env", "AWS_REGION", "--checkpoints", "s3://bucket/digits")
    assert prepare(folder.path, *trainers) == (0, "")
    assert folder.plan().flags == {"worker": ["--allow-program", "vision.*", "--trainer-env", "AWS_REGION"]}
    assert folder.plan().checkpoints == "s3://bucket/digits"
    with pytest.raises(errors.BadRequest, match="is not ROLE=OPTION"):
        parse_flags(["--log-level=info"])


def test_the_variables_of_a_cluster_are_lines_of_a_shell(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run")
    prepare(folder.path)
    folder.announce(Announcement(run="1", attempt="1.0", address="node:7"))
    status, output = command("env", "--folder", str(folder.path))
    assert status == 0
    assert f"export SHOAL_TLS_CERT='{folder.path}/certificates/admin.pem'\n" in output
    assert "export SHOAL_COORDINATOR=node:7\n" in output
    folder.announce(Announcement(run="1", attempt="1.0", address="node:7", phase=Phase.ENDED))
    status, output = command("env", "--folder", str(folder.path))
    assert (status, "export" in output) == (UNREACHABLE, False)


def test_unfinished_says_whether_to_requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    prepare(folder.path)
    assert command("unfinished", "--folder", str(folder.path))[0] == INVALID
    monkeypatch.setenv("SLURM_JOB_ID", "417")
    assert command("unfinished", "--folder", str(folder.path))[0] == 1
    folder.mark_unfinished("417.0.0.0", 0)
    assert command("unfinished", "--folder", str(folder.path)) == (0, "")
