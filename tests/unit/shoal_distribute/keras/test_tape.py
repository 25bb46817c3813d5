"""Gradient tape: arithmetic of tensors, several targets and sources, and what it does not follow."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import GradientTape, compute_average_loss, function, get_strategy, keras, nn

A, B = np.array([[1.0, -2.0], [3.0, 0.5]]), np.array([2.0, 4.0])


@pytest.mark.parametrize(
    "of",
    [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: b - a,
        lambda a, b: a * b,
        lambda a, b: a / b,
        lambda a, b: b / a,
        lambda a, b: -a * 2.0 + 1.0 - b,
        lambda a, b: 1.0 / b + 2.0 - a,
        lambda a, b: a**2 * b,
        lambda a, b: (a * a).sum(axis=1) + b.mean(),
        lambda a, b: a.mean(axis=0) * b,
        lambda a, b: abs(a) * b[0],
        lambda a, b: a[[0, 1, 0]] ** 3 * b[:1],
        lambda a, b: a[:, 1] + b**0,
        lambda a, b: a @ b,
        lambda a, b: b @ a @ np.ones((2, 3)),
        lambda a, b: np.ones((4, 1, 2)) @ a * (b @ b),
    ],
)
def test_arithmetic(of: Callable[[keras.Tensor, keras.Tensor], keras.Tensor]) -> None:
    a, b = keras.Tensor(A), keras.Tensor(B)
    with GradientTape() as tape:
        tape.watch([a, b])
        y = of(a, b)
        total = y.sum()
    found = tape.gradient(total, {"a": a, "b": b})

    def at(a: np.ndarray, b: np.ndarray) -> float:
        return float(of(keras.Tensor(a), keras.Tensor(b)).array.sum())

    for place in np.ndindex(A.shape):
        step = np.zeros(A.shape)
        step[place] = 1e-6
        measured = (at(A + step, B) - at(A - step, B)) / 2e-6
        assert found["a"].numpy()[place] == pytest.approx(measured, rel=1e-5, abs=1e-8)
    for step in 1e-6 * np.eye(2):
        measured = (at(A, B + step) - at(A, B - step)) / 2e-6
        assert found["b"].numpy()[step > 0] == pytest.approx(measured, rel=1e-5, abs=1e-8)


def test_gradients_come_while_the_backward_pass_goes_on() -> None:
    keras.utils.set_random_seed(1)
    first, shared, unused = (keras.layers.Dense(2) for _ in range(3))
    x = np.ones((3, 2), np.float32)
    unused(shared(first(x)))
    variables = [*first.trainable_variables, *unused.trainable_variables, *shared.trainable_variables]
    with GradientTape(persistent=True) as tape:
        tape.watch(middle := first(x))
        y = shared(shared(middle))
        total = (y * y).sum()
    whole = tape.gradient(total, variables)
    in_turn = list(tape.gradients_in_turn(total, variables))
    assert [variable for _, variable in in_turn] == variables[::-1]
    for expected, (gradient, _) in zip(whole[::-1], in_turn, strict=True):
        assert (expected is None) == (gradient is None)
        if gradient is not None:
            np.testing.assert_array_equal(gradient, expected)


def test_a_gradient_comes_before_those_of_earlier_layers_are_computed() -> None:
    pulled = []

    class Observed(keras.layers.Dense):
        def core(self) -> Any:
            layer = super().core()

            class Core:
                def apply(self, *given: Any) -> Any:
                    y, after, pull = layer.apply(*given)

                    def observed(dy: Any) -> Any:
                        pulled.append(name)
                        return pull(dy)

                    return y, after, observed

                def __getattr__(self, attribute: str) -> Any:
                    return getattr(layer, attribute)

            name = self.name
            return Core()

    model = keras.Sequential([keras.Input((2,)), Observed(3, name="a"), Observed(3, name="b")])
    with GradientTape() as tape:
        total = model(np.ones((1, 2), np.float32)).sum()
    gradients = tape.gradients_in_turn(total, model.trainable_variables)
    for wanted in (["b"], ["b"], ["b", "a"], ["b", "a"]):
        assert next(gradients)[0] is not None
        assert pulled == wanted
    with pytest.raises(errors.BadRequest, match="this tape has given its gradients"):
        next(tape.gradients_in_turn(total, model.trainable_variables))


def test_what_a_layer_shares_adds_up() -> None:
    keras.utils.set_random_seed(1)
    layer = keras.layers.Dense(2)
    x = np.ones((3, 2), np.float32)
    layer(x)
    with GradientTape(persistent=True) as tape:
        y = layer(layer(x))
        total, other = y.sum(), (y * y).sum()
    both = tape.gradient([total, other], layer.trainable_variables)
    one, two = (tape.gradient(it, layer.trainable_variables) for it in (total, other))
    for found, a, b in zip(both, one, two, strict=True):
        np.testing.assert_allclose(found.numpy(), a.numpy() + b.numpy(), rtol=1e-5, atol=1e-5)
    weighted = tape.gradient(y, layer.trainable_variables[1], output_gradients=np.ones((3, 2)))
    np.testing.assert_allclose(weighted.numpy(), one[1].numpy(), rtol=1e-5, atol=1e-5)


def test_only_what_is_computed_within_is_recorded() -> None:
    layer = keras.layers.Dense(2)
    before = layer(np.ones((1, 3))).sum()
    with GradientTape() as tape:
        after = layer(np.ones((1, 3))).sum()
    assert tape.gradient([before, after], layer.trainable_variables[0]).shape == (3, 2)
    with GradientTape() as tape:
        pass
    assert tape.gradient(before, layer.trainable_variables) == [None, None]
    with pytest.raises(errors.BadRequest, match="persistent=True"):
        tape.gradient(before, layer.trainable_variables)


def test_what_it_does_not_follow() -> None:
    layer = keras.layers.Dense(2)
    with GradientTape(persistent=True) as tape:
        y = layer(np.ones((1, 3)))
        mean = np.mean(np.asarray(y))
        with pytest.raises(TypeError):
            np.exp(y)
        with pytest.raises(errors.BadRequest, match="cannot watch a ndarray"):
            tape.watch(np.ones(3))
    with pytest.raises(errors.BadRequest, match="got a float32, which no tape can follow back"):
        tape.gradient(mean, layer.trainable_variables)
    with pytest.raises(errors.BadRequest, match="cannot differentiate with respect to a ndarray"):
        tape.gradient(y, np.ones(3))
    with pytest.raises(errors.BadRequest, match="watch_accessed_variables"):
        GradientTape(watch_accessed_variables=False)


def test_a_frozen_layer_has_no_gradient_but_passes_it_on() -> None:
    first, frozen = keras.layers.Dense(2), keras.layers.Dense(2, trainable=False)
    with GradientTape() as tape:
        total = frozen(first(np.ones((1, 3)))).sum()
    kernel, other = tape.gradient(total, [first.weights[0], frozen.weights[0]])
    assert other is None
    np.testing.assert_allclose(kernel.numpy()[0], frozen.get_weights()[0].sum(axis=1), rtol=1e-5, atol=1e-5)


def test_a_loss_that_is_kept_holds_no_activations() -> None:
    layer = keras.layers.Dense(2)
    for persistent in (False, True):
        with GradientTape(persistent) as tape:
            hidden = layer(np.ones((1, 3)))
            loss = hidden.sum()
        kept = weakref.ref(hidden)
        del hidden
        assert tape.gradient(loss, layer.trainable_variables)[0] is not None
        assert (kept() is not None) == persistent
        del tape
        assert kept() is None
        assert float(loss) == float(loss + 0.0)


def test_average_loss() -> None:
    assert nn.compute_average_loss is compute_average_loss
    assert float(compute_average_loss(np.array([1.0, 3.0]))) == 2
    assert float(compute_average_loss(np.array([1.0, 3.0]), [1.0, 0.0], global_batch_size=4)) == 0.25
    with pytest.raises(errors.BadRequest, match="reduction=None"):
        compute_average_loss(np.array(1.0))


def test_function_is_the_function_itself() -> None:
    @function
    def double(x: float) -> float:
        return 2 * x

    @function(jit_compile=True)
    def triple(x: float) -> float:
        return 3 * x

    assert (double(1), triple(1)) == (2, 3)


def test_the_tape_follows_operators_of_variables() -> None:
    strategy = get_strategy()
    weights, bias = strategy.create_variable("w", A), strategy.create_variable("b", B)
    x = np.array([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]])
    with GradientTape(persistent=True) as tape:
        penalty = (weights**2).sum() + abs(bias).sum() - weights[0] @ bias
        loss = ((x @ weights + bias) ** 2).mean()
        scaled = (np.float64(3) * bias / 2 - 1.0).sum()
    pairs = zip(tape.gradient(penalty, [weights, bias]), (2 * A - np.outer([1, 0], B), np.sign(B) - A[0]), strict=True)
    for found, expected in pairs:
        np.testing.assert_allclose(found.numpy(), expected)
    slope = 2 * (x @ A + B) / 6
    np.testing.assert_allclose(tape.gradient(loss, weights).numpy(), x.T @ slope)
    np.testing.assert_allclose(tape.gradient(loss, bias).numpy(), slope.sum(axis=0))
    np.testing.assert_allclose(tape.gradient(scaled, bias).numpy(), [1.5, 1.5])
    np.testing.assert_allclose(np.sqrt(bias), np.sqrt(B))  # functions of NumPy still take variables


def test_a_power_of_two_tensors_is_refused() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        keras.Tensor(A) ** keras.Tensor(A)  # type: ignore[operator] # as a checker says, too
