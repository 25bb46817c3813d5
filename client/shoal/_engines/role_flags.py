"""Options of the roles' commands, as users of an engine give them (no I/O)."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from shoal import errors
from shoal._system import check_type

ROLES = ("coordinator", "server", "worker")
_GIVE = f"a dict of lists, such as {{'worker': ['--device', 'cpu']}}, with the keys {', '.join(ROLES)}"


def check_flags(given: Any) -> dict[str, list[str]]:
    """Returns the further options by role.

    Args:
        given: the options by role; None means none.

    Raises:
        BadRequest: a role is unknown, or its options are not a list.
    """
    check_type("flags", given, (Mapping, type(None)), _GIVE)
    for role, options in (given or {}).items():
        if role not in ROLES or isinstance(options, str) or not isinstance(options, Sequence):
            raise errors.BadRequest(f"flags has {role!r}: {options!r}; give {_GIVE}")
    return {role: list(map(str, options)) for role, options in (given or {}).items()}


def trainer_flags(allow_programs: Any, trainer_env: Any) -> list[str]:
    """Returns the options with which a worker chooses the programs of its trainers, and their environment variables.

    Args:
        allow_programs: a pattern of the programs that jobs may name, or a list of them; see `shoal.LocalCluster`.
        trainer_env: an environment variable that programs get, or a list of them.

    Raises:
        BadRequest: one of them is not a text.
    """
    flags = [flag for pattern in texts("allow_programs", allow_programs) for flag in ("--allow-program", pattern)]
    return flags + [flag for variable in texts("trainer_env", trainer_env) for flag in ("--trainer-env", variable)]


def texts(name: str, given: Any) -> list[str]:
    """Returns one text or path, or several of them, as a list of texts.

    Raises:
        BadRequest: one of them is neither a text nor a path.
    """
    found = [given] if isinstance(given, str | os.PathLike) else given
    check_type(name, found, Sequence, "a text, or a list of them")
    for text in found:
        check_type(name, text, (str, os.PathLike), "a text, or a list of them")
    return [os.fspath(text) for text in found]


__all__ = ["ROLES", "check_flags", "texts", "trainer_flags"]
