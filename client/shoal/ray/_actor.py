"""The actor that runs one role as its child process. Ray starts the actor again when either of the two dies."""

import json
import os
import threading
import time
import warnings
from contextlib import suppress
from typing import Any

import ray

from shoal import _rpc
from shoal._engines import RoleChild, RolePlace, RoleSpec, claim, log_tail, release
from shoal._system.logs import Log

_log = Log(__name__)

# Seconds between two looks at the child, and between two looks at the coordinator's address.
_LOOK_S, _ADDRESS_S = 0.2, 5.0
# Seconds before a child that did not become ready is started again. Its predecessor may still have its port or name.
_PAUSE_S = 1.0
# Seconds that a role has to stop before it is killed, and those that a worker has to finish its batch.
STOP_S, LEAVE_S = 10.0, 40.0
# Seconds for which a node keeps the folder of a role that Ray has not started again: only a coordinator's has a state.
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
        with warnings.catch_warnings(action="ignore"):  # Ray's own property calls what Ray deprecates
            self._returned = ray.get_runtime_context().was_current_actor_reconstructed
        address = ray.util.get_node_ip_address()
        self._host = f"[{address}]" if ":" in address else address
        self._zone = ray.get_runtime_context().get_node_id()
        self._folder = claim(spec.folder_name, spec.files, KEPT_S[spec.role])
        self._reserved: list[Any] = []  # sockets that keep the coordinator's ports for its next start
        self._ports = (0, 0, 0) if coordinator else self._choose_ports()
        self._child: RoleChild | None = None
        self._failure = ""
        self._ending = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._supervisor.start()

    def __repr__(self) -> str:
        return self._spec.name

    def address(self) -> str:
        """Returns the host:port at which the coordinator of this actor listens, or will listen."""
        return f"{self._host}:{self._ports[0]}"

    def ready(self, timeout_s: float) -> dict[str, Any]:
        """Waits until the role is ready.

        Args:
            timeout_s: seconds to wait.

        Returns:
            What the role reported, with `actor` (the process id of this actor) and `node`. Or `failure`, the reason why
            it is not ready.
        """
        deadline = time.monotonic() + timeout_s
        while not self._failure and time.monotonic() < deadline:
            child = self._child
            if child and child.ready and child.wait(0) is None:
                return {**child.ready, "actor": os.getpid(), "node": self._zone}
            time.sleep(_LOOK_S / 4)
        return {"failure": self._failure or f"{self._spec.name} was not ready in time{_log_excerpt()}"}

    def stop(self) -> None:
        """Stops the role, and removes its folder. The actor does nothing afterwards."""
        self._end(lambda child: child.stop(STOP_S))

    def leave(self) -> None:
        """Lets the role leave the cluster gracefully, and removes its folder. The actor does nothing afterwards."""
        self._end(lambda child: child.leave(LEAVE_S))

    def _end(self, end: Any) -> None:
        self._ending.set()
        if self._child:
            end(self._child)
        self._supervisor.join(STOP_S)
        release(self._folder)

    def _choose_ports(self) -> tuple[int, int, int]:
        """Returns free ports for the coordinator, the same ones as before on the same node."""
        kept = self._folder / _PORTS
        wanted = json.loads(kept.read_text()) if kept.exists() else [0, 0, 0]
        chosen = []
        for port in wanted:
            try:
                holder = _rpc.reserve(self._host, port)
            except OSError:  # another process has taken it meanwhile
                holder = _rpc.reserve(self._host, 0)
            self._reserved.append(holder)
            chosen.append(holder.getsockname()[1])
        kept.touch(mode=0o600)
        kept.write_text(json.dumps(chosen))
        return chosen[0], chosen[1], chosen[2]

    def _supervise(self) -> None:
        """Starts the role, again until it was ready once, and ends the actor when the role has ended then."""
        try:
            while not self._ending.is_set():
                address = self._find_coordinator()
                place = RolePlace(self._host, self._zone, self._folder, self._ports, address)
                child = RoleChild(self._spec.arguments(place), self._spec.variables(place))
                self._child = child
                status = self._watch(child, address)
                if self._ending.is_set():
                    return
                if child.ready and status == 0:
                    self._failure = f"{self._spec.name} was asked to stop, and has left the cluster"
                    return
                if child.ready:
                    _log.warning("the role has ended, and Ray starts its actor again", name=self._spec.name)
                    os._exit(1)
                reason = f"{self._spec.name} ended with exit status {status} before it was ready"
                if not self._returned:
                    self._failure = f"{reason}{_log_excerpt()}"
                    return
                _log.warning(reason)
                self._ending.wait(_PAUSE_S)
        except BaseException as error:
            self._failure = f"{self._spec.name} could not be started: {error}"
            raise

    def _watch(self, child: RoleChild, address: str) -> int | None:
        """Waits for the end of the role, and stops it if the coordinator has another address.

        Returns:
            The exit status; None if it was stopped.
        """
        next_look = time.monotonic() + _ADDRESS_S
        while (status := child.wait(_LOOK_S)) is None and not self._ending.is_set():
            if address and time.monotonic() >= next_look:
                next_look = time.monotonic() + _ADDRESS_S
                now = self._ask_address(1.0)
                if now and now != address:
                    _log.warning("the coordinator has moved", name=self._spec.name, address=now)
                    child.stop(STOP_S)
                    return None
        return status

    def _find_coordinator(self) -> str:
        """Returns the address of the coordinator, when it is known. Empty for the coordinator itself."""
        while self._coordinator and not self._ending.is_set():
            if address := self._ask_address(_ADDRESS_S):
                return address
            self._ending.wait(_LOOK_S)
        return ""

    def _ask_address(self, timeout_s: float) -> str:
        with suppress(ray.exceptions.RayError, ValueError):  # it is being started again, or has ended
            actor = ray.get_actor(self._coordinator, namespace=self._namespace)
            return str(ray.get(actor.address.remote(), timeout=timeout_s))
        return ""


def _log_excerpt() -> str:
    text = log_tail()
    return f"; end of its log:\n{text}" if text else "; see its log in Ray"


__all__ = ["LEAVE_S", "STOP_S", "RoleActor"]
