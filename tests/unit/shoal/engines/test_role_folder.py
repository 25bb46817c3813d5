"""Private folders of roles: who can read them, and when they are removed."""

import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from shoal import errors
from shoal._engines import claim, release
from support.waiting import wait_until

CLAIM = "import sys, tempfile; tempfile.tempdir = sys.argv[1]; from shoal._engines import claim; "
CLAIM += "print(claim('role', {'key.pem': b'first'}, int(sys.argv[2])), flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def owner(tmp_path: Path, kept_s: int) -> "subprocess.Popen[str]":
    """Starts a process that has claimed the folder."""
    command = [sys.executable, "-c", CLAIM, str(tmp_path), str(kept_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert Path(process.stdout.readline().strip()) == claimed(tmp_path)
    return process


def claimed(tmp_path: Path) -> Path:
    (found,) = tmp_path.glob("role.*")
    return found


def shells(folder: Path) -> int:
    """The number of processes that watch the folder."""
    return sum(str(folder) in (it.info["cmdline"] or ()) for it in psutil.process_iter(["cmdline"]))


def test_only_this_user_can_read_the_folder() -> None:
    folder = claim("role", {"key.pem": b"k"}, 0)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "key.pem").stat().st_mode & 0o777 == 0o600
    assert shells(folder) == 1
    release(folder)
    assert not folder.exists()
    wait_until(lambda: not shells(folder), what="the end of the shell")


def test_a_folder_that_others_can_enter_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / f"role.{'0' * 16}").mkdir(mode=0o755)
    (tmp_path / f"role.{'1' * 16}").symlink_to(tmp_path)
    (tmp_path / f"role-1.{'2' * 16}").mkdir(mode=0o700)
    folder = claim("role", {}, 0)
    assert {it.name[-16:] for it in tmp_path.iterdir()} == {"0" * 16, "1" * 16, "2" * 16, folder.name[-16:]}


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(
        errors.StartFailed, match=r"cannot write the private folder .* set TMPDIR for the engine's processes"
    ):
        claim("role", {}, 0)


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    with owner(tmp_path, 0) as process:
        process.kill()
    wait_until(lambda: not [*tmp_path.iterdir()], what="the end of the folder")


def test_a_process_takes_over_the_folder_of_a_killed_one(tmp_path: Path) -> None:
    with owner(tmp_path, 1) as process:
        (claimed(tmp_path) / "coordinator.db").write_bytes(b"state")
        process.kill()
    folder = claim("role", {"key.pem": b"second"}, 0)
    assert [*tmp_path.iterdir()] == [folder]
    assert (folder / "key.pem").read_bytes() == b"second"
    assert (folder / "coordinator.db").read_bytes() == b"state"
    release(folder)
