"""Constraints of variables: they hold after each update, under each strategy that updates variables itself."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    PipelineStrategy,
    Strategy,
    keras,
)

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 6)), RNG.normal(size=(12, 3))
WEIGHTS = [RNG.normal(size=shape) for shape in ((6, 4), (4,), (4, 3), (3,))]
DEVICES = ["/cpu:0", "/cpu:1"]


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def trained(strategy: Strategy, hidden: dict[str, Any], after: Callable[[keras.Model], None]) -> list[np.ndarray]:
    """Returns the variables after three steps, each followed by a call of `after`."""
    with strategy, strategy.scope():
        layers = [keras.layers.Dense(4, name="hidden", **hidden), keras.layers.Dense(3, name="last")]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse")
        model.set_weights(WEIGHTS)
        for _ in range(3):
            model.train_on_batch(X, Y)
            after(model)
        return model.get_weights()


@pytest.mark.parametrize(
    "make",
    [
        lambda: OneDeviceStrategy("/cpu:0"),
        lambda: MirroredStrategy(DEVICES),
        lambda: CentralStorageStrategy(DEVICES),
        lambda: PipelineStrategy(stages=2, micro_batches=2, cut=[1, 1]),
    ],
)
def test_constraints_hold_after_each_update(make: Callable[[], Strategy]) -> None:
    def projected(model: keras.Model) -> None:
        kernel, bias = model.weights[0].numpy(), model.weights[1].numpy()
        norms = np.sqrt((kernel**2).sum(0))
        model.weights[0].assign(kernel * (np.minimum(norms, 0.5) / (1e-7 + norms)))
        model.weights[1].assign(np.maximum(bias, 0))

    options = {"kernel_constraint": keras.constraints.MaxNorm(0.5), "bias_constraint": "non_neg"}
    found = trained(make(), options, lambda _: None)
    for own, expected in zip(found, trained(OneDeviceStrategy("/cpu:0"), {}, projected), strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-12)
    assert np.sqrt((found[0] ** 2).sum(0)).max() == pytest.approx(0.5)


def test_a_constraint_may_be_a_function_and_leaves_frozen_variables_alone() -> None:
    table = keras.layers.Embedding(3, 2, embeddings_constraint=lambda w: w * 0)
    head = keras.layers.Dense(1, kernel_constraint="UnitNorm")
    head.trainable = False
    model = keras.Sequential([keras.Input((2,), dtype="int32"), table, keras.layers.Flatten(), head])
    model.compile("sgd", "mse")
    before = head.get_weights()
    model.train_on_batch(np.array([[0, 1]]), np.ones((1, 1)))
    assert not table.get_weights()[0].any()
    np.testing.assert_array_equal(head.get_weights()[0], before[0])


def test_a_constraint_that_changes_the_shape_is_refused() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_constraint=lambda w: w[0], name="odd")])
    model.compile("sgd", "mse")
    with pytest.raises(errors.InvalidShape, match=r"variable odd/kernel returned the shape \(1,\), not \(2, 1\)"):
        model.train_on_batch(X[:, :2], Y[:, :1])


@pytest.mark.parametrize(
    "given",
    [
        keras.constraints.max_norm(3),
        {"class_name": "MaxNorm", "config": {"max_value": 3}},
        {"module": "keras.constraints", "class_name": "MaxNorm", "config": {"max_value": 3, "axis": 0}},
        {"class_name": "max_norm", "config": {"max_value": 3}},
    ],
)
def test_a_constraint_by_object_or_dict(given: Any) -> None:
    found: Any = keras.constraints.get(given)
    assert isinstance(found, keras.constraints.MaxNorm)
    assert (found.max_value, found.axis) == (3, 0)
    assert keras.constraints.get(keras.constraints.UnitNorm) is not None
    assert keras.constraints.get(None) is None


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: keras.layers.Dense(1, kernel_constraint="max_nrm"), "did you mean 'max_norm'"),
        (lambda: keras.layers.Dense(1, kernel_constraint=3), "a constraint is 3; give its name"),
        (lambda: keras.constraints.MaxNorm(-1), "max_value of a constraint is -1; give a number of 0 or more"),
        (lambda: keras.constraints.UnitNorm("rows"), "axis of a constraint is 'rows'; give a whole number"),  # type: ignore[arg-type]
        (lambda: keras.constraints.get({"name": "MaxNorm"}), "or a dict such as {\"class_name\": 'MaxNorm'"),
        (lambda: keras.regularizers.get({"class_name": "L2", "config": 3}), "a regularizer is .*; give its name"),
        (lambda: keras.regularizers.get({"class_name": "L3"}), "regularizer 'L3' is unknown; did you mean 'L1'|'L2'"),
    ],
)
def test_wrong_use_is_explained(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(errors.BadRequest, match=match):
        call()


def test_regularizers_and_initializers_take_the_dicts_of_keras() -> None:
    layer = keras.layers.Dense(
        2,
        kernel_regularizer={"module": "keras.regularizers", "class_name": "L2", "config": {"l2": 0.5}},
        kernel_initializer={"class_name": "Constant", "config": {"value": 2.0}},
        bias_initializer="Ones",
    )
    layer(np.zeros((1, 3)))
    assert float(layer.losses[0]) == 0.5 * 6 * 4
    assert [it.min() for it in layer.get_weights()] == [2.0, 1.0]
