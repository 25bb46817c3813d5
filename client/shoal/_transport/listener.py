"""Listener: the accepting end of connections, with limits, and one thread for each connection."""

import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from shoal import errors
from shoal._limits import Limit
from shoal._security import Principal
from shoal._system.logs import Log
from shoal._transport.connection import Connection, Frames
from shoal._transport.handshake import Security, accept_handshake, send_error
from shoal._transport.lane import Lane
from shoal._transport.lane_socket import SERVER_SPIN_S, STALL_S
from shoal.v1 import parameter_server_pb2 as pb

_log = Log(__name__)

_ACCEPT_PAUSE_S = 0.1
# Seconds for the whole handshake: the protection of the bytes, the hello and its answer.
HELLO_TIMEOUT_S = 5.0
# A client's lanes to one server: for pulls and for pushes.
_CLIENT_LANES = 2


class ConnectionHandler(Protocol):
    """Handler of one connection. The listener always closes it."""

    def welcome(self, hello: pb.LaneHello) -> pb.LaneWelcome:
        """Returns the answer to an accepted hello."""
        ...

    def serve(self) -> None:
        """Answers calls until the other end closes the connection.

        Raises:
            Unreachable: the other end closed the connection.
            ShoalError: the other end sent a frame that is not valid, or stalls.
        """
        ...

    def close(self) -> None:
        """Frees the handler's resources, except for the connection."""
        ...


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """Limits of the connections of a listener.

    Attributes:
        limit, host_limit: their entries in the table of limits.
        most: largest number of connections at a time.
        most_of_host: largest number of connections of one host at a time.
    """

    limit: Limit
    host_limit: Limit
    most: int
    most_of_host: int


class Listener:
    """Accepts connections, and gives each one a thread and a handler.

    A caller that stalls or waits blocks only its own thread. A connection whose handshake is not complete within 5 s is
    closed, even if bytes still arrive: a caller that has not proved anything must not hold a connection.

    Args:
        listening: a stream socket that is bound and listens; the listener owns it.
        frames: the kinds of frame on this port.
        handler: creates the handler of a connection.
        security: checks the hello of each connection.
        limits: the limits of connections; further ones are refused.
        name: name of a connection in messages, and of its thread. The accepting thread has the same name with an s.
        advice: what a refused client should do, for its error message.
        stall_s: seconds without progress after which a transfer fails.
    """

    def __init__(
        self,
        listening: socket.socket,
        frames: Frames,
        handler: Callable[[Connection], ConnectionHandler],
        *,
        security: Security,
        limits: "ListenerLimits",
        name: str,
        advice: str,
        stall_s: float = STALL_S,
    ) -> None:
        self._frames, self._handler, self._security = frames, handler, security
        self._limits, self._name, self._advice, self._stall_s = limits, name, advice, stall_s
        self._lock = threading.Lock()  # guards _served, _of_host, _greeting and _stopping
        self._served: dict[threading.Thread, Lane] = {}
        self._of_host: Counter[str] = Counter()  # connections in _served
        self._greeting: dict[Lane, float] = {}  # deadlines of handshakes in progress, the earliest first
        self._stopping = False
        self._pause = threading.Event()  # never set
        self._socket = listening
        # A connection that ends before it is accepted must not block the thread that closes late ones.
        listening.setblocking(False)
        self._acceptor: threading.Thread | None = None

    @property
    def address(self) -> Any:
        """The bound address, as the socket reports it: host and port for TCP."""
        return self._socket.getsockname()

    def start(self) -> None:
        """Starts to accept connections."""
        self._acceptor = threading.Thread(target=self._accept, name=f"{self._name}s", daemon=True)
        self._acceptor.start()

    @property
    def count(self) -> int:
        """The number of open connections."""
        with self._lock:
            return len(self._served)

    def close_refused(self, check: Callable[[Principal], object]) -> None:
        """Closes the connections whose other end has an identity that `check` refuses with an error of this package."""
        with self._lock:
            served = [*self._served.values()]
        for lane in served:
            try:
                if lane.identity:
                    check(lane.identity)
            except errors.ShoalError:
                lane.close()

    def stop(self) -> None:
        """Closes all connections, and waits for their threads."""
        with self._lock:
            self._stopping = True
            served = dict(self._served)
        for lane in served.values():
            lane.close()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        if self._acceptor:
            self._acceptor.join()
        self._socket.close()
        for thread in served:
            thread.join()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            left = self._close_late()
            try:
                if not poll.poll(left):
                    continue
                connection, address = self._socket.accept()
                lane = Lane(connection, _peer(address), self._frames, stall_s=self._stall_s, spin_s=self._spin_s)
            except BlockingIOError:
                continue
            except OSError as error:
                if self._stopping:
                    return
                _log.warning(f"could not accept a {self._name}", error=str(error))
                self._pause.wait(_ACCEPT_PAUSE_S)  # the cause may pass, such as too many open files
                continue
            self._begin(lane)

    def _spin_s(self) -> float:
        """Returns how long a lane may poll now, in seconds. It must not take cores from calls of other clients."""
        return SERVER_SPIN_S if len(self._served) <= _CLIENT_LANES else 0.0

    def _close_late(self) -> float | None:
        """Closes connections whose handshake takes too long. Returns milliseconds until the next one may be late."""
        now = time.monotonic()
        late = []
        left = None
        with self._lock:
            for lane, give_up in self._greeting.items():
                if give_up > now:
                    left = 1000 * (give_up - now) + 1
                    break
                late.append(lane)
            for lane in late:
                del self._greeting[lane]
        for lane in late:
            _log.debug(f"a {self._name} was closed: its handshake was not complete in time", peer=lane.peer)
            lane.close()
        return left

    def _begin(self, lane: Lane) -> None:
        thread = threading.Thread(target=self._serve, args=(lane,), name=self._name, daemon=True)
        with self._lock:
            refusal = self._refusal(_host(lane))
            if refusal is None and not _started(thread):
                refusal = errors.Overloaded(f"this server has no thread for another {self._name}; {self._advice}")
            if refusal is None:
                self._served[thread] = lane
                self._of_host[_host(lane)] += 1
                self._greeting[lane] = time.monotonic() + HELLO_TIMEOUT_S
        if refusal:
            with suppress(errors.ShoalError):
                send_error(lane, refusal)
            lane.close()

    def _refusal(self, host: str) -> errors.ShoalError | None:
        """Returns why another connection of a host is refused now."""
        limits, kind = self._limits, f"{self._name}s"
        if self._stopping:
            return errors.Unreachable("this server is stopping")
        if len(self._served) >= limits.most:
            problem = f"this server has {len(self._served)} {kind}"
            return limits.limit.refusal(problem, self._advice, limit=limits.most)
        if self._of_host[host] >= limits.most_of_host:
            problem = f"{host} has {self._of_host[host]} {kind} to this server"
            return limits.host_limit.refusal(problem, self._advice, limit=limits.most_of_host)
        return None

    def _serve(self, lane: Lane) -> None:
        try:
            with closing(self._handler(lane)) as handler:
                accept_handshake(lane, self._security, handler.welcome)
                with self._lock:
                    self._greeting.pop(lane, None)
                handler.serve()
        except (errors.Unreachable, errors.DeadlineExceeded) as error:
            _log.debug(f"a {self._name} ended", reason=error.message)
        except errors.ShoalError as error:
            _log.warning(f"a {self._name} was closed", reason=error.message)
        except Exception:
            _log.exception(f"a {self._name} failed")
        finally:
            lane.close()
            with self._lock:
                self._served.pop(threading.current_thread(), None)
                self._of_host[_host(lane)] -= 1
                if not self._of_host[_host(lane)]:
                    del self._of_host[_host(lane)]
                self._greeting.pop(lane, None)


def _host(lane: Lane) -> str:
    """Returns the other end's host, without its port."""
    return lane.peer.rpartition(":")[0]


def _peer(address: Any) -> str:
    """Returns the other end's name for messages. A client on a Unix socket has no address."""
    return f"{address[0]}:{address[1]}" if address else "a process of this host"


def _started(thread: threading.Thread) -> bool:
    """Starts a thread. Returns False if the system does not allow this process another one."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


__all__ = ["ConnectionHandler", "Listener", "ListenerLimits"]
