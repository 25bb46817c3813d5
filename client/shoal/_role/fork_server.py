"""Fork server: a process that loads the code of the roles once, and forks a process for each role that is started.

Loading takes a second of processor time, and a fork takes milliseconds. So a local cluster loads the code once and not
once for each role, and its roles share the memory of what is loaded. `multiprocessing` calls its like by this name.

A request to the fork server is one datagram of JSON:

- {"load": ROLE} loads the code of a role, while earlier roles start.
- {"name": NAME, "run": [ROLE, FLAG, ...]} starts a role. With it come four file descriptors: the role's standard input,
  output and error, and a pipe. The fork server writes two lines to the pipe: the process id, and at the end of the
  process its exit status.

The fork server ends at the end of its socket. Its roles end by themselves: each has a pipe from the same process. The
fork server has no threads of Python when it forks: a thread's locks would stay locked in the new process. OpenBLAS ends
its own threads before a fork.
"""

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# -P: a role does not import modules from the working directory.
_COMMAND = (sys.executable, "-P", "-m", "shoal._cli.fork_server")
_MOST_BYTES = 1 << 20
_STANDARD_STREAMS = 3
_STOP_S = 10.0
_TAIL_BYTES = 4096


class ForkedProcess:
    """A role's process, as `subprocess.Popen` shows its own children. Its methods can be called by several threads.

    Attributes:
        stdin: its standard input. It sees the end of it when this process ends.
        stdout: its standard output.
    """

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes], status: int) -> None:
        self.stdin, self.stdout = stdin, stdout
        self._lock = threading.Lock()
        self._lines = os.fdopen(status, "rb", buffering=0)
        self._returncode: int | None = None
        started = self._lines.readline()
        self.pid = int(started or 0)  # 0: the fork server has ended
        self._handle = _pidfd(self.pid)

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal, or None while the process runs."""
        with self._lock:
            if self._returncode is None and (self._handle is None or _readable(self._handle, 0.0)):
                # The fork server writes the status at once. If it has ended itself, nobody knows the status.
                self._returncode = int(self._lines.readline() or -signal.SIGKILL)
                self._release()
            return self._returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end of the process, and returns its exit status.

        Raises:
            TimeoutError: it still runs after `timeout_s` seconds. None means no limit.
        """
        with self._lock:
            handle = None if self._handle is None else os.dup(self._handle)
        if handle is not None:
            try:
                _readable(handle, timeout_s)
            finally:
                os.close(handle)
        if (status := self.poll()) is None:
            raise TimeoutError(f"process {self.pid} runs after {timeout_s} s")
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, such as SIGKILL, SIGSTOP or SIGCONT. This has no effect if the process has ended."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)

    def _release(self) -> None:
        self._lines.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class ForkServer:
    """Starts roles as forks of one process, which has loaded their code. See the module.

    Args:
        env: the environment of the process and of all roles.
        show_log: whether the process writes to the standard error of this one. Otherwise `tail` has its output.
        command: its command. The last argument will be the descriptor of its socket, for `serve`.
    """

    def __init__(self, env: Mapping[str, str], *, show_log: bool, command: Sequence[str] = _COMMAND) -> None:
        self._log = None if show_log else tempfile.TemporaryFile(prefix="shoal-")  # noqa: SIM115 - `close` does
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=dict(env),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches only this process
            )

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def load(self, role: str) -> None:
        """Makes the process load the code of a role, without waiting, before the first one is started."""
        self._send({"load": role}, [])

    def start(self, name: str, arguments: Sequence[str], stderr: IO[bytes] | None) -> ForkedProcess:
        """Starts a role.

        Args:
            name: the name that `ps` and `top` show as the command, after "shoal:".
            arguments: the role and its flags.
            stderr: a file for its standard error. None means that of this process.

        Returns:
            Its process. It has ended already if the fork server has ended.
        """
        ours, theirs = _pipes()
        stdin, stdout, status = ours
        try:
            log = 2 if stderr is None else stderr.fileno()
            self._send({"name": name, "run": list(arguments)}, [theirs[0], theirs[1], log, theirs[2]])
        finally:
            for end in theirs:
                os.close(end)
        return ForkedProcess(os.fdopen(stdin, "wb", buffering=0), os.fdopen(stdout, "rb"), status)

    def tail(self) -> str:
        """Returns the end of its own output, such as the reason why it did not start; see `tail`."""
        return tail(self._log)

    def close(self) -> None:
        """Ends the process. Roles that still run become children of another process, and end by themselves."""
        self._socket.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._log:
            self._log.close()

    def _send(self, request: Mapping[str, Any], descriptors: list[int]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: so has what is started
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)


def tail(log: IO[bytes] | None) -> str:
    """Returns the last lines of a log, at most 4 KiB. None, standard error, gives an empty string."""
    if log is None:
        return ""
    size = os.fstat(log.fileno()).st_size
    # pread does not move the offset, which the writes of other processes share.
    text = os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    return text.decode(errors="replace").strip()


def serve(control: socket.socket, load: Callable[[str], object]) -> list[str] | None:
    """Serves requests until the end of the socket.

    Args:
        control: the socket to the process that uses this one.
        load: loads the code of a role.

    Returns:
        None in the fork server itself, at its end. In the process of a role: the role and its flags, which the caller
        runs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    children: dict[int, tuple[int, int]] = {}  # by their pidfds: their ids, and the pipes for their status
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    selector.unregister(key.fileobj)
                    _reap(key.fd, *children.pop(key.fd))
                    continue
                data, descriptors, _flags, _peer = socket.recv_fds(control, _MOST_BYTES, _STANDARD_STREAMS + 1)
                if not data:
                    return None
                request = json.loads(data)
                if role := request.get("load"):
                    _load(load, role)
                    continue
                _load(load, request["run"][0])
                status = descriptors.pop()
                if pid := os.fork():
                    os.write(status, b"%d\n" % pid)
                    children[os.pidfd_open(pid)] = pid, status
                    selector.register(next(reversed(children)), selectors.EVENT_READ)
                    for each in descriptors:
                        os.close(each)
                    continue
                control.close()
                for each in [status, *children, *(pipe for _, pipe in children.values())]:
                    os.close(each)
                _become(request["name"], descriptors)
                return list(request["run"])


def _load(load: Callable[[str], object], role: str) -> None:
    # What cannot be loaded fails again in the process of the role, whose log then has the reason.
    with contextlib.suppress(Exception):
        load(role)


def _reap(handle: int, pid: int, status: int) -> None:
    """Collects a process that has ended, and tells its exit status."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # nobody asks any more
        os.write(status, b"%d\n" % code)
    os.close(status)
    os.close(handle)


def _become(name: str, streams: Sequence[int]) -> None:
    """Makes this new process one of its own: its session, its standard streams, its signals and its name."""
    os.setsid()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"shoal:{name}")


def _pipes() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns our ends and the role's ends of three pipes: standard input, standard output, status."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    status_read, status_write = os.pipe()
    return (in_write, out_read, status_read), (in_read, out_write, status_write)


def _pidfd(pid: int) -> int | None:
    """Returns a descriptor of a process; None if it has ended."""
    try:
        return os.pidfd_open(pid) if pid else None
    except ProcessLookupError:
        return None


def _readable(descriptor: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000.0))


__all__ = ["ForkServer", "ForkedProcess", "serve", "tail"]
