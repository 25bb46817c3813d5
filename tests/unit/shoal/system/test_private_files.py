"""Permissions of a cluster's files: only the cluster's user may read them, unless the operator chooses otherwise."""

import os
import stat
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from shoal import errors
from shoal._checkpoint.local_storage import LocalStorage
from shoal._system import private_files
from shoal_coordinator.persistence.sqlite_store import SqliteStore


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): oct(stat.S_IMODE(path.lstat().st_mode)) for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(("access", "file", "folder"), [("", "0o600", "0o700"), ("group", "0o660", "0o770")])
def test_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: str, file: str, folder: str) -> None:
    monkeypatch.setenv(private_files.VARIABLE, access)
    LocalStorage(tmp_path / "up" / "root").write(("job", "00000001", "data"), [b"x"])
    assert modes(tmp_path) == {
        "up": folder,
        "up/root": folder,
        "up/root/job": folder,
        "up/root/job/00000001": folder,
        "up/root/job/00000001/data": file,
    }


@pytest.mark.parametrize(("access", "mode"), [("owner", "0o600"), ("group", "0o660")])
def test_the_store_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: str, mode: str) -> None:
    monkeypatch.setenv(private_files.VARIABLE, access)
    store = SqliteStore(tmp_path / "coordinator.db")
    store.apply({"cluster": b"x"})
    found = modes(tmp_path)
    store.close()
    assert found == dict.fromkeys(["coordinator.db", "coordinator.db-wal", "coordinator.db.lock"], mode)


def test_what_exists_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o755)
    LocalStorage(tmp_path / "root").write(("a",), [b"x"])
    assert modes(tmp_path) == {"root": "0o755", "root/a": "0o600"}


def test_an_unknown_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.BadRequest, match=r"SHOAL_FILE_ACCESS is '0777'; use one of: owner, group"):
        private_files.file_mode({private_files.VARIABLE: "0777"})


@pytest.mark.parametrize(
    ("owner", "user", "mode", "access", "accepted"),
    [
        (1000, 1000, 0o600, "owner", True),
        (1000, 1000, 0o400, "owner", True),
        (0, 1000, 0o600, "owner", True),
        (0, 65532, 0o440, "owner", True),  # the file of a Kubernetes secret, whose group is the pod's
        (0, 65532, 0o640, "owner", True),
        (0, 65532, 0o660, "owner", False),
        (0, 65532, 0o444, "owner", False),
        (0, 0, 0o640, "owner", False),
        (1000, 1000, 0o640, "owner", False),
        (1000, 1000, 0o660, "group", True),
        (1000, 1000, 0o664, "group", False),
        (1001, 1000, 0o600, "owner", False),  # its owner can read it and change it
        (1001, 1000, 0o640, "group", False),
    ],
)
def test_a_secret_that_others_can_read_or_change_is_refused(
    monkeypatch: pytest.MonkeyPatch, owner: int, user: int, mode: int, access: str, accepted: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv(private_files.VARIABLE, access)
    status = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))
    refused = pytest.raises(errors.Unauthenticated, match=rf"the key k is not private.*user {owner}.*mode {mode:o}")
    with nullcontext() if accepted else refused:
        private_files.check_secret("the key", Path("k"), status, errors.Unauthenticated)
