"""Digits example: its gradients are right, and they train it."""

from collections.abc import Callable

import numpy as np
import pytest
from digits import Digits

import shoal
from shoal import initializers

Params = dict[str, np.ndarray]
EPSILON = 1e-6


def initial(program: Digits, seed: int = 0) -> Params:
    """What the servers would begin with."""
    params = {}
    for name, variable in program.variables().items():
        flat = np.empty(variable.size, variable.dtype)
        initializers.fill(flat, variable.initializer, name, variable.shape, seed)
        params[name] = flat.reshape(variable.shape)
    return params


def test_is_a_program() -> None:
    assert isinstance(Digits(), shoal.Program)


def test_every_image_is_trained_on_or_held_out_and_none_is_both() -> None:
    program = Digits()
    assert (len(program.dataset), len(program.held_out)) == (1437, 360)
    again = Digits()
    np.testing.assert_array_equal(program.held_out.pixels, again.held_out.pixels)
    assert not np.array_equal(program.held_out.pixels, Digits(seed=1).held_out.pixels)


@pytest.mark.parametrize("name", ["hidden/w", "hidden/b", "output/w", "output/b"])
def test_gradients_are_those_of_central_differences(name: str) -> None:
    program = Digits(hidden=8, dtype="float64")
    params = initial(program)
    batch = program.dataset.batch(np.arange(16))
    gradient = program.loss_and_gradients(params, batch)[1][name]

    def loss_with(index: tuple[int, ...], change: float) -> float:
        moved = params[name].copy()
        moved[index] += change
        return float(program.loss_and_gradients({**params, name: moved}, batch)[0])

    differences = np.empty_like(gradient)
    for index in np.ndindex(gradient.shape):
        differences[index] = (loss_with(index, EPSILON) - loss_with(index, -EPSILON)) / (2 * EPSILON)
    np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_have_the_shapes_and_dtypes_of_the_variables(dtype: str) -> None:
    program = Digits(hidden=8, dtype=dtype)
    _, gradients = program.loss_and_gradients(initial(program), program.dataset.batch(np.arange(5)))
    variables = program.variables()
    assert {name: (g.shape, g.dtype) for name, g in gradients.items()} == {
        name: (v.shape, v.dtype) for name, v in variables.items()
    }


def test_the_loss_is_a_mean_so_batches_join() -> None:
    program = Digits(hidden=8, dtype="float64")
    params, indices = initial(program), np.arange(48)
    whole_loss, whole = program.loss_and_gradients(params, program.dataset.batch(indices))
    parts = [program.loss_and_gradients(params, program.dataset.batch(part)) for part in np.split(indices, [16])]
    weights = [16 / 48, 32 / 48]
    assert whole_loss == pytest.approx(sum(w * loss for w, (loss, _) in zip(weights, parts, strict=True)))
    for name, gradient in whole.items():
        joined = sum(w * gradients[name] for w, (_, gradients) in zip(weights, parts, strict=True))
        np.testing.assert_allclose(gradient, joined, atol=1e-12)


def test_large_logits_do_not_overflow() -> None:
    program = Digits(hidden=8)
    params = {name: 1e4 * value for name, value in initial(program).items()}
    loss, gradients = program.loss_and_gradients(params, program.dataset.batch(np.arange(5)))
    assert all(np.isfinite(value).all() for value in (loss, *gradients.values()))


def sgd() -> Callable[[Params, Params], Params]:
    return lambda params, gradients: {name: params[name] - 0.3 * gradients[name] for name in params}


def adam() -> Callable[[Params, Params], Params]:
    slots: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    updates = 0

    def apply(params: Params, gradients: Params) -> Params:
        nonlocal updates
        updates += 1
        new = {}
        for name, g in gradients.items():
            m, v = slots.get(name, (np.zeros_like(g), np.zeros_like(g)))
            slots[name] = m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            change = m / (1 - 0.9**updates) / (np.sqrt(v / (1 - 0.999**updates)) + 1e-8)
            new[name] = params[name] - 1e-3 * change
        return new

    return apply


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_it_learns_to_read(optimizer: Callable[[], Callable[[Params, Params], Params]]) -> None:
    program, update, rng = Digits(hidden=256), optimizer(), np.random.default_rng(0)
    params = initial(program)
    assert shoal.evaluate(program, params)["accuracy"] < 0.3
    for _ in range(40):
        for indices in np.array_split(rng.permutation(len(program.dataset)), 45):
            _, gradients = program.loss_and_gradients(params, program.dataset.batch(indices))
            params = update(params, gradients)
    assert shoal.evaluate(program, params)["accuracy"] >= 0.97
