"""Cluster of real processes on loopback, each of whose links passes through a proxy of `support.faults.proxy`.

The links have names:

- "worker-0 to coordinator", "server-1 to coordinator" and so on, one for each member, and "sessions to coordinator".
- "calls of server-0" and "lanes of server-0", for each server: its gRPC port, which the coordinator and all clients
  call, and its port for lanes.

A server listens on 127.0.0.1 and advertises 127.0.0.2, where its proxies listen on the same ports. A member's option
`--coordinator` is the address of its own proxy.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import shoal
from shoal import _rpc
from shoal._role import ForkServer, RoleProcess
from shoal._security import AccessRole
from shoal._security.access_files import AccessFile
from support.clusters.local import PROGRAMS
from support.faults.proxy import Network, Proxy

_HERE, _ADVERTISED = "127.0.0.1", "127.0.0.2"
_START_S, _STOP_S = 60.0, 10.0
_ATTEMPTS = 20
SESSIONS = "sessions to coordinator"


class ProxiedCluster:
    """A cluster whose links a test can disturb. It is a context manager, whose end stops it.

    Args:
        servers: number of servers.
        workers: number of workers.
        folder: an empty folder for the coordinator's store.
        flags: further flags by role, as for `LocalCluster`.
        transport: how clients reach servers, as SHOAL_TRANSPORT: tcp or grpc.
        seed: seed of the network.

    Attributes:
        network: the links by name; see the module.
    """

    def __init__(
        self,
        servers: int,
        workers: int,
        folder: Path,
        *,
        flags: Mapping[str, Sequence[str]] | None = None,
        transport: str = "tcp",
        seed: int = 0,
    ) -> None:
        self._flags = {"coordinator": ["--store", f"{folder}/coordinator.db", "--page-listen", ""]}
        self._flags["worker"] = ["--trainer-env", f"SHOAL_TRANSPORT={transport}"]
        self._flags["worker"] += [flag for path in PROGRAMS for flag in ("--path", str(path))]
        for role, given in (flags or {}).items():
            self._flags[role] = [*self._flags.get(role, ()), *given]
        self._processes: dict[str, RoleProcess] = {}
        self._stack = ExitStack()
        self.network = self._stack.enter_context(Network(seed))
        self._forks = ForkServer(os.environ, show_log=False)
        self._stack.callback(self._forks.close)
        self._ports: dict[str, list[str]] = {"coordinator": ["--listen", self._reserve()]}
        self._members = [*(f"server-{it}" for it in range(servers)), *(f"worker-{it}" for it in range(workers))]
        for member in self._members:
            self._link(f"{member} to coordinator", self.address)
            if member.startswith("server"):
                calls, lanes = self._advertised(f"calls of {member}"), self._advertised(f"lanes of {member}")
                self._ports[member] = ["--listen", calls, "--advertise", _ADVERTISED]
                self._ports[member] += ["--lane-port", lanes.rpartition(":")[2]]
        self._link(SESSIONS, self.address)

    @property
    def address(self) -> str:
        """The host:port of the coordinator, not through a proxy."""
        return self._ports["coordinator"][1]

    @property
    def processes(self) -> Mapping[str, RoleProcess]:
        """The processes by name: "coordinator", "server-0" and so on."""
        return self._processes

    def links(self, *words: str) -> list[Proxy]:
        """Returns the links whose name has one of these words; all of them if no word is given."""
        return [proxy for name, proxy in self.network.items() if not words or any(word in name for word in words)]

    def client(self) -> shoal.Client:
        """Returns a new client, whose calls to the coordinator pass no proxy."""
        return shoal.Client(self.address)

    def restart(self, name: str) -> RoleProcess:
        """Kills a role by SIGKILL if it runs, and starts it again at the same ports. Returns when it is ready."""
        if name in self._processes:
            self._processes[name].send_signal(signal.SIGKILL)
            self._processes[name].reap(_STOP_S)
        process = self._launch(name)
        process.wait_ready(_START_S)
        return process

    def start(self) -> None:
        """Starts all roles, and returns when they are ready."""
        coordinator = self._launch("coordinator")
        for role in ("server", "worker"):
            self._forks.load(role)
        coordinator.wait_ready(_START_S)
        self._share_tokens()
        for process in [self._launch(member) for member in self._members]:
            process.wait_ready(_START_S)

    def stop(self) -> None:
        """Ends all processes and links."""
        self.network.heal()
        for role in ("worker", "server", "coordinator"):
            ending = [process for name, process in self._processes.items() if name.startswith(role)]
            for process in ending:
                process.ask_to_stop()
            for process in ending:
                process.reap(_STOP_S)
        self._processes.clear()
        self._stack.close()

    def __enter__(self) -> "ProxiedCluster":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self, name: str) -> RoleProcess:
        role, _, index = name.partition("-")
        flags = ["--listen", f"{_HERE}:0", "--metrics-listen", f"{_HERE}:0", "--log-level", "warning"]
        if role != "coordinator":
            flags += ["--name", name, "--coordinator", self.network[f"{name} to coordinator"].address]
        flags += [*self._ports.get(name, ()), *self._flags.get(role, ())]
        process = RoleProcess(role, int(index or 0), flags, fork_server=self._forks)
        self._processes[name] = process
        return process

    def _share_tokens(self) -> None:
        """Lets members and sessions find their tokens under the addresses that they call: those of their proxies."""
        tokens = {AccessRole(role): token for role, token in AccessFile(self.address).read().items()}
        for link in self.links(" to coordinator"):
            file = AccessFile(link.address)
            file.write(tokens)
            self._stack.callback(file.discard)

    def _link(self, name: str, target: str) -> None:
        self.network.proxy(name, target)

    def _advertised(self, name: str) -> str:
        """Makes the proxy of a server's port. Returns the address for the server to listen on."""
        for _ in range(_ATTEMPTS):
            address = self._reserve()
            try:
                self.network.proxy(name, address, f"{_ADVERTISED}:{address.rpartition(':')[2]}")
            except OSError:  # another process has this port there
                continue
            return address
        raise AssertionError("no port is free on both addresses")

    def _reserve(self) -> str:
        """Reserves a port until the end of the cluster, so that a restarted role finds it free."""
        holder = self._stack.enter_context(_rpc.reserve(_HERE, 0))
        return f"{_HERE}:{holder.getsockname()[1]}"


__all__ = ["SESSIONS", "ProxiedCluster"]
