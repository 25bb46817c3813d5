"""Commands whose options are the fields of a frozen dataclass: one object in place of a parameter for each option.

What each option is, its field's annotation says; `shoal._role.flags` has those that roles share.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def command_of(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Makes a function that takes such an object a command of typer, which has an option for each field.

    Args:
        options: a dataclass, all of whose fields have a default.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(options)  # type: ignore[arg-type]
    ]

    def decorate(run: Callable[[Options], None]) -> Callable[..., None]:
        @wraps(run)
        def command(**given: Any) -> None:
            run(options(**given))

        # Both are what typer reads the options from.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {**hints, "return": None}
        return command

    return decorate


__all__ = ["command_of"]
