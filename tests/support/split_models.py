"""A model whose layers may be split over the devices or the ranks of a mesh, and its training."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal_distribute import DeviceMesh, PipelineStrategy, keras

layers = keras.layers
RNG = np.random.default_rng(0)
IDS, Y = RNG.integers(0, 11, size=(24, 3)), RNG.normal(size=(24, 5))
# The first layer of the second stage, and the micro-batches of a whole batch.
CUT, MICRO_BATCHES = "whole", 4


def split_net(mesh: DeviceMesh | None, *, random: bool = False) -> keras.Model:
    """Returns a model whose layers are split over a mesh, or the same with whole layers. 2 divides neither 11 nor 7.

    Args:
        mesh: the mesh; None means whole layers.
        random: whether it has dropout, whose seed is drawn, and batch statistics.
    """
    on = {"mesh": mesh} if mesh else {}
    apart, takes = ({"gather_output": False}, {"input_is_parallel": True}) if mesh else ({}, {})
    table: Any = layers.ParallelEmbedding if mesh else layers.Embedding
    column: Any = layers.ColumnParallelDense if mesh else layers.Dense
    row: Any = layers.RowParallelDense if mesh else layers.Dense
    noise = [layers.Dropout(0.3, name="dropout"), layers.BatchNormalization(name="norm")] if random else []
    return keras.Sequential(
        [
            keras.Input((3,)),
            table(11, 4, name="table", **on),
            layers.Flatten(name="flat"),
            column(7, "tanh", name="wide", **on, **apart),
            row(6, name="joined", **on, **takes),
            layers.Dense(6, "tanh", name=CUT),
            *noise,
            column(7, "softmax", name="second", **on),
            row(5, name="last", **on),
        ],
        name="net",
    )


def adam() -> keras.optimizers.Optimizer:
    """Returns an optimizer that limits the global norm."""
    return keras.optimizers.Adam(0.01, global_clipnorm=0.5)


def made(
    strategy: Any, build: Callable[[], keras.Model], optimizer: Callable[[], keras.optimizers.Optimizer] = adam
) -> keras.Model:
    """Returns a compiled model, with the same initial values each time."""
    with strategy.scope():
        model = build()
        model.compile(optimizer(), "mse")
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(np.random.default_rng(number).normal(size=variable.shape) / 3)
    return model


def trained(model: keras.Model, steps: int) -> list[np.ndarray]:
    """Returns a model's variables and slots after some steps, the loss of an evaluation, and outputs."""
    model.fit(IDS, Y, batch_size=24, epochs=steps, shuffle=False, verbose=0)
    assert model.optimizer
    slots = model.optimizer.state()
    evaluated, outputs = model.evaluate(IDS, Y, batch_size=24, verbose=0), model.predict(IDS, verbose=0)
    return [*model.get_weights(), *(slots[it] for it in sorted(slots)), np.array(evaluated), outputs]


def trained_whole(steps: int) -> list[np.ndarray]:
    """Returns what one process has after some steps with whole layers."""
    with PipelineStrategy(stages=1, micro_batches=MICRO_BATCHES) as strategy:
        return trained(made(strategy, lambda: split_net(None)), steps)


def check_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Checks that arrays differ by less than 1e-10."""
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


def check_same_bits(found: list[list[np.ndarray]]) -> None:
    """Checks that all ranks have the same arrays."""
    assert len({b"".join(it.tobytes() for it in each) for each in found}) == 1
