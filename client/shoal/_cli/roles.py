"""The command `run`, which starts the role that TF_CONFIG gives. Each role also has its own command."""

import os
from typing import Any

import typer

from shoal import errors
from shoal._cli.output import Output
from shoal._role import identity


def run(context: typer.Context) -> None:
    """Runs the role that the environment variable TF_CONFIG names.

    The task type `chief` runs a coordinator, `ps` runs a server, and `worker` runs a worker. The command takes the
    options of that role: `shoal server --help` lists those of a server.
    """
    group: Any = context.find_root().command
    with Output(as_json=False):
        role = identity.role_of_task(os.environ)
        command = group.get_command(context, role)
        if command is None:
            raise errors.BadRequest(
                f"TF_CONFIG makes this task a {role}, but that role is not installed; install all of Shoal"
            )
    command.main(context.args, prog_name=f"shoal {role}")


__all__ = ["run"]
