"""The claim on the folder of a run: only the allocation that has it runs the coordinator and writes checkpoints.

Each claim is a file, and the one with the highest number counts. A new claim creates the file with the next number,
which only one process can do, also on a network file system. The holder of an earlier claim notices it, and ends.
The files stay, so that no number is used twice.
"""

import errno
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from shoal import errors
from shoal._system import atomic_write, host_id, private_files
from shoal.slurm._allocation import Allocation
from shoal.slurm._queue import Presence, presence
from shoal.slurm._shared_files import files_in, patiently

# How often a process tries to claim a folder, and the seconds in between: a run can take 40 s to end, and a node can
# see a new file up to a minute later.
_ATTEMPTS, PAUSE_S = 50, 2.0
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
_START_FIELD = 19  # of /proc/PID/stat, after the name of the program: the time at which the process started


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that has a claim.

    Attributes:
        run: id of what was submitted; see `Allocation`.
        attempt: id of the start of the tasks.
        job: id of Slurm's job. Empty without Slurm.
        host: the machine, until it reboots.
        pid: the process id.
        started: when the process started; empty if the system does not say it.
        ending: whether its tasks end. It writes no more checkpoints, but still needs its files.
        released: whether it has given the claim back.
    """

    run: str
    attempt: str
    job: str
    host: str
    pid: int
    started: str
    ending: bool = False
    released: bool = False

    @property
    def gone(self) -> bool:
        """Whether the holder has surely ended."""
        if self.released:
            return True
        if self.job and (found := presence(self.job)) is not Presence.UNKNOWN:
            return found is not Presence.RUNNING
        return self.host == _host() and _started(self.pid) != self.started


_UNREADABLE = Holder(run="unknown", attempt="", job="", host="unknown", pid=0, started="")


class FolderClaim:
    """The claim of this process. As a context manager, it gives the claim back at the end of the block.

    Args:
        folder: folder of the claims.
        number: number of the claim.
        holder: this process.
    """

    def __init__(self, folder: Path, number: int, holder: Holder) -> None:
        self._folder, self._number, self._holder = folder, number, holder

    @classmethod
    def take(cls, folder: Path, place: Allocation) -> "FolderClaim":
        """Claims the folder, and waits until a run that is ending has ended. An earlier start of the same run loses it.

        Raises:
            JobRunning: another run has it.
            OSError: the folder cannot be written.
        """
        mine = Holder(
            run=place.run,
            attempt=place.attempt,
            job=place.job,
            host=_host(),
            pid=os.getpid(),
            started=_started(os.getpid()),
        )
        private_files.make_folder(folder)
        for _ in range(_ATTEMPTS):
            if number := patiently(lambda: _try(folder, mine)):
                return cls(folder, number, mine)
            time.sleep(PAUSE_S)  # another process was faster, or the holder is ending
        raise _in_use(folder, *_newest(folder))

    @property
    def held(self) -> bool:
        """Whether this is the newest claim, as far as the file server tells it now."""
        with suppress(OSError):
            return max(_numbers(self._folder), default=0) <= self._number
        return True

    def check(self) -> None:
        """Raises JobRunning if another allocation has taken the folder over."""
        if not self.held:
            raise errors.JobRunning(
                f"a later start of the run in {self._folder.parent} has taken the folder over, so this one ends"
            )

    def end(self) -> None:
        """Notes that the tasks of this run end."""
        self._note(replace(self._holder, ending=True))

    def __enter__(self) -> "FolderClaim":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note(replace(self._holder, released=True))

    def _note(self, holder: Holder) -> None:
        if self.held:
            self._holder = holder
            patiently(self._write)

    def _write(self) -> None:
        with atomic_write(_file(self._folder, self._number)) as unfinished:
            _write(unfinished, _content(self._holder))


def refuse_other(folder: Path, run: str = "") -> None:
    """Checks that no other run has the folder, or that it is ending.

    Args:
        folder: folder of the claims.
        run: id of the run that asks. "" means a new one.

    Raises:
        JobRunning: another run has it, or it is not sure that it has ended.
    """
    number, holder = _newest(folder)
    if holder is not None and not holder.ending and holder.run != run and not holder.gone:
        raise _in_use(folder, number, holder)


def _try(folder: Path, mine: Holder) -> int:
    """Claims the folder if it is free, and returns the number of the claim, else 0.

    Raises:
        JobRunning: another run has the folder, and does not end.
    """
    refuse_other(folder, mine.run)
    number, holder = _newest(folder)
    free = holder is None or holder.run == mine.run or holder.gone
    return number + 1 if free and _create(_file(folder, number + 1), _content(mine)) else 0


def _newest(folder: Path) -> tuple[int, Holder | None]:
    """Returns the number and the holder of the newest claim; 0 and None without claims."""
    number = max(_numbers(folder), default=0)
    try:
        return number, Holder(**json.loads(_file(folder, number).read_bytes()))
    except FileNotFoundError:
        return number, None
    except (ValueError, TypeError):
        return number, _UNREADABLE  # it is being written


def _in_use(folder: Path, number: int, holder: Holder | None) -> errors.JobRunning:
    who = f"{holder.job or holder.run}, task 0 on {holder.host.partition('/')[0]}" if holder else "unknown"
    return errors.JobRunning(
        f"the run in {folder.parent} goes on in another allocation ({who}); wait for its end or cancel it, or name "
        f"another folder. If you are sure that it has ended, remove {_file(folder, number)}"
    )


def _numbers(folder: Path) -> list[int]:
    return [int(file.name) for file in files_in(folder) if file.name.isdecimal()]


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:08}"


def _content(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _create(file: Path, content: bytes) -> bool:
    """Creates a file with all its content in one step. Returns False if it exists."""
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    _write(unfinished, content)
    try:
        os.link(unfinished, file)
    except OSError as error:
        if error.errno in _NO_LINKS:
            with suppress(FileExistsError):
                _write(file, content)
                return True
            return False
        if error.errno != errno.EEXIST:
            raise
        return unfinished.stat().st_nlink > 1  # the answer of a file server was lost, and the call was repeated
    finally:
        unfinished.unlink()
    return True


def _write(file: Path, content: bytes) -> None:
    with open(private_files.create(file), "wb") as opened:
        opened.write(content)


def _host() -> str:
    return f"{socket.gethostname()}/{host_id()}"


def _started(pid: int) -> str:
    """Returns when a process started, "" if there is none with this id or the system does not say it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_FIELD]
    except (OSError, IndexError):
        return ""


__all__ = ["PAUSE_S", "FolderClaim", "Holder", "refuse_other"]
