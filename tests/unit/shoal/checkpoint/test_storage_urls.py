"""Local checkpoint folders: a file appears only when it is complete, and no path leads out of the folder."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import errors
from shoal._checkpoint.local_storage import LocalStorage


def read(folder: LocalStorage, *path: str) -> bytes:
    with folder.open(path) as file:
        text = bytearray(file.nbytes)
        file.read_into(0, [memoryview(text)])
        return bytes(text)


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_file_exists_once_it_is_written(tmp_path: Path) -> None:
    folder = LocalStorage(tmp_path / "new" / "root")
    assert folder.names([]) == []
    folder.write(["job", "00000001", "a.bin"], [b"ab", memoryview(b"cd"), b""])
    folder.write(["job", "00000001", "a.bin"], [b"ef"])
    assert read(folder, "job", "00000001", "a.bin") == b"ef"
    assert folder.names([]) == ["job"]
    assert folder.names(["job", "00000001"]) == ["a.bin"]


@pytest.mark.parametrize("at", ["pieces", "pwrite", "fsync", "rename"])
def test_failed_write_leaves_no_temporary_file_and_keeps_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    folder = LocalStorage(tmp_path)
    folder.write(["job", "a.bin"], [b"before"])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pieces() -> Iterator[bytes]:
        yield b"after"
        if at == "pieces":
            full()

    with monkeypatch.context() as patch:
        if at != "pieces":
            patch.setattr(os, at, full)
        with pytest.raises(errors.StorageFailed, match=r"No space left.*free some space"):
            folder.write(["job", "a.bin"], pieces())
    assert read(folder, "job", "a.bin") == b"before"
    assert files(tmp_path) == ["job/a.bin"]
    folder.write(["job", "a.bin"], [b"after"])
    assert read(folder, "job", "a.bin") == b"after"


def test_other_errors_of_the_writer_pass_through_and_leave_nothing(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x"
        raise KeyError("a defect")

    with pytest.raises(KeyError):
        LocalStorage(tmp_path).write(["a.bin"], pieces())
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "/etc", "a\0b", ".hidden", ".tmp-1", "a" * 256, "-x", "ü", "a\n", "a b"]
)
def test_names_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = LocalStorage(tmp_path / "root")
    for use in (
        lambda: folder.write([name], [b""]),
        lambda: folder.write([name, "a"], [b""]),
        lambda: folder.open([name, "a"]).__enter__(),
        lambda: folder.open(["a", name]).__enter__(),
        lambda: folder.names([name]),
        lambda: folder.remove([name]),
        lambda: folder.remove(["a", name]),
    ):
        with pytest.raises(errors.BadRequest, match="not a valid name"):
            use()
    assert not (tmp_path / "root").exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "job").mkdir(parents=True)
    (outside / "secret").write_text("secret")
    root.mkdir()
    (root / "job").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "real").mkdir()
    (root / "real" / "link").symlink_to(outside)
    folder = LocalStorage(root)
    for use in (
        lambda: folder.write(["job", "a"], [b""]),
        lambda: folder.open(["job", "secret"]).__enter__(),
        lambda: folder.open(["file"]).__enter__(),
        lambda: folder.remove(["job", "secret"]),
    ):
        with pytest.raises(errors.StorageFailed):
            use()
    assert folder.names(["job"]) == folder.names(["file"]) == []
    folder.remove(["real"])  # the link goes, not what it leads to
    folder.remove(["file"])
    assert files(outside) == ["secret"]
    assert folder.names([]) == ["job"]


def test_path_that_is_not_a_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(errors.StorageFailed, match="it is not a file"):
            LocalStorage(tmp_path).open([name]).__enter__()


def test_missing_path_is_reported_or_ignored(tmp_path: Path) -> None:
    folder = LocalStorage(tmp_path / "root")
    with pytest.raises(errors.UnknownCheckpoint, match="there is no"):
        folder.open(["job", "a"]).__enter__()
    folder.remove(["job"])
    folder.write(["job", "a"], [b""])
    folder.remove(["job", "b"])
    folder.remove(["job"])
    assert folder.names([]) == []


def test_unwritable_folder_raises_an_error_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fakes the system's error, because root may write everywhere."""

    def forbidden(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(
        errors.StorageFailed, match="Read-only file system; its file system is read-only: mount a volume"
    ):
        LocalStorage(tmp_path).write(["a"], [b""])


def test_a_folder_that_is_removed_while_a_file_is_written_is_an_error(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x"
        LocalStorage(tmp_path).remove(["job"])

    folder = LocalStorage(tmp_path)
    with pytest.raises(errors.StorageFailed, match="it was removed just now"):
        folder.write(["job", "1", "a"], pieces())
    assert files(tmp_path) == []
    folder.write(["job", "1", "a"], [b"x"])
    assert read(folder, "job", "1", "a") == b"x"


def test_a_disk_that_is_full_leaves_nothing_and_is_written_again(tmp_path: Path) -> None:
    """The kernel refuses to let files grow, as a full disk does."""
    folder, before = LocalStorage(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(errors.StorageFailed, match=r"File too large; raise the limit"):
            folder.write(["a"], [bytes(1 << 15)] * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(tmp_path) == []
    folder.write(["a"], [bytes(1 << 15)] * 3)
    assert len(read(folder, "a")) == 3 << 15


def test_a_disk_that_fails_when_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    folder = LocalStorage(tmp_path)
    folder.write(["a"], [b"x"])
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(errors.StorageFailed, match="could not be read: Input/output error"):
        read(folder, "a")


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(errors.StorageFailed, match="written"):
        LocalStorage(tmp_path / "root").write(["a"], [b""])
    with pytest.raises(errors.StorageFailed, match="listed"):
        LocalStorage(tmp_path / "root").names([])
