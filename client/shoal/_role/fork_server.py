"""Fork server: a process that loads the code of the roles once, and forks a process for each role that is started.

Loading takes a second of processor time, and a fork takes milliseconds. So a local cluster loads the code once and not
once for each role, and its roles share the memory of what is loaded. `multiprocessing` has a similar fork server.

A request to the fork server is one datagram of JSON:

- {"load": ROLE} loads the code of a role, while earlier roles start.
- {"name": NAME, "run": [ROLE, FLAG, ...]} starts a role. With it come four file descriptors: the role's standard input,
  output and error, and a socket. The fork server sends two messages to the socket: the process id with a descriptor of
  the process (a pidfd), and at the end of the process its exit status.

The fork server exits when its socket closes. If the process that started it ends, the roles end by themselves: the
standard input of each is a pipe from that process. The fork server has no threads of Python when it forks: a thread's
locks would stay locked in the new process. OpenBLAS ends its own threads before a fork. If something else has started a
thread, such as a debugger's `sitecustomize`, the role's process loads the code itself.
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
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# -P: a role does not import modules from the working directory.
_PYTHON = (sys.executable, "-P", "-m")
_COMMAND = (*_PYTHON, "shoal._cli.fork_server")
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

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes], status: socket.socket) -> None:
        self.stdin, self.stdout = stdin, stdout
        self._pid = 0
        self._lock = threading.Lock()
        self._status = status
        self._handle: int | None = None  # the pidfd, while the process runs
        self._returncode: int | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 if the process is not made yet."""
        with self._lock:
            self._started()
            return self._pid

    def wait_started(self, timeout_s: float) -> bool:
        """Waits until the process has been made, or cannot be made any more. Returns whether this is so in time."""
        _wait_readable(self._status.fileno(), timeout_s)
        with self._lock:
            return self._started()

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal, or None while the process runs or is not yet made."""
        with self._lock:
            if self._started() and self._returncode is None and _wait_readable(self._handle, 0.0):
                # The fork server sends the status at once. If it was killed itself, nobody knows the status.
                self._end(int(self._status.recv(32) or -signal.SIGKILL))
            return self._returncode

    def wait(self, timeout_s: float) -> int:
        """Waits for the end of the process, and returns its exit status.

        Raises:
            TimeoutError: it still runs after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        self.wait_started(timeout_s)
        with self._lock:
            handle = None if self._handle is None else os.dup(self._handle)
        if handle is not None:
            try:
                _wait_readable(handle, deadline - time.monotonic())
            finally:
                os.close(handle)
        if (status := self.poll()) is None:
            raise TimeoutError(f"process {self._pid} runs after {timeout_s} s")
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, such as SIGKILL, SIGSTOP or SIGCONT. This has no effect if the process has ended."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._started() and self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        """Releases what this process holds of it."""
        self.stdin.close()
        with self._lock:
            self._end(self._returncode)

    def _started(self) -> bool:
        """Takes the first message if it has come. Returns whether the process has been made, or never will be."""
        if self._pid or self._returncode is not None:
            return True
        if not _wait_readable(self._status.fileno(), 0.0):
            return False
        message, handles, _, _ = socket.recv_fds(self._status, 32, 1)
        if handles:
            self._pid, self._handle = int(message), handles[0]
            os.set_inheritable(self._handle, False)
        else:  # the fork server has ended
            self._end(-signal.SIGKILL)
        return True

    def _end(self, returncode: int | None) -> None:
        self._returncode = returncode
        self._status.close()
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
            Its process, which may not be made yet.

        Raises:
            OSError: the flags are too long, or this process has too many open files.
        """
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            in_read, in_write = os.pipe()
            stdin = ours.enter_context(os.fdopen(in_write, "wb", buffering=0))
            theirs.callback(os.close, in_read)
            out_read, out_write = os.pipe()
            stdout = ours.enter_context(os.fdopen(out_read, "rb"))
            theirs.callback(os.close, out_write)
            status, reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(status)
            theirs.enter_context(reports)
            log = 2 if stderr is None else stderr.fileno()
            self._send({"name": name, "run": list(arguments)}, [in_read, out_write, log, reports.fileno()])
            ours.pop_all()
        return ForkedProcess(stdin, stdout, status)

    def tail(self) -> str:
        """Returns the end of its own output, such as the reason why it did not start; see `tail`."""
        return tail(self._log)

    def kill(self) -> None:
        """Kills the process. Its roles go on, and none of those that are not made yet will be made."""
        self._process.kill()

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
    children: dict[int, tuple[int, socket.socket]] = {}  # by their pidfds: their ids, and the sockets for their status
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
                wanted = list(request["run"])
                _load(load, wanted[0])
                status = socket.socket(fileno=descriptors.pop())
                safe = threading.active_count() == 1
                if pid := os.fork():
                    handle = os.pidfd_open(pid)
                    selector.register(handle, selectors.EVENT_READ)
                    children[handle] = pid, status
                    with contextlib.suppress(BrokenPipeError):  # nobody asks any more
                        socket.send_fds(status, [b"%d" % pid], [handle])
                    for descriptor in descriptors:
                        os.close(descriptor)
                    continue
                for each in (control, status, *(of_another for _, of_another in children.values())):
                    each.close()
                for handle in children:
                    os.close(handle)
                _become(request["name"], descriptors)
                if not safe:
                    os.execv(sys.executable, [*_PYTHON, "shoal", *wanted])  # noqa: S606 - our own command line
                return wanted


def _load(load: Callable[[str], object], role: str) -> None:
    # What cannot be loaded fails again in the process of the role, whose log then has the reason.
    with contextlib.suppress(Exception):
        load(role)


def _reap(handle: int, pid: int, status: socket.socket) -> None:
    """Collects a process that has ended, and tells its exit status."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(handle)
    with status, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody asks any more
        status.send(b"%d" % code)


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


def _wait_readable(descriptor: int | None, timeout_s: float) -> bool:
    if descriptor is None or descriptor < 0:  # it is closed: the process has ended
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000.0))


__all__ = ["ForkServer", "ForkedProcess", "serve", "tail"]
