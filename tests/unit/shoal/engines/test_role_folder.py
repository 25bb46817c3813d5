"""Private folders of roles: who can read them, and when they are removed."""

import subprocess
import sys
import tempfile
from pathlib import Path

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
    assert process.stdout.readline().strip() == str(tmp_path / "role")
    return process


def test_only_this_user_can_read_the_folder() -> None:
    folder = claim("role", {"key.pem": b"k"}, 0)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "key.pem").stat().st_mode & 0o777 == 0o600
    release(folder)
    assert not folder.exists()


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "role").mkdir(mode=0o755)
    with pytest.raises(errors.StartFailed, match="is not private"):
        claim("role", {}, 0)
    (tmp_path / "link").symlink_to(tmp_path / "role")
    with pytest.raises(errors.StartFailed, match="is not private"):
        claim("link", {}, 0)


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    with owner(tmp_path, 0) as process:
        process.kill()
    wait_until(lambda: not (tmp_path / "role").exists(), what="the end of the folder")


def test_a_process_takes_over_the_folder_of_a_killed_one(tmp_path: Path) -> None:
    with owner(tmp_path, 1) as process:
        (tmp_path / "role" / "coordinator.db").write_bytes(b"state")
        process.kill()
    folder = claim("role", {"key.pem": b"second"}, 0)
    assert (folder / "key.pem").read_bytes() == b"second"
    assert (folder / "coordinator.db").read_bytes() == b"state"
    release(folder)
