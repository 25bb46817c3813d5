"""Names: nearest ones for what is unknown, Keras' snake case, and unique names of layers."""

import difflib
import functools
import inspect
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from shoal import errors

T = TypeVar("T")

# Arguments by name: the value that is accepted, and what the message about any other value says.
Refused = Mapping[str, tuple[Any, str]]

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_counts: Counter[str] = Counter()
_lock = threading.Lock()  # guards _counts


def advice(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the nearest name, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"


def named(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Returns the entry of a table.

    Args:
        kind: what the names stand for, for the message.
        name: the name.
        table: all entries, by name.

    Raises:
        BadRequest: there is no such name. The message has the nearest one.
    """
    if name not in table:
        raise errors.BadRequest(f"{kind} {name!r} is unknown; {advice(name, table)}")
    return table[name]


def made_of(kind: str, description: Mapping[str, Any], table: Mapping[str, Callable[..., T]]) -> T:
    """Returns the object that Keras' dict form describes, such as {"class_name": "L2", "config": {"l2": 0.01}}.

    Args:
        kind: what the names stand for, for the message.
        description: the dict. Its other entries, such as "module", are ignored.
        table: the classes, by name.

    Raises:
        BadRequest: the dict has another form, or there is no such class.
    """
    name, config = description.get("class_name"), description.get("config")
    if not isinstance(name, str) or not isinstance(config, Mapping | None):
        raise errors.BadRequest(
            f"a {kind} is {dict(description)!r:.200}; give its name, an object, or a dict such as "
            f'{{"class_name": {next(iter(table))!r}, "config": {{}}}}'
        )
    return named(kind, name, table)(**(config or {}))


class Advising:
    """Base class whose subclasses answer an unknown argument of their constructor with the nearest name.

    It also keeps the arguments, so that the object can be described in a file.

    Attributes:
        refused: the arguments of Keras that have no effect here, by name: the default, which is accepted, and what the
            message about any other value says.
    """

    refused: ClassVar[Refused] = {}
    _arguments: dict[str, Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in cls.__dict__:
            cls.__init__ = _advising(cls.__init__)  # type: ignore[method-assign]

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments that the object was made with, by name."""
        return dict(self._arguments)


def _advising(built: Callable[..., None]) -> Callable[..., None]:
    """Returns a constructor that checks the names of its arguments, and keeps them."""
    signature = inspect.signature(built)
    first, passed_on = next(iter(signature.parameters)), _rest_of(signature)

    @functools.wraps(built)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self, "_arguments"):  # the constructor of a base class may be advising, too
            known = known_arguments(type(self))
            kwargs = _without_refused(type(self), kwargs, known)
            for name in kwargs:
                if name not in known:
                    raise TypeError(
                        f"{type(self).__name__}() got an unexpected keyword argument {name!r}; "
                        f"{advice(name, [*known, *refused_arguments(type(self))])}"
                    )
            given = dict(signature.bind(self, *args, **kwargs).arguments)
            given.pop(first)
            self._arguments = given.pop(passed_on, {}) | given
        built(self, *args, **kwargs)

    return checked


def refused_arguments(cls: type) -> dict[str, tuple[Any, str]]:
    """Returns the arguments of Keras that a class and its base classes refuse: see `Advising`."""
    found: dict[str, tuple[Any, str]] = {}
    for base in reversed(cls.__mro__):
        found |= base.__dict__.get("refused", {})
    return found


def _without_refused(cls: type, given: dict[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Returns arguments without those that have no effect.

    Args:
        cls: the class.
        given: the arguments by name.
        known: the names that the constructor takes: a subclass may give a refused one a meaning.

    Raises:
        BadRequest: a refused argument is not the default.
    """
    refused = {name: it for name, it in refused_arguments(cls).items() if name not in known}
    for name, value in given.items():
        if name in refused and not _is(value, refused[name][0]):
            default, why = refused[name]
            raise errors.BadRequest(
                f"{cls.__name__}({name}={value!r:.80}) is not supported: {why}; leave it out, or give {default!r}"
            )
    return {name: value for name, value in given.items() if name not in refused}


def _is(value: Any, default: Any) -> bool:
    """Returns whether a value is a default. Arrays are compared with none of them."""
    return value is default or (isinstance(value, str | int | float | tuple) and value == default)


def known_arguments(cls: type) -> list[str]:
    """Returns the arguments of a constructor, and those that it passes on to its base classes."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        if "__init__" not in base.__dict__ or base is object:
            continue
        signature = inspect.signature(base.__init__)  # type: ignore[misc]
        by_name = [it.name for it in signature.parameters.values() if it.kind in _BY_NAME]
        names.update(dict.fromkeys(by_name))
        if not _rest_of(signature):
            break
    return [name for name in names if name != "self"]


def _rest_of(signature: inspect.Signature) -> str:
    """Returns the name of the parameter that takes all other arguments by name; "" if there is none."""
    kinds = {it.kind: it.name for it in signature.parameters.values()}
    return kinds.get(inspect.Parameter.VAR_KEYWORD, "")


def checked_dtype(owner: str, dtype: Any) -> str | None:
    """Returns the name of a dtype; None for None.

    Args:
        owner: what has the dtype, for the message.
        dtype: the dtype or its name.

    Raises:
        BadRequest: it is not a dtype of floating-point numbers.
    """
    if dtype is None:
        return None
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(bool)
    if found.kind != "f":
        raise errors.BadRequest(f"{owner}: dtype is {dtype!r}; give a dtype such as 'float32', or None")
    return str(found.name)


def snake_case(name: str) -> str:
    """Returns a class name as Keras writes it in names of layers: "conv2d" for Conv2D, "max_pooling2d"."""
    parted = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", parted).lower()


def unique_name(stem: str) -> str:
    """Returns the stem at its first use, and later the stem with the next number: "dense", "dense_1"."""
    with _lock:
        number = _counts[stem]
        _counts[stem] += 1
    return f"{stem}_{number}" if number else stem


def forget_names() -> None:
    """Starts the numbers of names again."""
    with _lock:
        _counts.clear()


__all__ = [
    "Advising",
    "Refused",
    "advice",
    "checked_dtype",
    "forget_names",
    "known_arguments",
    "made_of",
    "named",
    "refused_arguments",
    "snake_case",
    "unique_name",
]
