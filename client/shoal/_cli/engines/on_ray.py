"""The cluster of `shoal up --on ray`."""

import importlib
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from shoal import errors
from shoal._cli.output import Output
from shoal._display import counted

if TYPE_CHECKING:
    from shoal.ray import RayCluster

# By default, this command starts one cluster of each name on Ray, for all users together.
_NAMESPACE = "shoal"


def prepare(servers: int, workers: int, **options: Any) -> "RayCluster":
    """Connects to Ray, and returns a cluster that has not started. RAY_ADDRESS names the Ray cluster.

    Args:
        servers: number of servers.
        workers: number of workers.
        options: further arguments of `RayCluster`.

    Raises:
        NotConfigured: Ray is not installed.
        StartFailed: the Ray cluster has another version of Ray or Python.
        Unreachable: there is no Ray cluster at the address, or this machine is not a node of it.
    """
    try:
        found: Any = importlib.import_module("shoal.ray")
    except ImportError as error:
        raise errors.NotConfigured(str(error)) from None
    cluster: RayCluster = found.cluster(servers, workers, **{"namespace": _NAMESPACE, **options})
    found.connect()
    return cluster


def run(cluster: "RayCluster", out: Output) -> NoReturn:
    """Runs a cluster until an exception ends it, such as that of Ctrl-C.

    Args:
        cluster: the cluster.
        out: the output of the command.
    """
    with cluster:
        announce(cluster, out)
        threading.Event().wait()
    raise AssertionError  # nobody sets the event


def announce(cluster: "RayCluster", out: Output) -> None:
    """Prints the addresses of a cluster that is ready, and commands to begin with."""
    variables = cluster.variables
    link = cluster.login_link() if cluster.page else ""
    watch = f"Watch it at {link}\n" if link else ""
    exports = "\n".join(f"  export {name}={value}" for name, value in variables.items())
    workers = sum(name.startswith("worker-") for name in cluster.actors)
    out.message(
        f"Shoal runs on Ray at {variables['SHOAL_COORDINATOR']}, with {counted(workers, 'worker')}. Ctrl-C stops it. "
        f"{watch}From another terminal on this machine:\n{exports}\n  shoal status",
        {
            "address": variables["SHOAL_COORDINATOR"],
            "page": cluster.page,
            "metrics": cluster.metrics,
            "variables": variables,
        },
    )


__all__ = ["announce", "prepare", "run"]
