"""Guard against leaks: runs a command and fails if the command leaves something behind (`python leaks.py COMMAND ...`).

The guard looks only at what the run itself made, so other programs on the machine, and other runs, do not disturb it:

- Processes: each process of the run inherits a mark in its environment, even if its parent changes. Trainers get it
  because SHOAL_TRAINER_ENV names it. No process with the mark may be alive after the run. The report names the ports
  that such a process listens on.
- Temporary files and shared memory: the environment gives the run a folder of its own for each (TMPDIR and
  SHOAL_SHARED_MEMORY). Both must be empty after the run, whether or not the process that wrote there is alive.
- Files in the git checkout that the command runs in, if git neither tracks nor ignores them. The guard cannot see which
  process made such a file. So it counts every new one as a file of the run.

The guard does not find a process that empties its environment, or shared memory that does not belong to Shoal.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

from shoal._transport.segment import FOLDER_VARIABLE, SHM

# The marks of a run and of those that it runs within, the outermost first.
MARK = "SHOAL_TEST_RUN"
# A process that was told to end may take a moment to be gone.
GRACE_S = 5.0


def marked_processes(mark: str) -> list[str]:
    """Returns the living processes of a run: pid, command line and the ports that each listens on."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and mark in process.environ().get(MARK, "").split():
                words = " ".join(process.cmdline()).split()  # on one line, even where an argument has several
                found.append(f"process {process.pid}: {' '.join(words)}{_ports(process)}")
        except (psutil.Error, OSError):  # it has ended, or belongs to another user
            continue
    return found


def untracked_files() -> set[str]:
    """Returns the files of the checkout here that git neither tracks nor ignores; none outside a checkout."""
    try:
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=all", "-z"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git here
        return set()
    return {line[3:] for line in status.stdout.split("\0") if line.startswith("?? ")}


def main(command: list[str], grace_s: float = GRACE_S) -> int:
    """Runs the command.

    Args:
        command: its words.
        grace_s: seconds that processes of the run have to end after the command.

    Returns:
        The command's exit status, or 1 if the run left something behind.
    """
    mark = uuid.uuid4().hex
    marks = f"{os.environ.get(MARK, '')} {mark}".strip()
    folder, segments = _own_folder(None), _own_folder(SHM) if SHM.is_dir() else None
    variables = {MARK: marks, "SHOAL_TRAINER_ENV": MARK, "TMPDIR": str(folder)}
    if segments:
        segments.chmod(0o1777)  # as /dev/shm: a test tries as another user
        variables[FOLDER_VARIABLE] = str(segments)
    untracked_before = untracked_files()
    try:
        status = subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
        deadline = time.monotonic() + grace_s
        while (processes := marked_processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        files = [f"file {entry.name}" for entry in folder.iterdir() if not entry.name.startswith("pytest-of-")]
        shared = [f"shared memory {entry.name}" for entry in segments.iterdir()] if segments else []
        untracked = [f"untracked file {name}" for name in sorted(untracked_files() - untracked_before)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if segments:
            shutil.rmtree(segments, ignore_errors=True)
    left = [*processes, *files, *shared, *untracked]
    for what in left:
        print(f"left behind: {what}", file=sys.stderr)
    if not left:
        print("nothing left behind: no process, port, file or shared memory")
    return status or bool(left)


def _own_folder(parent: Path | None) -> Path:
    return Path(tempfile.mkdtemp(prefix="shoal-test-run-", dir=parent))


def _ports(process: psutil.Process) -> str:
    try:
        held = {at.laddr.port for at in process.net_connections("inet") if at.status == psutil.CONN_LISTEN}
    except (psutil.Error, OSError):
        return ""
    return f" (listens on port {', '.join(map(str, sorted(held)))})" if held else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
