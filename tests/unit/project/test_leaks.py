"""Guard against leaks: it finds each kind of thing that a run leaves behind, and ignores what other programs make."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from shoal._transport.segment import SHM, Segment
from support import leaks
from support.waiting import wait_until

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


def test_a_clean_command_passes(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("import tempfile; tempfile.TemporaryDirectory().cleanup()") == 0
    assert "nothing left behind" in capfd.readouterr().out


def test_a_failing_command_fails_as_it_did(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("import sys; sys.exit(7)") == 7


def test_an_orphaned_grandchild_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    assert run(child, ORPHAN) == 1
    killed(r"left behind: process (\d+): sleep 60", capfd.readouterr().err)


def test_a_daemon_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(DAEMON.format(what="", until="")) == 1
    killed(r"left behind: process (\d+): ", capfd.readouterr().err)


def test_the_port_of_a_daemon_is_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    listen = (
        f"import socket; held = socket.create_server(('127.0.0.1', 0)); open({str(tmp_path / 'on')!r}, 'w').close()"
    )
    until = f"while not os.path.exists({str(tmp_path / 'on')!r}): time.sleep(0.01)"
    assert run(DAEMON.format(what=listen, until=until)) == 1
    port = int(killed(r"left behind: process (\d+): .*\(listens on port (\d+)\)", capfd.readouterr().err)[2])
    assert port > 0


def test_a_process_of_a_run_within_the_run_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    within = "import leaks, subprocess, sys; sys.exit(leaks.main([sys.executable, '-c', sys.argv[1]], grace_s=0) - 1)"
    command = f"import sys; sys.path.insert(0, {str(Path(leaks.__file__).parent)!r}); {within}"
    assert run(command, ORPHAN) == 1
    told = capfd.readouterr().err
    killed(r"left behind: process (\d+): sleep 60", told)
    assert told.count("left behind: process") == 2, "told by both"


def test_a_process_that_is_about_to_end_is_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    """It ends when the pipe that the command held is closed, so at the very end of the command or a moment later."""
    child = "import subprocess; subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)"
    assert leaks.main([sys.executable, "-c", child]) == 0


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


def test_what_others_make_meanwhile_is_not_the_run_s(capfd: pytest.CaptureFixture[str]) -> None:
    """A segment of another Shoal, any file in shared memory, a temporary file, and a process that holds a port."""
    # Made within the run's time, but by this process: the command asks for it, and waits until it is there.
    asked, done = Path("asked"), Path("done")
    waiter = (
        "import pathlib, time; pathlib.Path('asked').touch()\nwhile not pathlib.Path('done').exists(): time.sleep(0.01)"
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import leaks\n"
        "sys.exit(leaks.main([sys.executable, '-c', sys.argv[2]], grace_s=0))"
    )
    guard = subprocess.Popen([sys.executable, "-c", code, str(Path(leaks.__file__).parent), waiter])
    listen = "import socket, sys; held = socket.create_server(('127.0.0.1', 0)); print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    try:
        wait_until(asked.exists, what="the command's start")
        with (
            Segment.create(5000),
            tempfile.NamedTemporaryFile(dir=SHM, prefix="foreign-"),
            tempfile.NamedTemporaryFile(prefix="foreign-"),
            subprocess.Popen(
                [sys.executable, "-c", listen], stdin=pipe, stdout=pipe, start_new_session=True
            ) as foreign,
        ):
            assert foreign.stdout
            assert foreign.stdout.readline()
            assert psutil.Process(foreign.pid).net_connections("inet")
            done.touch()
            assert guard.wait(30) == 0
            assert foreign.stdin
            foreign.stdin.close()
    finally:
        guard.kill()
        guard.wait()
    assert "nothing left behind" in capfd.readouterr().out


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_an_untracked_file_in_the_checkout_is_found_unless_it_is_ignored(capfd: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["git", "init", "--quiet"], check=True)
    Path(".gitignore").write_text("ignored\n")
    assert run("open('ignored', 'w').close()") == 0
    assert run("open('litter', 'w').close()") == 1
    assert "left behind: untracked file litter" in capfd.readouterr().err
    assert run("pass") == 0, "what was there before is nobody's leak"
