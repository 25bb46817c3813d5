"""Settings of the types that a function says: what a command line or a file gives may be of any."""

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

# Of one and of many. bool is a number to Python, and not to us.
_WORDS: Mapping[Any, tuple[str, str]] = {
    str: ("a text", "texts"),
    bool: ("true or false", "trues and falses"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    Any: ("anything", "anything"),
}
_KINDS: Mapping[Any, type] = {str: str, int: Integral, float: Real}


def checked_settings(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, which looks at its arguments before it begins.

    Args:
        function: its parameters say their types: text, numbers, bool, None, and unions, sequences and mappings of such.

    Returns:
        The same, which raises a ProgramError that names an argument of another type.
    """
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function.func if isinstance(function, functools.partial) else function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if not _is(value, hints[name]):
                raise errors.ProgramError(f"{name} is {value!r}; give {_said(hints[name])}")
        return function(*args, **kwargs)

    return call


def _is(value: object, kind: Any) -> bool:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {Union, types.UnionType}:
        return any(_is(value, each) for each in inner)
    if origin is Literal:
        return isinstance(value, str)  # of which, the function says
    if origin is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str) and all(_is(each, inner[0]) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_is(each, inner[1]) for each in value.values())
    if kind is Any:
        return True
    return isinstance(value, _KINDS.get(kind, kind)) and (kind is bool or not isinstance(value, bool))


def _said(kind: Any, many: bool = False) -> str:
    """A type in words."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {Union, types.UnionType}:
        return ", or ".join(_said(each, many) for each in inner if each is not types.NoneType)
    if origin is Literal:
        return _WORDS[str][many]
    if origin is Sequence:
        return f"{'lists' if many else 'a list'} of {_said(inner[0], True)}"
    if origin is Mapping:
        return f"{'mappings' if many else 'a mapping'} of names to {_said(inner[1], True)}"
    return _WORDS[kind][many]


__all__ = ["checked_settings"]
