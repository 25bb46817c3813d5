"""Entry point of a local cluster's fork server (`shoal._role.fork_server`): `python -m shoal._cli.fork_server FD`."""

import atexit
import os
import socket
import sys
import traceback
from importlib.metadata import entry_points
from typing import Any

from shoal._cli import load


def _serve(descriptor: int) -> None:
    load()
    from shoal._cli.app import find_command  # noqa: PLC0415 - after the allocator is tuned
    from shoal._role import fork_server  # noqa: PLC0415

    commands: dict[str, Any] = {}

    def load_role(role: str) -> None:
        if role in commands:
            return
        commands[role] = command = find_command(role)
        command.make_context(role, [], resilient_parsing=True)  # the first parsing loads what parses
        for found in entry_points(group="shoal.roles", name=role):
            found.load()
            sys.modules[found.module].load()  # beside the function of the role

    status = 0
    if wanted := fork_server.serve(socket.socket(fileno=descriptor), load_role):
        role, *flags = wanted
        status = _run(commands.get(role) or find_command(role), flags, f"shoal {role}")
    # Python would first release each module, which takes a fifth of a second, and more memory: forks share it.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def _run(command: Any, flags: list[str], name: str) -> int:
    """Runs the command of a role, and returns the exit status of its process."""
    try:
        command.main(flags, prog_name=name)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # as Python ends a process
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
