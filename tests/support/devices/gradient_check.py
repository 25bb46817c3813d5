"""Check of a layer's pullback against central differences in float64."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from shoal_nn import Layer, TrainingContext
from shoal_nn.layer import shape_of

# The error of a central difference falls with the square of the step, that of rounding grows with its inverse.
STEP = 1e-5
TOLERANCE = 1e-6
# Of one array, so many elements are moved one by one; of larger ones these are drawn, and all are moved together once.
ELEMENTS = 24
# Of each layer so many configurations are drawn, from generators of their own.
twenty = settings(max_examples=20)
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def apart(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns numbers at least 0.05 apart and 0.025 from 0, so that no step of a difference crosses a kink."""
    size = int(np.prod(shape))
    return (0.05 * (rng.permutation(size) - size // 2 + 0.5)).reshape(shape)


def check_gradients(
    layer: Layer,
    x: np.ndarray | Mapping[str, np.ndarray],
    rng: np.random.Generator,
    train: Any = TrainingContext(7),  # noqa: B008
) -> None:
    """Raises AssertionError unless dx and all dparams are right within a relative error of 1e-6."""
    params, state = prepared(layer, rng, shape_of(x))
    features = x.values() if isinstance(x, Mapping) else [x]
    for given in (*features, *params.values(), *state.values()):
        given.flags.writeable = False  # what was pulled is not to be changed
    y, _, pullback = layer.apply(params, state, x, train)
    assert y.shape[1:] == layer.output_shape(shape_of(x))
    weights = rng.standard_normal(y.shape)
    weights.flags.writeable = False
    dparams, dx = pullback(weights)
    for name, again in pullback(weights)[0].items():
        np.testing.assert_array_equal(dparams[name], again)
    assert dparams.keys() == params.keys()

    def loss_of(name: str | None) -> Callable[[np.ndarray], float]:
        def loss(array: np.ndarray) -> float:
            fed, given = (array, params) if name is None else (x, params | {name: array})
            return float((layer.apply(given, state, fed, train)[0] * weights).sum())

        return loss

    for name, array in params.items():
        assert dparams[name].shape == array.shape
        _check(name, loss_of(name), array, dparams[name], rng)
    if isinstance(x, np.ndarray) and x.dtype.kind == "f":
        assert dx.shape == x.shape
        _check("x", loss_of(None), x, dx, rng)
    else:
        assert dx is None


def prepared(layer: Layer, rng: np.random.Generator, shape: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns parameters and state in float64, all moved away from their initial values."""
    params, state = layer.init(rng, shape)
    moved = {name: value + 0.3 * rng.standard_normal(value.shape) for name, value in params.items()}
    return moved, {name: value + rng.random(value.shape) for name, value in state.items()}


def _check(
    name: str, loss: Callable[[np.ndarray], float], at: np.ndarray, gradient: np.ndarray, rng: np.random.Generator
) -> None:
    chosen = np.arange(at.size) if at.size <= ELEMENTS else rng.choice(at.size, ELEMENTS, replace=False)
    directions = [np.eye(1, at.size, element).reshape(at.shape) for element in chosen]
    if at.size > ELEMENTS:
        directions.append(rng.choice([-1.0, 1.0], at.shape))
    measured = np.array([(loss(at + STEP * to) - loss(at - STEP * to)) / (2 * STEP) for to in directions])
    claimed = np.array([float((gradient * to).sum()) for to in directions])
    scale = max(np.abs(gradient).max(initial=0), np.abs(measured).max(initial=0), 1e-3)
    error = np.abs(measured - claimed).max(initial=0) / scale
    assert error < TOLERANCE, f"{name}: relative error {error:.2g}; {measured[:4]} measured, {claimed[:4]} claimed"
