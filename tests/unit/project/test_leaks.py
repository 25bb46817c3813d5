"""The guard of the whole suite, which would otherwise be trusted unseen: it finds each kind of thing left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import leaks

# Its parent is gone when the command ends, so that only the mark in its environment tells whose it is.
ORPHAN = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=subprocess.DEVNULL)"


@pytest.fixture
def segments(tmp_path_factory, monkeypatch):
    """What others do meanwhile in this test's checkout and in shared memory is not the commands' doing."""
    folder = tmp_path_factory.mktemp("segments")
    monkeypatch.setattr(leaks, "SEGMENTS", folder)
    return folder


@pytest.fixture(autouse=True)
def outside_any_checkout(tmp_path, segments, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))


def run(code: str, *arguments: str) -> int:
    return leaks.main([sys.executable, "-c", code, *arguments], grace_s=0)


def test_a_clean_command_passes(capfd):
    assert run("import tempfile; tempfile.TemporaryDirectory().cleanup()") == 0
    assert "nothing left behind" in capfd.readouterr().out


def test_a_failing_command_fails_as_it_did(capfd):
    assert run("import sys; sys.exit(7)") == 7


def test_an_orphaned_grandchild_is_found(capfd):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    assert run(child, ORPHAN) == 1
    found = re.search(r"left behind: process (\d+): sleep 60", capfd.readouterr().err)
    assert found
    os.kill(int(found[1]), signal.SIGKILL)


def test_a_process_that_is_about_to_end_is_waited_for(capfd):
    """It ends when the pipe that the command held is closed, so at the very end of the command or a moment later."""
    child = "import subprocess; subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)"
    assert leaks.main([sys.executable, "-c", child]) == 0


def test_a_temporary_file_is_found(capfd):
    assert run("import tempfile; tempfile.NamedTemporaryFile(delete=False, prefix='forgotten-')") == 1
    assert "left behind: file forgotten-" in capfd.readouterr().err


def test_a_shared_memory_segment_is_found(segments, capfd):
    assert run("import sys; open(sys.argv[1], 'w').close()", str(segments / "forgotten")) == 1
    assert "left behind: shared memory forgotten" in capfd.readouterr().err


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_an_untracked_file_in_the_checkout_is_found_unless_it_is_ignored(capfd):
    subprocess.run(["git", "init", "--quiet"], check=True)
    Path(".gitignore").write_text("ignored\n")
    assert run("open('ignored', 'w').close()") == 0
    assert run("open('litter', 'w').close()") == 1
    assert "left behind: untracked file litter" in capfd.readouterr().err
    assert run("pass") == 0, "what was there before is nobody's leak"
