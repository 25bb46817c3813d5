"""Type checks of settings, which come from a command line or a file and may have any type."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, Union

from shoal import errors

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Singular and plural. bool is an int in Python, but not here.
_WORDS: Mapping[Any, tuple[str, str]] = {
    str: ("a string", "strings"),
    bool: ("true or false", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    Any: ("anything", "anything"),
}
_KINDS: Mapping[Any, type] = {str: str, int: Integral, float: Real}


def checked_settings(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Checks the types of a function's arguments before each call.

    Args:
        function: a function whose parameters are annotated with str, numbers, bool, None, or unions, sequences and
            mappings of these.

    Returns:
        The function. A call raises ProgramError if an argument has another type than its annotation.
    """
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function.func if isinstance(function, functools.partial) else function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if not _is(value, hints[name]):
                raise errors.ProgramError(f"{name} is {value!r}; give {_type_text(hints[name])}")
        return function(*args, **kwargs)

    return call


def _is(value: object, kind: Any) -> bool:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {Union, types.UnionType}:
        return any(_is(value, each) for each in inner)
    if origin is Literal:
        return isinstance(value, str)  # the function itself checks the value
    if origin is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str) and all(_is(each, inner[0]) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_is(each, inner[1]) for each in value.values())
    if kind is Any:
        return True
    return isinstance(value, _KINDS.get(kind, kind)) and (kind is bool or not isinstance(value, bool))


def _type_text(kind: Any, many: bool = False) -> str:
    """Returns a type in words."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {Union, types.UnionType}:
        return ", or ".join(_type_text(each, many) for each in inner if each is not types.NoneType)
    if origin is Literal:
        return _WORDS[str][many]
    if origin is Sequence:
        return f"{'lists' if many else 'a list'} of {_type_text(inner[0], True)}"
    if origin is Mapping:
        return f"{'mappings' if many else 'a mapping'} of names to {_type_text(inner[1], True)}"
    return _WORDS[kind][many]


__all__ = ["checked_settings"]
