"""Layers and models that users define: their sublayers, their `call`, and what is in training with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal_distribute import GradientTape, MirroredStrategy, PerReplica, keras

X = np.random.default_rng(0).normal(2.0, size=(8, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Normalized(keras.layers.Layer):
    """Passes no `training` on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dropout(0.5)

    def call(self, inputs: Any, training: bool = False) -> Any:
        del training
        return self.drop(self.norm(inputs))


class Holding(keras.layers.Layer):
    """Holds layers in a dict and in lists of lists. Its `call` takes no `training`."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = {"first": keras.layers.Dense(4, kernel_regularizer="l2"), "norm": Normalized()}
        self.nested: list[Any] = [[keras.layers.Dense(2)], (keras.layers.Dense(1),)]

    def call(self, x: Any) -> Any:  # type: ignore[override]  # as in TensorFlow's tutorials
        x = self.by_name["norm"](self.by_name["first"](x))
        return self.nested[1][0](self.nested[0][0](x))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.parts = {"whole": [Holding()]}

    def call(self, x: Any) -> Any:  # type: ignore[override]
        return self.parts["whole"][0](x)


class Extended(keras.layers.Dense):
    """A layer with variables of its own that holds another one."""

    def __init__(self) -> None:
        super().__init__(1)
        self.inner = Holding()

    def call(self, inputs: Any, training: bool = False) -> Any:
        return super().call(inputs, training=training) + self.inner(inputs)


MAKERS: dict[str, tuple[Callable[[], keras.Model], int]] = {
    "subclass": (Subclassed, 45),
    "layer": (lambda: keras.Sequential([Holding()]), 45),
    "layer with variables": (lambda: keras.Sequential([Extended()]), 49),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_sublayers_are_found_trained_and_saved(kind: str, tmp_path: Path) -> None:
    make, count = MAKERS[kind]
    model, path = make(), str(tmp_path / "weights")
    model.compile("sgd", "mse")
    model.train_on_batch(X, Y)
    kernels = [it.numpy() for it in model.trainable_variables]
    assert model.count_params() == count
    assert len(model.losses) == 1
    model.fit(X, Y, epochs=3, verbose=0)
    assert not any(np.array_equal(it.numpy(), old) for it, old in zip(model.trainable_variables, kernels, strict=True))
    model.save_weights(path)
    other = make()
    other(X)
    other.load_weights(path)
    np.testing.assert_array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))
    model.trainable = False
    assert not model.trainable_variables


def test_training_reaches_inner_layers_unless_they_get_their_own() -> None:
    outer = Normalized()
    outer(X, training=True)
    np.testing.assert_allclose(outer.norm.get_weights()[2], X.mean(0) / 2, rtol=1e-5)
    moved = outer.norm.get_weights()
    values = outer(X)
    np.testing.assert_array_equal(values.numpy(), outer(X).numpy())  # without dropout
    np.testing.assert_array_equal(outer.norm.get_weights(), moved)

    class Frozen(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Normalized()

        def call(self, inputs: Any, training: bool = False) -> Any:
            del training
            return self.inner(inputs, training=False)

    frozen = Frozen()
    frozen(X, training=True)
    np.testing.assert_array_equal(frozen.inner.norm.get_weights()[2], np.zeros(3))


def test_a_shared_sublayer_counts_once() -> None:
    layer = Holding()
    layer.nested.append([layer.by_name["first"], Holding(), layer.by_name["norm"]])
    assert keras.Sequential([keras.Input((3,)), layer]).outputs[0].shape == (None, 1)
    assert len(layer.weights) == len(set(layer.weights)) == 10


def test_normalization_in_a_loop_takes_a_replica_without_samples() -> None:
    strategy = MirroredStrategy(["/cpu:0", "/cpu:1"])
    with strategy, strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.5)])
        optimizer = keras.optimizers.SGD(0.1)

        def step(x: Any) -> None:
            with GradientTape() as tape:
                loss = model(x, training=True).sum()
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        strategy.run(step, args=(PerReplica([X[:1], X[:0]]),))
        assert np.isfinite(model.get_weights()).all()
