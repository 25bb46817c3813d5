"""The token of a process: where it is found, and when it is not presented."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal import errors
from shoal._security import AccessFile, AccessRole, TokenSource

ADDRESS = "127.0.0.1:7070"
OTHER = os.geteuid() + 1


@pytest.fixture(autouse=True)
def access_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_TOKEN_FILE", raising=False)
    AccessFile(ADDRESS).write({AccessRole.ADMIN: "secret"})


def listening(*users: int) -> Callable[[str, int], frozenset[int]]:
    def listeners(host: str, port: int) -> frozenset[int]:
        assert (host, port) == ("127.0.0.1", 7070)
        return frozenset(users)

    return listeners


@pytest.mark.parametrize("users", [(), (os.geteuid(),), (0,)], ids=["nobody", "this user", "root"])
def test_a_token_is_presented_if_no_other_user_listens(users: tuple[int, ...]) -> None:
    assert TokenSource(ADDRESS, AccessRole.ADMIN, listeners=listening(*users))() == "secret"


@pytest.mark.parametrize("users", [(OTHER,), (0, OTHER)], ids=["alone", "beside root"])
def test_a_token_is_not_presented_to_another_user(users: tuple[int, ...]) -> None:
    source = TokenSource(ADDRESS, AccessRole.ADMIN, listeners=listening(*users))
    with pytest.raises(errors.Unauthenticated, match=f"user {OTHER} listens on {ADDRESS}.*The token was not sent"):
        source()


def test_a_process_without_a_token_has_nothing_to_check() -> None:
    assert TokenSource(ADDRESS, AccessRole.WORKER, listeners=listening(OTHER))() == ""


def test_a_named_token_file_may_be_for_the_coordinator_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("named")
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(file))
    assert TokenSource(ADDRESS, AccessRole.ADMIN, listeners=listening(OTHER))() == "named"
