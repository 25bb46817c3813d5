"""Seeds as arguments of users' functions that take one. `shoal_worker.batch_seeds` computes a worker's seeds."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


def takes_seed(function: Callable[..., Any]) -> bool:
    """Returns whether the function has a parameter `seed` that can be given by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables have no signature
        return False
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(parameter.name == "seed" and parameter.kind in by_name for parameter in parameters)


def seeded(function: Callable[..., Any], seed: int | None) -> Callable[..., Any]:
    """Returns the function with the seed bound, or the function itself if it takes none or `seed` is None."""
    return function if seed is None or not takes_seed(function) else partial(function, seed=seed)


__all__ = ["seeded", "takes_seed"]
