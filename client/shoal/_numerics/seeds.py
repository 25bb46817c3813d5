"""Seeds for functions that take one, and none for others. How a worker makes them: `shoal_worker.batch_seeds`."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


def takes_seed(function: Callable[..., Any]) -> bool:
    """Whether it has a parameter `seed` that can be given by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables say nothing of theirs
        return False
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(parameter.name == "seed" and parameter.kind in by_name for parameter in parameters)


def seeded(function: Callable[..., Any], seed: int | None) -> Callable[..., Any]:
    """The function with this seed if there is one and it takes it; else as it is."""
    return function if seed is None or not takes_seed(function) else partial(function, seed=seed)


__all__ = ["seeded", "takes_seed"]
