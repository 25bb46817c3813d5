"""Wall clock of a process with an offset that a test sets; Python imports this module at the start of each process.

SHOAL_TEST_CLOCKS is a folder. The file with the name of a role, such as `server-0`, has the seconds by which the wall
clock of this role and of its child processes is ahead. The monotonic clock stays as it is, as on a real machine.
`support.faults.wall_clocks` writes the files.

Nothing of Shoal is imported here: the clock must be replaced before a module binds `time.time`.
"""

import os
import struct
import sys
import time

_PREFIX = "shoal:"
# Linux keeps 15 characters of a name.
_NAMES = {"coordinat": "coordinator"}
_DEPTH = 6

_real = time.time
_folder = os.environ.get("SHOAL_TEST_CLOCKS", "")
_files: dict[int, int] = {}  # the descriptor of the role's file, by process


def _role(pid: int) -> str:
    """Returns the role that a process is, or that is its ancestor; empty if there is none."""
    for _ in range(_DEPTH):
        with open(f"/proc/{pid}/stat") as file:
            text = file.read()
        name = text[text.index("(") + 1 : text.rindex(")")]
        if name.startswith(_PREFIX):
            found = name.removeprefix(_PREFIX)
            return _NAMES.get(found, found)
        pid = int(text.rpartition(")")[2].split()[1])
        if pid <= 1:
            break
    return ""


def _offset() -> float:
    pid = os.getpid()
    descriptor = _files.get(pid, -1)
    if descriptor < 0:
        try:
            role = _role(pid)
            if not role:  # the fork server, or a role that has no name yet
                return 0.0
            descriptor = _files[pid] = os.open(os.path.join(_folder, role), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0.0
    try:
        return float(struct.unpack("d", os.pread(descriptor, 8, 0))[0])
    except (OSError, struct.error):  # closed by a library that closes all files
        return 0.0


def _time() -> float:
    # The core of gRPC gets deadlines in wall-clock time, and compares them with the machine's clock.
    caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - documented; inspect is slow to import
    return _real() if caller.startswith("grpc") else _real() + _offset()


if _folder:
    time.time = _time
