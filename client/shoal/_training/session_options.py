"""Options of `Client.session`: their signature, and the error for an option that sessions do not have."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from shoal import optim
from shoal.job import Job, SessionOptions


def spelled_out(session: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature with each option by name, since `help` and notebooks do not expand `**options`."""
    given = inspect.signature(session)
    named = [it for it in given.parameters.values() if it.kind is not it.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in SessionOptions.__annotations__.items()
    ]
    return given.replace(parameters=[*named, *options])


def check_options(given: Iterable[str]) -> None:
    """Checks the names of a session's options.

    Raises:
        TypeError: sessions have no option of this name. The message names the nearest one, or all of them.
    """
    known = list(SessionOptions.__annotations__)
    for name in given:
        if name not in known:
            unknown = f"Client.session() got an unexpected keyword argument {name!r}"
            raise TypeError(f"{unknown}; {_advice(name, known)}")


def _advice(name: str, known: list[str]) -> str:
    if name in {it.name for it in dataclasses.fields(Job)}:
        return (
            f"sessions do not take the field {name} of Job, because your own loop reads the data and decides when it "
            f"ends. Their options are {', '.join(known)}"
        )
    if name in {it.name for it in dataclasses.fields(optim.Optimizer)} | {"lr"}:
        return f"it is an argument of the optimizer: optimizer=shoal.optim.Adam({name}=...)"
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.5):
        return f"did you mean {near[0]}?"
    return f"options are {', '.join(known)}"


__all__ = ["check_options", "spelled_out"]
