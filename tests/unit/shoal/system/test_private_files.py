"""Permissions of a cluster's files: only the cluster's user may read them, unless the operator chooses otherwise."""

import os
import stat
from collections.abc import Iterator
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
