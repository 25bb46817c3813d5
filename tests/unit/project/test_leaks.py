"""Guard against leaks: if it did not find what a run leaves behind, the suite would pass silently with leaks."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal._transport.segment import SHM
from support import leaks

# Its parent is gone when the command ends, so that only the mark in its environment tells whose it is.
ORPHAN = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=subprocess.DEVNULL)"
# Becomes a daemon as daemons do: a session of its own, a parent that has ended, no file from before.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    {what}
    time.sleep(60)
os.wait()
{until}
"""
CREATE = "import os, signal; from shoal._transport.segment import Segment; segment = Segment.create(5000); "
DIE = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(autouse=True)
def outside_any_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others do meanwhile in this test's checkout is not the commands' doing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))


def run(code: str, *arguments: str) -> int:
    return leaks.main([sys.executable, "-c", code, *arguments], grace_s=0)


def killed(pattern: str, text: str) -> re.Match[str]:
    """The report of a process that was left, which is ended here."""
    found = re.search(pattern, text)
    assert found, text
    os.kill(int(found[1]), signal.SIGKILL)
    return found


def test_a_failing_command_fails_as_it_did(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("import sys; sys.exit(7)") == 7


def test_an_orphaned_grandchild_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    assert run(child, ORPHAN) == 1
    killed(r"left behind: process (\d+): sleep 60", capfd.readouterr().err)


def test_a_temporary_file_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("import tempfile; tempfile.NamedTemporaryFile(delete=False, prefix='forgotten-')") == 1
    assert "left behind: file forgotten-" in capfd.readouterr().err


def test_a_segment_is_found_after_its_creator_was_killed(capfd: pytest.CaptureFixture[str]) -> None:
    before = set(SHM.iterdir())
    assert run(CREATE + DIE) != 0
    found = re.findall(r"left behind: shared memory (shoal-[0-9a-f]{32})", capfd.readouterr().err)
    assert len(found) == 1
    assert not any(path.name.startswith("shoal-test-run-") for path in set(SHM.iterdir()) - before), "and removed"


def test_a_daemon_and_its_segment_are_found(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    create = f"{CREATE} open({str(tmp_path / 'made')!r}, 'w').close()"
    until = f"while not os.path.exists({str(tmp_path / 'made')!r}): time.sleep(0.01)"
    assert run(DAEMON.format(what=create, until=until)) == 1
    told = capfd.readouterr().err
    killed(r"left behind: process (\d+): ", told)
    assert "left behind: shared memory shoal-" in told


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_an_untracked_file_in_the_checkout_is_found_unless_it_is_ignored(capfd: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["git", "init", "--quiet"], check=True)
    Path(".gitignore").write_text("ignored\n")
    assert run("open('ignored', 'w').close()") == 0
    assert run("open('litter', 'w').close()") == 1
    assert "left behind: untracked file litter" in capfd.readouterr().err
    assert run("pass") == 0, "what was there before is nobody's leak"
