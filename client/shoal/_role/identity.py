"""Identity of a role: its name, its listening address, its advertised host, and its coordinator (no I/O).

Each of the four comes from the first source that has it: an option or its `SHOAL_*` variable, then `TF_CONFIG` or the
pod, then the default.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from shoal import _rpc, errors
from shoal._system import tf_config
from shoal.client import DEFAULT_ADDRESS

ANY_PORT = "127.0.0.1:0"
# Variables, besides those of options, that identify a process. Children that get options must not inherit them.
SOURCES = (tf_config.VARIABLE, "SHOAL_POD_NAME")

MEMBER_ID = re.compile(r"[a-z0-9-]{1,63}")
_ZONE = re.compile(r"[a-z0-9.-]{0,253}")  # the names of nodes of Kubernetes are zones
# The port of a pod, and the service of its coordinator.
_POD_PORT, _POD_COORDINATOR = 7070, "coordinator"
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|\[::1\]")
_EVERYWHERE = ("0.0.0.0", "[::]")  # noqa: S104 - compared; bound only for TF_CONFIG and pods


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleIdentity:
    """The identity of a role. In an identity from options, an empty field means that the option was not given.

    Attributes:
        name: member id, 1 to 63 characters of a-z, 0-9 and -. A coordinator has none, since it is not a member.
        listen: host:port to listen on.
        advertise: host by which others reach the role. Empty means the host of `listen`, or this machine's name if
            `listen` is at all interfaces.
        coordinator: host:port of the coordinator. Empty for a coordinator itself.
    """

    name: str = ""
    listen: str = ""
    advertise: str = ""
    coordinator: str = ""


def resolve(role: str, given: RoleIdentity, environment: Mapping[str, str], default_name: str = "") -> RoleIdentity:
    """Determines the identity of a role.

    Args:
        role: coordinator, server or worker.
        given: the identity from options and their variables.
        environment: the environment variables of this process.
        default_name: the member id if no source has one.

    Returns:
        The identity, without empty fields except those that `RoleIdentity` allows.

    Raises:
        BadRequest: TF_CONFIG is invalid or belongs to another role, a name or an address is invalid, or a value is
            missing.
    """
    if environment.get(tf_config.VARIABLE):
        described = _of_task(role, given, tf_config.read(environment[tf_config.VARIABLE]))
    elif environment.get("SHOAL_POD_NAME"):
        described = _of_pod(role, given, environment)
    else:
        described = RoleIdentity()
    if role == "coordinator":
        found = _first(given, described, RoleIdentity(listen=DEFAULT_ADDRESS))
        _rpc.parse_address(found.listen, "an address for --listen")
        return RoleIdentity(listen=found.listen, advertise=found.advertise)
    found = _first(given, described, RoleIdentity(name=default_name, listen=ANY_PORT, coordinator=DEFAULT_ADDRESS))
    if not MEMBER_ID.fullmatch(found.name):
        raise errors.BadRequest(
            f"{found.name!r} is not a valid name of a {role}; give 1 to 63 characters of a-z, 0-9 and - with --name or "
            "SHOAL_NAME",
            name=found.name,
        )
    _rpc.parse_address(found.listen, "an address for --listen")
    _rpc.parse_address(found.coordinator, "an address for --coordinator")
    return found


def check_zone(server: str, zone: str) -> None:
    """Checks the zone of a server.

    Args:
        server: member id of the server.
        zone: the zone; empty means the host of its address.

    Raises:
        BadRequest: the zone is invalid.
    """
    if not _ZONE.fullmatch(zone):
        raise errors.BadRequest(
            f"the zone {zone!r:.80} of server {server} is not valid; give at most 253 characters of a-z, 0-9, . and - "
            "with --zone or SHOAL_ZONE",
            member=server,
        )


def address_warning(role: str, found: RoleIdentity, environment: Mapping[str, str]) -> str:
    """Returns a warning if the address of a coordinator differs from the one in TF_CONFIG, else an empty string.

    Members register their addresses; a coordinator is found by TF_CONFIG alone. A different port is not an error,
    because it may be forwarded.

    Args:
        role: coordinator, server or worker.
        found: the result of `resolve`.
        environment: the environment variables of this process.

    Returns:
        The warning, or an empty string.
    """
    text = environment.get(tf_config.VARIABLE)
    if not text or role != "coordinator":
        return ""
    listed = tf_config.read(text).port
    if found.listen.endswith(f":{listed}"):
        return ""
    return (
        f"TF_CONFIG gives port {listed} for this coordinator, but it listens on {found.listen}; if the port is not "
        "forwarded, remove --listen, and set SHOAL_LISTEN to an empty value if the image has set it"
    )


def role_of_task(environment: Mapping[str, str]) -> str:
    """Returns the role that `TF_CONFIG` gives this process: coordinator, server or worker.

    Raises:
        BadRequest: TF_CONFIG is not set or is invalid.
    """
    text = environment.get(tf_config.VARIABLE)
    if not text:
        raise errors.BadRequest(
            "TF_CONFIG is not set, so the role of this process is unknown; set it, or start `shoal coordinator`, "
            "`shoal server` or `shoal worker`",
            variable=tf_config.VARIABLE,
        )
    return tf_config.read(text).role


def _first(*sources: RoleIdentity) -> RoleIdentity:
    names = [field.name for field in fields(RoleIdentity)]
    return RoleIdentity(
        **{name: next(filter(None, (getattr(source, name) for source in sources)), "") for name in names}
    )


def _of_task(role: str, given: RoleIdentity, task: tf_config.Task) -> RoleIdentity:
    if task.role != role:
        raise errors.BadRequest(
            f"TF_CONFIG says that this is task {task.index} of {task.type}, a {task.role}, and not a {role}; start "
            f"`shoal {task.role}` or `shoal run`, or unset TF_CONFIG",
            role=role,
            task=task.type,
        )
    if role != "coordinator" and not (task.coordinator or given.coordinator):
        raise errors.BadRequest(
            "TF_CONFIG lists no chief, so the address of the coordinator is unknown; add cluster.chief with its "
            "host:port, or give --coordinator or SHOAL_COORDINATOR",
            variable=tf_config.VARIABLE,
        )
    # The host may be a service's name or a forwarded address, which no interface here has. A loopback address means a
    # cluster on one machine.
    bound = task.host if _LOOPBACK.fullmatch(task.host) else _everywhere(task.host)
    return RoleIdentity(
        name=f"{role}-{task.index}",
        listen=f"{bound}:{task.port}",
        advertise=task.host,
        coordinator=task.coordinator,
    )


def _of_pod(role: str, given: RoleIdentity, environment: Mapping[str, str]) -> RoleIdentity:
    pod, address = environment["SHOAL_POD_NAME"], environment.get("SHOAL_POD_IP", "")
    # The domain of the cluster is left out: resolvers add it.
    within = f".{namespace}.svc" if (namespace := environment.get("SHOAL_POD_NAMESPACE")) else ""
    host = f"[{address}]" if ":" in address else address
    advertise = f"{pod}.{service}{within}" if (service := environment.get("SHOAL_SERVICE")) else host
    listen = f"{_everywhere(host)}:{_POD_PORT}"
    bound = (given.listen or listen).rpartition(":")[0]
    if role == "server" and not (advertise or given.advertise) and bound in _EVERYWHERE:
        raise errors.BadRequest(
            f"the pod {pod} cannot be reached by its name alone; set SHOAL_SERVICE to its headless service, or "
            "SHOAL_POD_IP to its address (status.podIP)",
            variable="SHOAL_SERVICE",
        )
    return RoleIdentity(
        name=pod, listen=listen, advertise=advertise, coordinator=f"{_POD_COORDINATOR}{within}:{_POD_PORT}"
    )


def _everywhere(host: str) -> str:
    """Returns the address of all interfaces, for the IP version of the host."""
    return _EVERYWHERE[host.startswith("[")]


__all__ = [
    "ANY_PORT",
    "MEMBER_ID",
    "SOURCES",
    "RoleIdentity",
    "address_warning",
    "check_zone",
    "resolve",
    "role_of_task",
]
