"""Resource limits of a trainer, and the advice in the errors of a trainer that exceeds one."""

import re
import signal
from dataclasses import dataclass

from shoal import errors

# The least memory with which a trainer can start.
_LEAST_MEMORY = 256 << 20
_LEAST_FILES = 64
# Error texts of a process that has reached a limit. They come from Python, NumPy, C++ and the system, and their errors
# have no common type.
_NO_MEMORY = re.compile(r"MemoryError|ran out of memory|bad_alloc|Cannot allocate memory|Unable to allocate")
_NO_FILES = re.compile(r"Too many open files")
_NO_PROCESSES = re.compile(r"can't start new thread|Resource temporarily unavailable")
# Signals by which a process ends if its C code does not handle a failed allocation.
_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS})


@dataclass(frozen=True, slots=True)
class TrainerLimits:
    """Resource limits of each trainer. 0 means no limit besides those of the daemon.

    Attributes:
        memory: bytes of private memory (RLIMIT_DATA). Shared memory, files and reserved addresses do not count.
        open_files: number of open files and sockets (RLIMIT_NOFILE).
        processes: number of processes and threads of the trainer's user on this host (RLIMIT_NPROC). The system does
            not apply it to root.

    Raises:
        BadRequest: a limit is too small for a trainer to start.
    """

    memory: int = 0
    open_files: int = 0
    processes: int = 0

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--trainer-memory", self.memory, _LEAST_MEMORY),
            ("--trainer-open-files", self.open_files, _LEAST_FILES),
            ("--trainer-processes", self.processes, 1),
        ):
            if value and value < least:
                raise errors.BadRequest(
                    f"{option} is {value:,}; a trainer needs at least {least:,}, and 0 means no limit", option=option
                )

    def by_resource(self) -> dict[str, int]:
        """Returns the limits by their names in the module `resource`.

        RLIMIT_CORE is 1: with this value, the kernel writes no core dump to a file, and none to a program. With 0, it
        would still write core dumps to a program.
        """
        given = {"RLIMIT_DATA": self.memory, "RLIMIT_NOFILE": self.open_files, "RLIMIT_NPROC": self.processes}
        return {"RLIMIT_CORE": 1, **{name: limit for name, limit in given.items() if limit}}

    def advice(self, status: int, error: str) -> str:
        """Returns a text that names the limits that a failed trainer may have exceeded; empty if there are none.

        Args:
            status: exit status of the trainer; negative if a signal killed it.
            error: its error; empty if it sent none.
        """
        memory = f"the limit of a trainer's memory on this worker is {self.memory:,} bytes (--trainer-memory)"
        files = f"the limit of a trainer's open files on this worker is {self.open_files:,} (--trainer-open-files)"
        processes = (
            f"the limit of processes and threads of a trainer's user on this worker is {self.processes:,} "
            "(--trainer-processes)"
        )
        crashed = not error and (status > 0 or -status in _CRASHES)
        reached = {
            memory: self.memory and (crashed or _NO_MEMORY.search(error) or _NO_PROCESSES.search(error)),
            files: self.open_files and (crashed or _NO_FILES.search(error)),
            processes: self.processes and (crashed or _NO_PROCESSES.search(error)),
        }
        return "; ".join(text for text, there in reached.items() if there)


__all__ = ["TrainerLimits"]
