"""The token of a process, and where it is found."""

from pathlib import Path

import pytest

from shoal._security import AccessFile, AccessRole, TokenSource

ADDRESS = "127.0.0.1:7070"


@pytest.fixture(autouse=True)
def access_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_TOKEN_FILE", raising=False)
    AccessFile(ADDRESS).write({AccessRole.ADMIN: "secret"})


def test_a_token_is_that_of_the_role() -> None:
    assert TokenSource(ADDRESS, AccessRole.ADMIN)() == "secret"
    assert TokenSource(ADDRESS, AccessRole.WORKER)() == ""


def test_a_named_token_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("named")
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(file))
    assert TokenSource(ADDRESS, AccessRole.ADMIN)() == "named"
