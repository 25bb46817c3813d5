"""The actor that runs one role as its child process. Ray starts the actor again when either of the two dies."""

import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from shoal import _rpc
from shoal._engines import RoleChild, RolePlace, RoleSpec, claim, log_tail, pause_after_death, release
from shoal._role.worker_options import THREADS
from shoal._system import atomic_write
from shoal._system.logs import Log

_log = Log(__name__)

# Seconds between two looks at the child, and between two looks at the coordinator's address.
LOOK_S, ADDRESS_S = 0.2, 5.0
# Seconds before an actor that did not start is started again. Its predecessor may still have its port.
PAUSE_S = 1.0
# Seconds that a role has to stop before it is killed, and those that a worker has to finish its batch.
STOP_S, LEAVE_S = 10.0, 40.0
# Seconds before an abandoned role folder is removed. Only the coordinator's holds state.
KEPT_S = {"coordinator": 120, "server": 5, "worker": 5}
_PORTS = "ports.json"


class RoleActor:
    """Runs one role. Ray runs the methods in several threads.

    The name of the actor in Ray's logs is that of the role.

    Args:
        spec: the role.
        coordinator: name of the actor of the coordinator; empty for that actor itself.
        namespace: namespace of the actors.
    """

    def __init__(self, spec: RoleSpec, coordinator: str, namespace: str) -> None:
        self._spec, self._coordinator, self._namespace = spec, coordinator, namespace
        # Whether Ray has started this actor before, which is not known yet. Then a start that fails is tried again.
        self._returned = True
        self._lock = threading.Lock()  # between the start of a child and the end of the actor: no child starts after it
        self._ending = threading.Event()
        self._child: RoleChild | None = None
        self._failure = ""
        self._reserved: list[Any] = []  # sockets that keep the coordinator's ports for its next start
        try:
            self._prepare()
        except BaseException as error:
            self._exit_if_returned(error)
            raise
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._supervisor.start()

    def _prepare(self) -> None:
        """Finds out about the node, and takes the folder and the ports of the role."""
        with warnings.catch_warnings(action="ignore"):  # Ray's own property calls what Ray deprecates
            self._returned = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        address = ray.util.get_node_ip_address()
        self._host = f"[{address}]" if ":" in address else address
        self._zone = ray.get_runtime_context().get_node_id()
        self._cores = _cores(self._zone)
        self._folder = claim(self._spec.folder_name, self._spec.files, KEPT_S[self._spec.role])
        self._ports = self._choose_ports() if not self._coordinator else (0, 0, 0)

    def __repr__(self) -> str:
        return self._spec.name

    def address(self) -> str:
        """Returns the host:port at which the coordinator of this actor listens, or will listen."""
        return f"{self._host}:{self._ports[0]}"

    def ready(self) -> dict[str, Any]:
        """Returns whether the role is ready, without waiting, so that callers never use up the threads of the actor.

        Returns:
            What the role reported, with `actor` (the process id of this actor) and `node`. Or `failure`, the reason why
            it does not start. Nothing while it starts.
        """
        child = self._child
        if self._failure:
            return {"failure": self._failure}
        if child and child.ready and child.wait(0) is None:
            return {**child.ready, "actor": os.getpid(), "node": self._zone}
        return {}

    def log_excerpt(self) -> str:
        """Returns the end of a sentence about this role: the end of its log, or where to find the log."""
        return _log_excerpt()

    def stop(self) -> None:
        """Stops the role, and removes its folder. The actor does nothing afterwards."""
        self._end(lambda child: child.stop(STOP_S))

    def leave(self) -> None:
        """Lets the role leave the cluster gracefully, and removes its folder. The actor does nothing afterwards."""
        self._end(lambda child: child.leave(LEAVE_S))

    def _end(self, end: Callable[[RoleChild], None]) -> None:
        with self._lock:
            self._ending.set()
        if self._child:
            end(self._child)
        self._supervisor.join(STOP_S)
        release(self._folder)
        for holder in self._reserved:
            holder.close()

    def _choose_ports(self) -> tuple[int, int, int]:
        """Returns free ports for the coordinator, the same ones as before on the same node."""
        kept = self._folder / _PORTS
        chosen = []
        for port in _read_ports(kept):
            try:
                holder = _rpc.reserve(self._host, port)
            except OSError:  # another process has taken it meanwhile
                holder = _rpc.reserve(self._host, 0)
            self._reserved.append(holder)
            chosen.append(holder.getsockname()[1])
        with atomic_write(kept) as unfinished:  # the process may be killed meanwhile
            unfinished.touch(mode=0o600)
            unfinished.write_text(json.dumps(chosen))
        return chosen[0], chosen[1], chosen[2]

    def _supervise(self) -> None:
        """Starts the role and retries until it is ready. Exits the actor when a ready role ends."""
        try:
            while (started := self._start_child()) and self._goes_on(*started):
                pass
        except BaseException as error:
            self._failure = f"{self._spec.name} could not be started: {error}"
            self._exit_if_returned(error)
            raise

    def _start_child(self) -> tuple[RoleChild, str] | None:
        """Starts the role, and returns it with the coordinator's address. Returns None if the actor ends."""
        address = self._find_coordinator()
        place = RolePlace(self._host, self._zone, self._folder, self._ports, address, self._cores)
        with self._lock:
            if self._ending.is_set():
                return None
            self._child = RoleChild(self._spec.arguments(place), self._spec.variables(place, _environment()))
            return self._child, address

    def _goes_on(self, child: RoleChild, address: str) -> bool:
        """Waits for the end of the role, and returns whether this actor starts it again."""
        status = self._watch(child, address)
        name = self._spec.name
        if self._ending.is_set():
            return False
        if status is None:  # it must find the coordinator elsewhere
            self._returned = self._returned or child.ready is not None
            return True
        if child.ready and status == 0 and self._spec.role != "worker":  # nobody asks a worker to leave in this way
            self._failure = f"{name} was asked to stop, and has left the cluster"
            return False
        if child.ready:
            pause_s = pause_after_death(self._folder, time.monotonic() - child.ready_at)
            _log.warning("the role has ended, and Ray starts its actor again", name=name, status=status, in_s=pause_s)
            self._exit_after(pause_s)
            return False
        reason = f"{name} ended with exit status {status} before it was ready"
        if not self._returned:
            self._failure = f"{reason}{_log_excerpt()}"
            return False
        pause_s = pause_after_death(self._folder, 0.0)
        _log.warning(reason, in_s=pause_s)
        return not self._ending.wait(pause_s)

    def _exit_if_returned(self, error: BaseException) -> None:
        """Exits the process, so that Ray starts the actor again. After an exception, Ray may leave it as it is."""
        if self._returned:
            _log.warning("the role cannot start, and Ray starts its actor again", name=self._spec.name, reason=error)
            self._exit_after(PAUSE_S)

    def _exit_after(self, pause_s: float) -> None:
        """Exits the process after a pause, unless the actor is asked to end meanwhile."""
        if not self._ending.wait(pause_s):
            os._exit(1)

    def _watch(self, child: RoleChild, address: str) -> int | None:
        """Waits for the end of the role, and stops it if the coordinator has another address.

        Returns:
            The exit status; None if it was stopped.
        """
        next_look = time.monotonic() + ADDRESS_S
        while (status := child.wait(LOOK_S)) is None and not self._ending.is_set():
            if address and time.monotonic() >= next_look:
                next_look = time.monotonic() + ADDRESS_S
                now = self._ask_address(1.0)
                if now and now != address:
                    _log.warning("the coordinator has moved", name=self._spec.name, address=now)
                    child.stop(STOP_S)
                    return None
        return status

    def _find_coordinator(self) -> str:
        """Returns the address of the coordinator, when it is known. Empty for the coordinator itself."""
        while self._coordinator and not self._ending.is_set():
            if address := self._ask_address(ADDRESS_S):
                return address
            self._ending.wait(LOOK_S)
        return ""

    def _ask_address(self, timeout_s: float) -> str:
        with suppress(ray.exceptions.RayError, ValueError):  # it is being started again, or has ended
            actor = ray.get_actor(self._coordinator, namespace=self._namespace)
            return str(ray.get(actor.address.remote(), timeout=timeout_s))
        return ""


def _read_ports(file: Path) -> list[int]:
    """Returns the ports that a file has, or three times any free port if it has none."""
    with suppress(OSError, ValueError):
        match json.loads(file.read_text()):
            case [int(), int(), int()] as ports if all(0 <= port < 2**16 for port in ports):
                return [*map(int, ports)]
    return [0, 0, 0]


def _environment() -> dict[str, str]:
    """Returns the variables of this process, without a number of threads that Ray has added. That of a user stays."""
    begun = Path("/proc/self/environ").read_bytes().split(b"\0")
    given = {variable.partition(b"=")[0].decode(errors="replace") for variable in begun}
    return {name: value for name, value in os.environ.items() if name not in THREADS or name in given}


def _cores(node: str) -> int:
    """Returns the number of cores of this machine, or what Ray counts on its node if that is less."""
    counted = [int(it["Resources"].get("CPU", 0)) for it in ray.nodes() if it["NodeID"] == node]
    return min([os.cpu_count() or 1, *filter(None, counted)])


def _log_excerpt() -> str:
    text = log_tail()
    return f"; end of its log:\n{text}" if text else "; see its log in Ray"


__all__ = ["LEAVE_S", "STOP_S", "RoleActor"]
