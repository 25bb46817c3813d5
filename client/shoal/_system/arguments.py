"""Checks of the types of arguments of public functions, so that users see what to give instead of an AttributeError."""

import operator
from typing import Any

from shoal import errors

Kinds = type | tuple[type, ...]


def check_type(name: str, value: object, kinds: Kinds, give: str) -> None:
    """Checks the type of an argument.

    Args:
        name: name of the argument, for the message.
        value: its value. True and False are never allowed, although they are of type int.
        kinds: the allowed classes.
        give: what to give instead, with an example.

    Raises:
        BadRequest: the value has another type.
    """
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise errors.BadRequest(f"{name} is {value!r:.200}; give {give}")


def check_seconds(name: str, value: object, *, optional: bool = False) -> None:
    """Checks that an argument is a number, or None if it is optional.

    Raises:
        BadRequest: it is not.
    """
    if value is not None or not optional:
        check_type(name, value, (int, float), f"a number of seconds, such as 5.0{', or None' * optional}")


def check_count(name: str, value: Any, least: int = 0) -> int:
    """Returns an argument that must be a whole number of at least `least`. It may be an integer of NumPy.

    Args:
        name: name of the argument, for the message.
        value: its value.
        least: the smallest allowed number.

    Raises:
        BadRequest: it is no such number.
    """
    try:
        count = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise errors.BadRequest(
            f"{name} is {value!r:.200}; it must be a whole number, {least} or more", **{name: value}
        )
    return count


__all__ = ["check_count", "check_seconds", "check_type"]
