"""Further options of the roles' commands, as users give them (no I/O)."""

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


__all__ = ["ROLES", "check_flags"]
