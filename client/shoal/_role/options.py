"""Commands whose options are the fields of a frozen dataclass. The function of a command takes one object of the class.

The annotation of a field describes its option. `shoal._role.flags` has the options that roles share.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def command_of(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Returns a decorator that turns a function of such an object into a typer command.

    Args:
        options: a dataclass whose fields all have a default.
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

        # typer reads the options from both.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {**hints, "return": None}
        return command

    return decorate


__all__ = ["command_of"]
