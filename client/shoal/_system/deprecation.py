"""Deprecation of public names: a decorator and a warning with the same wording (docs/explanation/stability.md).

Python has `warnings.deprecated` (PEP 702) only from version 3.13. Its copy in typing_extensions would be a new
dependency. Both take the message as free text. Here, the versions and the replacement are required arguments, so every
message states them.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

_Target = TypeVar("_Target", bound=Callable[..., Any])


def deprecated(*, since: str, removed_in: str, instead: str) -> Callable[[_Target], _Target]:
    """Marks a public function, method or class as deprecated. A call warns and works as before.

    The object gets the message in `__deprecated__` (PEP 702), for tools that generate documentation. A class and its
    subclasses warn when they are instantiated.

        @deprecated(since="0.4", removed_in="0.6", instead="Session.push")
        def send(gradients): ...

    Args:
        since: the first version that warns.
        removed_in: the first version without the object.
        instead: the replacement, as users write it.

    Returns:
        The decorator.
    """

    def decorate(target: _Target) -> _Target:
        name = getattr(target, "__qualname__", repr(target))
        message = _message(name, since, removed_in, instead)
        if isinstance(target, type):
            _warn_at_init(target, message)
            return target
        if inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target):
            raise TypeError(f"{name} is a coroutine function; `deprecated` wraps only plain functions and classes")

        @functools.wraps(target)
        def warning(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return target(*args, **kwargs)

        warning.__deprecated__ = message  # type: ignore[attr-defined]  # PEP 702's name
        return warning  # type: ignore[return-value]  # it takes and returns what the target does

    return decorate


def warn_deprecated(what: str, *, since: str, removed_in: str, instead: str, stacklevel: int = 2) -> None:
    """Warns about a deprecated argument, value or module attribute, for which `deprecated` cannot be used.

    Args:
        what: the deprecated thing, as users write it: "Job(goal=...)".
        since: the first version that warns.
        removed_in: the first version without it.
        instead: the replacement, as users write it.
        stacklevel: as in `warnings.warn`, seen from the caller. 2 means the line that called the caller.
    """
    warnings.warn(_message(what, since, removed_in, instead), DeprecationWarning, stacklevel=stacklevel + 1)


def _message(what: str, since: str, removed_in: str, instead: str) -> str:
    return f"{what} is deprecated since Shoal {since} and will be removed in {removed_in}; use {instead}"


def _warn_at_init(target: Any, message: str) -> None:
    original = target.__init__

    @functools.wraps(original)
    def warning(self: Any, *args: Any, **kwargs: Any) -> None:
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        if original is object.__init__:  # the class has a __new__ alone, which has read the arguments
            return
        original(self, *args, **kwargs)

    target.__init__ = warning
    target.__deprecated__ = message


__all__ = ["deprecated", "warn_deprecated"]
