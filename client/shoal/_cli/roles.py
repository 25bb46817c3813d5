"""The command that runs a role without naming it. Those of the roles are their own (`shoal.roles` entry points)."""

import os
from typing import Any

import typer

from shoal import errors
from shoal._cli.output import Output
from shoal._role import identity


def run(context: typer.Context) -> None:
    """Runs the role that the variable TF_CONFIG gives this task: a chief coordinates, a ps is a server.

    Takes the flags of that role: `shoal server --help` has a server's.
    """
    group: Any = context.find_root().command
    with Output(as_json=False):
        role = identity.role_of_task(os.environ)
        command = group.get_command(context, role)
        if command is None:
            raise errors.BadRequest(f"TF_CONFIG makes this a {role}, and none is installed here: install shoal whole")
    command.main(context.args, prog_name=f"shoal {role}")


__all__ = ["run"]
