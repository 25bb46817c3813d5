"""Conversion of what users pass to a session: into arrays, numbers and reports."""

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from shoal import errors
from shoal._system import check_type
from shoal._training.gradient_buffers import GradientBuffers
from shoal._training.parameters import PushResult
from shoal._training.participant import Report
from shoal.variables import Variable


def plain(value: Variable | ArrayLike) -> Variable | np.ndarray:
    """Returns a variable as it is, and any other value as an array."""
    return value if isinstance(value, Variable) else np.asarray(value)


def pairs_of(gradients: Iterable[tuple[str, ArrayLike]]) -> Iterator[tuple[str, ArrayLike]]:
    """Returns an iterator over pairs of name and array.

    Raises:
        InvalidGradient: the gradients are not an iterable.
    """
    if not isinstance(gradients, Iterable):
        raise errors.InvalidGradient(
            f"gradients must be a mapping by name, or pairs of name and array, not a {type(gradients).__name__}"
        )
    return iter(gradients)


def as_pair(pair: tuple[str, ArrayLike]) -> tuple[str, np.ndarray]:
    """Returns a pair of name and array.

    Raises:
        InvalidGradient: the value is not a pair.
    """
    match pair:
        case (name, value):
            return name, np.asarray(value)
    raise errors.InvalidGradient(
        f"gradients must be a mapping by name, or pairs of name and array, not a {type(pair).__name__}"
    )


def as_arrays(values: Mapping[str, ArrayLike]) -> Mapping[str, np.ndarray]:
    """Returns the values as arrays, by name. Gradient buffers and arrays are not copied.

    Raises:
        BadRequest: the values are not a mapping.
    """
    check_type("updates", values, Mapping, "a dict of arrays by name, such as {'mean': mean}")
    if isinstance(values, GradientBuffers) or set(map(type, values.values())) <= {np.ndarray}:
        return cast(Mapping[str, np.ndarray], values)
    return {name: np.asarray(value) for name, value in values.items()}


def numbers_of(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Returns metrics as floats, by name.

    Raises:
        BadRequest: the metrics are not a mapping of numbers.
    """
    metrics = {} if metrics is None else metrics
    check_type("metrics", metrics, Mapping, "a dict of numbers by name, such as {'loss': 0.3}")
    return {name: number(name, value) for name, value in metrics.items()}


def lines_of(text: str) -> list[str]:
    """Returns the lines of a text for the log.

    Raises:
        BadRequest: it is not a string.
    """
    check_type("text", text, str, "a string, such as f'accuracy {accuracy:.3f}'")
    return text.splitlines()


def number(name: str, value: float) -> float:
    """Returns a metric as a float.

    Raises:
        BadRequest: the value is not a number.
    """
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise errors.BadRequest(f"metric {name!r} is {value!r}; give a number", metric=name) from None


def report_of(result: PushResult, weight: float, metrics: Mapping[str, float]) -> Report:
    """Returns the report of one push.

    Args:
        result: result of the push.
        weight: number of samples in the push.
        metrics: metrics of the step, by name.
    """
    if result.outcome != "accepted":
        return Report(step=result.step, dropped=1)
    return Report(
        step=result.step,
        accepted=1,
        samples=round(weight),
        values=metrics,
        staleness={result.staleness: 1},
    )


__all__ = ["as_arrays", "as_pair", "lines_of", "number", "numbers_of", "pairs_of", "plain", "report_of"]
