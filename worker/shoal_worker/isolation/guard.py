"""Guard of a trainer: the process between a daemon and its trainer. It ends the trainer and all its processes.

The daemon runs this file as a script, without any package. The guard starts the trainer with its limits and its user,
and waits for the end of the trainer or of the daemon. As a subreaper, the guard becomes the parent of every process of
the program that loses its parent. So it finds and kills all of them, including those outside the trainer's process
group. Then the guard ends as the trainer did: with the same exit status, or by the same signal.
"""

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

# What the daemon writes to the lifeline to end the trainer at once.
KILL = b"k"
_PR_SET_CHILD_SUBREAPER = 36
# Seconds that a trainer has to end by itself after its daemon has died. Trainers need less than one.
_ORPHAN_GRACE_S = 2.0
# Seconds until the guard checks again whether killed processes remain, unless one of its children ends earlier.
_LOOK_AGAIN_S = 0.1


class TrainerGuard:
    """One guard.

    Args:
        settings: the trainer's command, user, group, folder and limits, and the file descriptors of the lifeline and
            of the trainer's reports.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._lifeline: int = settings["lifeline"]
        self._scratch: str = settings.get("scratch", "")  # a folder to remove after the trainer
        os.set_inheritable(self._lifeline, False)
        self._status: int | None = None  # of the trainer, as `os.waitpid` returns it
        self._wakeup, signals = os.pipe()
        for end in (self._wakeup, signals):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        with suppress(OSError, AttributeError):  # not Linux: processes that leave the group are not found
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        handled = {signal.SIGTERM, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        self._trainer = os.fork()
        if self._trainer == 0:
            _become_trainer(settings, handled)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it only has to wake the guard
        signal.signal(signal.SIGTERM, lambda *_: self._signal_trainer(signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        nothing = os.open(os.devnull, os.O_RDWR)  # the daemon must see when the trainer closes its ends
        for number in (0, 1, 2, settings["reports"]):
            os.dup2(nothing, number)

    def run(self) -> int:
        """Waits for the end of the trainer or of the daemon, ends what is left, and returns the trainer's status."""
        while self._status is None:
            if self._lifeline in self._wait_for_signal([self._lifeline]):
                if os.read(self._lifeline, 16) != KILL:
                    self._give_grace()
                break
        self._kill_all()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
        assert self._status is not None
        return self._status

    def _give_grace(self) -> None:
        deadline = time.monotonic() + _ORPHAN_GRACE_S
        while self._status is None and (rest_s := deadline - time.monotonic()) > 0:
            self._wait_for_signal([], rest_s)

    def _wait_for_signal(self, further: list[int], timeout_s: float | None = None) -> list[int]:
        """Waits for a signal or for one of these descriptors, reaps ended children, and returns what can be read."""
        ready, _, _ = select.select([self._wakeup, *further], [], [], timeout_s)
        with suppress(BlockingIOError):
            os.read(self._wakeup, 4096)
        with suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG):
                if ended[0] == 0:
                    break
                if ended[0] == self._trainer:
                    self._status = ended[1]
        return ready

    def _signal_trainer(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._trainer, number)

    def _kill_all(self) -> None:
        """Kills all descendants. If one of them starts others meanwhile, these become children of the guard."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        killed = [True]
        while any(killed) or self._status is None:  # a process of another user may stay
            if self._status is None:  # the id cannot belong to another process before it is reaped
                self._signal_trainer(signal.SIGKILL)
            killed = [_kill(pid) for pid in _descendants(os.getpid())]
            self._wait_for_signal([], _LOOK_AGAIN_S if any(killed) or self._status is None else 0)


def _become_trainer(settings: dict[str, Any], handled: set[signal.Signals]) -> NoReturn:
    """Replaces this process by the trainer, in a session of its own, with its limits and its user."""
    try:
        os.setsid()
        for number in (*handled, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        for name, wanted in settings["limits"].items():
            kind = getattr(resource, name)
            _, hard = resource.getrlimit(kind)
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (limit, limit))
        if "user" in settings:
            os.setgroups([])
            os.setgid(settings["group"])
            os.setuid(settings["user"])
        command = settings["command"]
        os.execvp(command[0], command)  # noqa: S606 - the daemon's own command, without a shell
    except BaseException as error:
        os.write(2, f"cannot start the trainer: {error}\n".encode(errors="replace"))
    os._exit(126)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True


def _descendants(root: int) -> list[int]:
    """Returns the processes below one, without those that have ended. Empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children.setdefault(int(parent), []).append(int(name))
    found, pending = [], [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _end_like(status: int) -> NoReturn:
    """Ends this process as another one has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    _end_like(TrainerGuard(json.loads(sys.argv[1])).run())
