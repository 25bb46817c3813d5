"""Runs a command and fails if it leaves anything behind: `python leaks.py COMMAND ...`.

Every process that the command starts, however deep and whoever its parent becomes, inherits a mark in its environment
and a temporary folder of the run's own. Afterwards no process with the mark may be alive (and so no port held), the
folder must be empty, /dev/shm must hold nothing new, and neither must the git checkout that the command ran in, but
for what it ignores.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

MARK = "SHOAL_TEST_RUN"
SEGMENTS = Path("/dev/shm")
# A process that was told to end may take a moment to be gone.
GRACE_S = 5.0


def marked_processes(mark: str) -> list[str]:
    """The living processes of a run: pid and command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"process {entry.name}: {command}")
        except OSError:  # ended meanwhile, or not ours to read
            continue
    return found


def shared_memory() -> set[str]:
    """The names of shared memory."""
    return {entry.name for entry in SEGMENTS.iterdir()} if SEGMENTS.is_dir() else set()


def untracked_files() -> set[str]:
    """Files of the checkout around the current folder that git neither tracks nor ignores; none outside a checkout."""
    try:
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=all", "-z"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git here
        return set()
    return {line[3:] for line in status.stdout.split("\0") if line.startswith("?? ")}


def main(command: list[str], grace_s: float = GRACE_S) -> int:
    """Runs the command; its exit status, or 1 if it left something."""
    mark = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="shoal-test-run-"))
    segments_before, untracked_before = shared_memory(), untracked_files()
    try:
        status = subprocess.run(command, env={**os.environ, MARK: mark, "TMPDIR": str(folder)}, check=False).returncode
        deadline = time.monotonic() + grace_s
        while (processes := marked_processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        files = [f"file {entry.name}" for entry in folder.iterdir() if not entry.name.startswith("pytest-of-")]
        segments = [f"shared memory {name}" for name in shared_memory() - segments_before]
        untracked = [f"untracked file {name}" for name in sorted(untracked_files() - untracked_before)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    left = [*processes, *files, *segments, *untracked]
    for what in left:
        print(f"left behind: {what}", file=sys.stderr)
    if not left:
        print("nothing left behind: no process, port, file or shared memory")
    return status or bool(left)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
