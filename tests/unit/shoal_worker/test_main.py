"""Default names of workers, and the check of the worker's options."""

import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from shoal import errors
from shoal._cli.app import app
from shoal._role.lifecycle import default_name
from shoal_worker.isolation import TrainerUser


@pytest.mark.parametrize("host", ["gpu-7.example.org", "Some_Host", "x" * 200, "-", None])
def test_a_name_is_one_that_the_contract_allows(host: str | None) -> None:
    name = default_name("worker", host)
    assert re.fullmatch(r"[a-z0-9-]{1,63}", name)
    assert default_name("worker", host) != name


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--trainer-env", "1=secret"], "--trainer-env has '1', which is not a variable name"),
        (["--trainer-memory", "1000"], "--trainer-memory is 1,000; a trainer needs at least 268,435,456"),
        (["--trainer-open-files", "3"], "--trainer-open-files is 3; a trainer needs at least 64"),
        (["--trainer-user", "no-such-user"], "--trainer-user is 'no-such-user', and this host has no such user"),
    ],
)
def test_invalid_isolation_of_trainers_stops_the_start(options: list[str], problem: str) -> None:
    command = [sys.executable, "-m", "shoal", "worker", *options]
    given = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert given.returncode == 2
    assert problem in given.stderr
    assert "secret" not in given.stderr


def test_another_user_needs_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    none = mock.Mock(return_value="Name: python\nCapEff:\t0000000000000001\n")
    monkeypatch.setattr(Path, "read_text", none)
    with pytest.raises(errors.BadRequest, match="lacks CAP_KILL, CAP_SETGID, CAP_SETUID; run it as root or with"):
        TrainerUser.find("nobody")


class TestPath:
    @pytest.fixture(autouse=True)
    def no_worker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shoal_worker.process.start_worker", lambda *_: pytest.fail("the worker has started"))

    @pytest.mark.parametrize("variable", [False, True])
    @pytest.mark.parametrize(("name", "problem"), [("missing", "does not exist"), ("file", "is a file")])
    def test_must_be_a_folder(self, name: str, problem: str, variable: bool, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        path = str(tmp_path / name)
        options, environment = ([], {"SHOAL_PATH": path}) if variable else (["--path", path], {})
        given = CliRunner().invoke(app, ["worker", *options], env={**environment, "COLUMNS": "500"})
        assert given.exit_code == 2
        assert "Usage: " in given.stderr
        assert problem in given.stderr
