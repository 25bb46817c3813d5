"""The description of one role, with which an engine starts it on any node, its command line and variables (no I/O)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal._role.identity import SOURCES
from shoal._role.worker_options import THREADS, share_of_cores

_CA, _CERTIFICATE, _KEY = "ca.pem", "certificate.pem", "key.pem"
# Variables of the process that starts a role, and of the user's other clusters. A role has options instead.
_REPLACED = (*SOURCES, "SHOAL_COORDINATOR", "SHOAL_TOKEN_FILE", "SHOAL_NAME", "SHOAL_LISTEN", "SHOAL_INSECURE")


@dataclass(frozen=True, slots=True)
class RolePlace:
    """Where a role runs.

    Attributes:
        host: address of its node.
        zone: id of its node, as the zone of a server.
        folder: private folder with its files.
        ports: ports of a coordinator: for calls, for the page and for metrics.
        coordinator: host:port of the coordinator. Empty for a coordinator itself.
        cores: number of cores of the node.
    """

    host: str
    zone: str
    folder: Path
    ports: tuple[int, int, int] = (0, 0, 0)
    coordinator: str = ""
    cores: int = 1

    @property
    def address(self) -> str:
        """The host:port of a coordinator."""
        return f"{self.host}:{self.ports[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """One role of a cluster. It has the role's own certificate and key, and those of no other role.

    Attributes:
        cluster: random id of the cluster.
        role: coordinator, server or worker.
        name: name of the process, such as "server-0", which it keeps when it is started again.
        ca, certificate: PEM.
        key: PEM. The representation leaves it out.
        flags: options of its command that are the same on each node.
        environment: environment variables, in addition to those of the process that starts it. They may be secret, so
            the representation leaves them out.
        page: whether a coordinator has a page.
        threads: number of threads of its libraries. 0 means its share of the cores of its node.
        sharing: number of workers among which the cores are divided.
    """

    cluster: str
    role: str
    name: str
    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    page: bool = True
    threads: int = 0
    sharing: int = 1

    @property
    def folder_name(self) -> str:
        """The beginning of the name of its private folder, the same after a restart."""
        return f"shoal-{self.cluster}-{self.name}"

    @property
    def files(self) -> dict[str, bytes]:
        """The content of its files, by their names."""
        return {_CA: self.ca, _CERTIFICATE: self.certificate, _KEY: self.key}

    def arguments(self, place: RolePlace) -> list[str]:
        """Returns the command line, after `shoal`."""
        folder, listen, metrics = place.folder, f"{place.host}:{place.ports[0]}", f"{place.host}:{place.ports[2]}"
        made = [
            "--tls-ca",
            f"{folder / _CA}",
            "--tls-cert",
            f"{folder / _CERTIFICATE}",
            "--tls-key",
            f"{folder / _KEY}",
        ]
        made += ["--listen", listen, "--metrics-listen", metrics]
        if self.role == "coordinator":
            made += ["--page-listen", f"{place.host}:{place.ports[1]}" if self.page else ""]
            if "--store" not in self.flags:
                made += ["--store", f"{folder / 'coordinator.db'}"]
        else:
            made += ["--coordinator", place.coordinator, "--name", self.name]
        if self.role == "server":
            made += ["--zone", place.zone]
        return [self.role, *made, *self.flags, "--supervised"]

    def variables(self, place: RolePlace, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns the environment variables. A number of threads that the user gave in any of them stays.

        Args:
            place: where the role runs.
            environment: those of the process that starts it.
        """
        further = dict(self.environment)
        if not any(name in environment or name in further for name in THREADS):
            own = dict.fromkeys(THREADS, str(self.threads)) if self.threads else {}
            further |= own or share_of_cores(place.cores, self.sharing)
        return role_variables(environment, further, place.folder)


def role_variables(environment: Mapping[str, str], further: Mapping[str, str], state: Path) -> dict[str, str]:
    """Returns the environment variables of a role, without those that identify the process that starts it.

    Args:
        environment: the variables of that process.
        further: variables of the role.
        state: folder for the access file of a coordinator. It is not in the home folder, where other roles on the node
            would find a token of an admin.
    """
    kept = {name: value for name, value in environment.items() if name not in _REPLACED}
    return {**kept, **further, "XDG_STATE_HOME": str(state)}


__all__ = ["RolePlace", "RoleSpec", "role_variables"]
