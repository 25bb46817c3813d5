"""The options of `shoal up` that belong to one engine: those of Ray, and the checks that none is ignored."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typer

from shoal import errors

_RAY_ONLY = "With --on ray: "
On = Annotated[
    Literal["local", "ray"],
    typer.Option("--on", help="Where the roles run: `local` runs child processes; `ray` runs Ray actors."),
]
Name = Annotated[
    str | None, typer.Option(help=f"{_RAY_ONLY}name of the cluster, unique in its namespace of Ray. Default: shoal.")
]
Namespace = Annotated[str | None, typer.Option(help=f"{_RAY_ONLY}namespace of the actors. Default: shoal.")]
Resources = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE:RESOURCE=AMOUNT,...",
        help=f"{_RAY_ONLY}what each process of a role needs, such as worker:CPU=4,GPU=1. Repeatable. Default: 0.1 CPU "
        "for the coordinator, 0.4 for a server, 0.5 for a worker.",
    ),
]
MaxWorkers = Annotated[
    int | None,
    typer.Option(
        min=0,
        help=f"{_RAY_ONLY}largest number of workers. The cluster adds workers while jobs can use them. Default: "
        "--workers.",
    ),
]
Idle = Annotated[
    float | None,
    typer.Option(
        "--idle", min=0, help=f"{_RAY_ONLY}seconds of low demand before idle workers are removed. Default: 30."
    ),
]
StartTimeout = Annotated[
    float | None,
    typer.Option(min=0, help=f"{_RAY_ONLY}seconds that the start of all roles may take. Default: 120."),
]
WaitForNodes = Annotated[
    bool,
    typer.Option(
        "--wait-for-nodes",
        help=f"{_RAY_ONLY}waits until nodes for the roles have joined, at most --start-timeout. Without it, the start "
        "fails at once if the nodes are too small.",
    ),
]
# The arguments of `RayCluster`, and the options that set them.
_RAY = {
    "name": "--name",
    "namespace": "--namespace",
    "resources": "--resources",
    "max_workers": "--max-workers",
    "idle_s": "--idle",
    "start_timeout_s": "--start-timeout",
    "wait_for_nodes": "--wait-for-nodes",
}
# The parameters of `up` that mean nothing on Ray.
_LOCAL = {"listen": "--listen", "log_dir": "--log-dir"}


def chosen(on: str, context: typer.Context, page_listen: str | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `RayCluster` that the user gave.

    Args:
        on: the engine.
        context: the context of the command.
        page_listen: the value of --page-listen; None means that it was not given.
        own: the values of the options of Ray by the arguments of `RayCluster`; None, an empty list and False mean that
            one was not given.

    Raises:
        BadRequest: an option belongs to another engine, or a resource is not ROLE:RESOURCE=AMOUNT.
    """
    given = {name: value for name, value in own.items() if value is not None and value is not False and value != []}
    if on != "ray":
        if given:
            raise errors.BadRequest(f"{_RAY[next(iter(given))]} has no effect without --on ray; leave it out")
        return {}
    listed = [option for name, option in _LOCAL.items() if _is_typed(context, name)]
    if page_listen and _is_typed(context, "page_listen"):
        listed.append("--page-listen with an address")
    if listed:
        raise errors.BadRequest(
            f"{listed[0]} has no effect with --on ray, which chooses the addresses and has the logs of its actors; "
            "leave it out"
        )
    if "resources" in given:
        given["resources"] = parse_resources(given["resources"])
    return given


def parse_resources(given: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns the resources by role.

    Args:
        given: texts such as "worker:CPU=4,GPU=1".

    Raises:
        BadRequest: one of them has another form.
    """
    found: dict[str, dict[str, float]] = {}
    for text in given:
        role, _, amounts = text.partition(":")
        for pair in amounts.split(","):
            resource, _, amount = pair.partition("=")
            try:
                found.setdefault(role.strip(), {})[resource.strip()] = float(amount)
            except ValueError:
                raise errors.BadRequest(
                    f"--resources {text!r} is not ROLE:RESOURCE=AMOUNT,...; write it as in worker:CPU=4,GPU=1"
                ) from None
    return found


def _is_typed(context: typer.Context, parameter: str) -> bool:
    """Returns whether the command line has an option. A variable may be meant for other commands."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


__all__ = [
    "Idle",
    "MaxWorkers",
    "Name",
    "Namespace",
    "On",
    "Resources",
    "StartTimeout",
    "WaitForNodes",
    "chosen",
    "parse_resources",
]
