"""Generated names for jobs without one, and errors for unknown keyword arguments."""

import difflib
import functools
import string
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from shoal._system import ENTROPY

T = TypeVar("T")

_NO_ADVICE: Mapping[str, str] = MappingProxyType({})


def draw_name(program: str, draw: Callable[[int], int] = ENTROPY.getrandbits) -> str:
    """Returns a name made from the name of a program, with a random suffix from `draw`."""
    module = program.partition(":")[0].rpartition(".")[2].lower()
    stem = "".join(letter if letter in string.ascii_lowercase + string.digits else "-" for letter in module)
    stem = stem.lstrip("-0123456789")[:48].rstrip("-") or ("job" if program else "session")
    return f"{stem}-{draw(24):06x}"


def advising(
    owner: str, of_optimizers: Collection[str] = (), advice: Mapping[str, str] = _NO_ADVICE
) -> Callable[[type[T]], type[T]]:
    """Returns a decorator of a dataclass, which then refuses unknown arguments as `check_names` does.

    Args:
        owner: its name, for the message.
        of_optimizers: names that optimizers take.
        advice: what to do instead, by unknown name.
    """

    def decorate(cls: Any) -> Any:
        built = cls.__init__

        @functools.wraps(built)  # keeps the signature, for `help` and editors
        def checked(self: object, *arguments: object, **options: object) -> None:
            check_names(owner, options, cls.__dataclass_fields__, of_optimizers, advice)
            built(self, *arguments, **options)

        cls.__init__ = checked
        return cls

    return decorate


def check_names(
    owner: str,
    given: Iterable[str],
    known: Collection[str],
    of_optimizers: Collection[str] = (),
    advice: Mapping[str, str] = _NO_ADVICE,
) -> None:
    """Checks the names of keyword arguments.

    Args:
        owner: name of the class or function, for the message.
        given: names of the arguments.
        known: names that it takes.
        of_optimizers: names that optimizers take.
        advice: what to do instead, by unknown name.

    Raises:
        TypeError: a name is unknown. The message says what to do instead, or that an optimizer takes it, or the nearest
            name, or all names.
    """
    for name in given:
        if name in known:
            continue
        if name in advice:
            instead = advice[name]
        elif name in of_optimizers:
            instead = f"it is an argument of the optimizer: optimizer=shoal.optim.Adam({name}=...)"
        elif near := difflib.get_close_matches(name, known, n=1, cutoff=0.5):
            instead = f"did you mean {near[0]}?"
        else:
            instead = f"options are {', '.join(known)}"
        raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}; {instead}")


__all__ = ["advising", "check_names", "draw_name"]
