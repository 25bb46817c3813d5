"""Default names of workers, and the check of the worker's options."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal._cli.app import app
from shoal._role.lifecycle import default_name
from shoal_worker import daemon


@pytest.mark.parametrize("host", ["gpu-7.example.org", "Some_Host", "x" * 200, "-", None])
def test_a_name_is_one_that_the_contract_allows(host: str | None) -> None:
    name = default_name("worker", host)
    assert re.fullmatch(r"[a-z0-9-]{1,63}", name)
    assert default_name("worker", host) != name


class TestPath:
    @pytest.fixture(autouse=True)
    def no_worker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "start_worker", lambda *_: pytest.fail("the worker has started"))

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
