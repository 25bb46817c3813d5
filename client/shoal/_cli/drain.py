"""Command `drain`: moves everything off a server, and waits until it has left."""

from typing import Annotated, Any

import typer

from shoal._cli import options
from shoal._cli.output import Output
from shoal._session.server_drains import what_is_left
from shoal.status import MemberStatus

_Server = Annotated[str, typer.Argument(metavar="SERVER", help="Member id of the server, as in `shoal status`.")]
_StayOption = Annotated[
    bool,
    typer.Option("--stay", help="Lets the server stay in the cluster when it is drained, until it is stopped."),
]
_ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Drains the server even if jobs then lose their values, or have no other server."),
]
_NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Returns after the order, while the server drains.")]
_TimeoutOption = Annotated[float | None, typer.Option(min=0, help="Time limit of the wait in seconds. Default: none.")]


@options.connected
def drain(
    connect: options.Connect,
    server: _Server,
    stay: _StayOption = False,
    force: _ForceOption = False,
    no_wait: _NoWaitOption = False,
    timeout: _TimeoutOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Moves all jobs off a server, which then leaves the cluster and ends.

    Jobs move to other servers while they train. A job that cannot move takes a last checkpoint and restarts from it on
    other servers; if it is a job of sessions, it has to be opened again.

    The command prints what is left, and waits until the server has left. If it ends earlier, the server drains on; a
    repeat waits again. It is refused for the last server of a job, and if values would be lost.
    """
    with Output(as_json) as out, connect() as client:

        def show(now: MemberStatus) -> None:
            if not now.drained:
                out.message(f"{server} drains: {what_is_left(now)}", _record(now, "draining"))

        last = client.drain_server(
            server, stay=stay, force=force, wait=not no_wait, timeout_s=timeout, on_progress=show
        )
        if last.ended_jobs and not as_json:
            lost = "are still on it" if stay else "leave with it"
            out.message(f"The values of ended jobs {lost}: {', '.join(last.ended_jobs)}", {})
        if not last.alive:
            out.message(f"{server} has left; no job needed it", _record(last, "left"))
        elif last.drained:
            ends = "may be stopped" if stay else "ends now"
            out.message(f"{server} is drained: no job needs it, and it {ends}", _record(last, "drained"))


def _record(server: MemberStatus, state: str) -> dict[str, Any]:
    return {
        "member": server.member,
        "state": state,
        "incarnation": server.incarnation,
        "waiting_jobs": list(server.waiting_jobs),
        "moving_groups": server.moving_groups,
        "ended_jobs": list(server.ended_jobs),
    }


__all__ = ["drain"]
