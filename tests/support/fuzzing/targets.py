"""All fuzz targets, and the share of a campaign's time that each gets."""

from shoal import errors
from support.fuzzing import (
    file_targets,
    handler_targets,
    replica_targets,
    security_targets,
    socket_targets,
    text_targets,
    tls_targets,
    wire_targets,
)
from support.fuzzing.campaign import Target

# Targets that are slow or have more to find get more of the time.
_WEIGHTS = {
    "sockets": 8.0,
    "tls_ports": 4.0,
    "coordinator_rpcs": 3.0,
    "server_rpcs": 2.0,
    "lanes": 2.0,
    "replicas": 2.0,
    "manifests": 2.0,
    "npz": 2.0,
}


def all_targets() -> list[Target]:
    """Returns new targets, not started."""
    modules = (
        wire_targets,
        replica_targets,
        file_targets,
        text_targets,
        security_targets,
        handler_targets,
        socket_targets,
        tls_targets,
    )
    return [target for module in modules for target in module.targets()]


def chosen(names: str) -> list[Target]:
    """Returns the targets of some names, which have commas between them; all targets for an empty text.

    Raises:
        BadRequest: there is no such target.
    """
    found = {target.name: target for target in all_targets()}
    wanted = names.split(",") if names else [*found]
    if unknown := [name for name in wanted if name not in found]:
        raise errors.BadRequest(f"there is no target {', '.join(unknown)}; there are {', '.join(found)}")
    return [found[name] for name in wanted]


def weight_of(target: Target) -> float:
    """Returns the part of the time that a target gets, relative to the others."""
    return _WEIGHTS.get(target.name, 1.0)
