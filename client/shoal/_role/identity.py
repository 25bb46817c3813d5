"""Who a role is: its name, where it listens, by which host others reach it, and where its coordinator is. Pure.

Each of the four comes from the first of these that says it: a flag or its `SHOAL_*` variable; `TF_CONFIG`, or else the
pod that this is; the default.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from shoal import errors
from shoal._role import tf_config
from shoal.client import DEFAULT_ADDRESS

ANY_PORT = "127.0.0.1:0"
# The variables that say who a process is other than by a flag's own: not for children that are told by flags.
SOURCES = (tf_config.VARIABLE, "SHOAL_POD_NAME")

MEMBER_ID = re.compile(r"[a-z0-9-]{1,63}")
# Where a pod listens, and the service at which it looks for its coordinator.
_POD_PORT, _POD_COORDINATOR = 7070, "coordinator"
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|\[::1\]")
_EVERYWHERE = ("0.0.0.0", "[::]")  # noqa: S104 - it is compared, and bound only where a cluster is described to us


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleIdentity:
    """Who a role is. Of what was given, empty is: not given.

    Attributes:
        name: member id, 1 to 63 characters of a-z, 0-9 and -; empty of a coordinator, which is no member.
        listen: host:port to serve at.
        advertise: host that others reach it by; empty: that of `listen`, or this machine's name where that is all.
        coordinator: host:port; empty of a coordinator.
    """

    name: str = ""
    listen: str = ""
    advertise: str = ""
    coordinator: str = ""


def resolve(role: str, given: RoleIdentity, environment: Mapping[str, str], default_name: str = "") -> RoleIdentity:
    """Who a role is.

    Args:
        role: coordinator, server or worker.
        given: by flags and their variables.
        environment: the variables of this process.
        default_name: for a member that nothing names.

    Raises:
        BadRequest: TF_CONFIG makes no sense or is another role's, a name is none, or something is missing.
    """
    if environment.get(tf_config.VARIABLE):
        described = _of_task(role, given, tf_config.read(environment[tf_config.VARIABLE]))
    elif environment.get("SHOAL_POD_NAME"):
        described = _of_pod(role, given, environment)
    else:
        described = RoleIdentity()
    if role == "coordinator":
        found = _first(given, described, RoleIdentity(listen=DEFAULT_ADDRESS))
        return RoleIdentity(listen=found.listen, advertise=found.advertise)
    found = _first(given, described, RoleIdentity(name=default_name, listen=ANY_PORT, coordinator=DEFAULT_ADDRESS))
    if not MEMBER_ID.fullmatch(found.name):
        raise errors.BadRequest(
            f"{found.name!r} is no name of a {role}: it is 1 to 63 characters of a-z, 0-9 and -; give one with --name "
            "or SHOAL_NAME",
            name=found.name,
        )
    return found


def address_warning(role: str, found: RoleIdentity, environment: Mapping[str, str]) -> str:
    """Why others may look for this coordinator where it is not; empty where nothing speaks for that.

    Members say themselves where they listen; of a coordinator there is only the list. Ports may be forwarded, so that
    this is no error.

    Args:
        role: coordinator, server or worker.
        found: what `resolve` gave.
        environment: the variables of this process.
    """
    text = environment.get(tf_config.VARIABLE)
    if not text or role != "coordinator":
        return ""
    listed = tf_config.read(text).port
    if found.listen.endswith(f":{listed}"):
        return ""
    return (
        f"TF_CONFIG has others look for this coordinator at port {listed}, and it listens at {found.listen}: if no "
        "port is forwarded, leave out --listen, and set SHOAL_LISTEN to nothing, which an image may have set"
    )


def role_of_task(environment: Mapping[str, str]) -> str:
    """The role that `TF_CONFIG` gives this process: coordinator, server or worker.

    Raises:
        BadRequest: it is not set, or makes no sense.
    """
    text = environment.get(tf_config.VARIABLE)
    if not text:
        raise errors.BadRequest(
            "TF_CONFIG is not set, so nothing says which role this is: set it, or start `shoal coordinator`, "
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
            f"TF_CONFIG says that this is task {task.index} of {task.type}, a {task.role}, and not a {role}: start "
            f"`shoal {task.role}`, or `shoal run`, which does as TF_CONFIG says; or unset TF_CONFIG",
            role=role,
            task=task.type,
        )
    if role != "coordinator" and not (task.coordinator or given.coordinator):
        raise errors.BadRequest(
            "TF_CONFIG lists no chief, so nothing says where the coordinator is: add cluster.chief with its host:port, "
            "or give --coordinator or SHOAL_COORDINATOR",
            variable=tf_config.VARIABLE,
        )
    # The host may be a service's name or a forwarded address, which no interface here has; a loopback one is the
    # cluster on one machine that it says it is.
    bound = task.host if _LOOPBACK.fullmatch(task.host) else _everywhere(task.host)
    return RoleIdentity(
        name=f"{role}-{task.index}",
        listen=f"{bound}:{task.port}",
        advertise=task.host,
        coordinator=task.coordinator,
    )


def _of_pod(role: str, given: RoleIdentity, environment: Mapping[str, str]) -> RoleIdentity:
    pod, address = environment["SHOAL_POD_NAME"], environment.get("SHOAL_POD_IP", "")
    # Without the cluster's domain, which clusters choose: their resolvers add it.
    within = f".{namespace}.svc" if (namespace := environment.get("SHOAL_POD_NAMESPACE")) else ""
    host = f"[{address}]" if ":" in address else address
    advertise = f"{pod}.{service}{within}" if (service := environment.get("SHOAL_SERVICE")) else host
    listen = f"{_everywhere(host)}:{_POD_PORT}"
    bound = (given.listen or listen).rpartition(":")[0]
    if role == "server" and not (advertise or given.advertise) and bound in _EVERYWHERE:
        raise errors.BadRequest(
            f"nobody could reach the pod {pod} by its name alone: set SHOAL_SERVICE to its headless service, or "
            "SHOAL_POD_IP to its address (status.podIP)",
            variable="SHOAL_SERVICE",
        )
    return RoleIdentity(
        name=pod, listen=listen, advertise=advertise, coordinator=f"{_POD_COORDINATOR}{within}:{_POD_PORT}"
    )


def _everywhere(host: str) -> str:
    """All interfaces, of the protocol that the host is of."""
    return _EVERYWHERE[host.startswith("[")]


__all__ = ["ANY_PORT", "MEMBER_ID", "SOURCES", "RoleIdentity", "address_warning", "resolve", "role_of_task"]
