"""Pipelines whose stages have split layers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import Checkpoint, DeviceMesh, PipelineStrategy, keras
from shoal_distribute.keras import layers

MESH = DeviceMesh({"stage": 2, "model": 2}, [f"/cpu:{number}" for number in range(4)])
RNG = np.random.default_rng(0)
IDS, Y = RNG.integers(0, 11, size=(24, 3)), RNG.normal(size=(24, 5))


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def model(*, split: bool) -> keras.Model:
    """Returns a model whose layers are split over the devices of their stages, or the same with whole layers."""

    def dense(kind: Any, units: int, activation: Any, name: str, stage: int, **options: Any) -> Any:
        if not split:
            return layers.Dense(units, activation, name=name)
        return kind(units, activation, name=name, mesh=MESH.submesh(stage=stage), **options)

    on = {"mesh": MESH.submesh(stage=0)} if split else {}
    table: Any = layers.ParallelEmbedding if split else layers.Embedding
    column, row = layers.ColumnParallelDense, layers.RowParallelDense
    return keras.Sequential(
        [
            keras.Input((3,)),
            table(11, 4, name="table", **on),
            layers.Flatten(name="flat"),
            dense(column, 7, "tanh", "wide", 0, gather_output=False),
            dense(row, 6, None, "joined", 0, input_is_parallel=True),
            layers.BatchNormalization(name="norm"),
            dense(column, 7, "tanh", "second", 1, gather_output=False),
            dense(row, 5, None, "last", 1, input_is_parallel=True),
        ],
        name="net",
    )


def made(strategy: PipelineStrategy, *, split: bool, optimizer: str = "adam") -> keras.Model:
    with strategy.scope():
        found = model(split=split)
        chosen = keras.optimizers.Adam(0.01, global_clipnorm=0.5) if optimizer == "adam" else optimizer
        found.compile(chosen, "mse")
    for number, variable in enumerate(found.trainable_variables):
        variable.assign(np.random.default_rng(number).normal(size=variable.shape) / 3)
    return found


def trained(*, split: bool, steps: int = 3, **options: Any) -> list[np.ndarray]:
    devices = [str(it[0]) for it in MESH.groups("model")]
    with PipelineStrategy(devices, micro_batches=4, cut=["norm"], **options) as strategy:
        found = made(strategy, split=split)
        found.fit(IDS, Y, batch_size=24, epochs=steps, shuffle=False, verbose=0)
        assert found.optimizer
        slots = found.optimizer.state()
        return [*found.get_weights(), *(slots[it] for it in sorted(slots)), found.predict(IDS, verbose=0)]


def check_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"schedule": "gpipe", "recompute": True}])
def test_stages_with_split_layers_equal_whole_ones(options: dict[str, Any]) -> None:
    check_equal(trained(split=True, **options), trained(split=False))


def test_bytes_of_a_stage_are_those_of_all_its_devices() -> None:
    def fixed(split: bool) -> list[int]:
        with PipelineStrategy(["/cpu:0", "/cpu:2"], micro_batches=2, cut=["norm"]) as strategy:
            found = made(strategy, split=split)
            found.train_on_batch(IDS, Y)
            assert all(it.peak_bytes > it.fixed_bytes for it in strategy.timings().stages)
            return [it.fixed_bytes for it in strategy.timings().stages]

    assert fixed(split=True) == fixed(split=False)


def test_a_measured_cut_and_a_checkpoint_take_split_layers(tmp_path: Path) -> None:
    values = []
    for restored, split in ((False, True), (True, True), (True, False)):
        with PipelineStrategy(["/cpu:0"], micro_batches=2) as strategy:
            found = made(strategy, split=split)
            checkpoint = Checkpoint(model=found, optimizer=found.optimizer)
            if restored:
                checkpoint.restore(str(tmp_path / "saved-1"))
            found.train_on_batch(IDS, Y)
            values.append(found.get_weights())
            if not restored:
                checkpoint.save(tmp_path / "saved")
    check_equal(values[1], values[2])


def test_a_split_layer_in_two_stages_is_refused() -> None:
    with PipelineStrategy(["/cpu:0", "/cpu:1"], micro_batches=2, cut=["between"]) as strategy:
        with strategy.scope():
            tied = layers.ColumnParallelDense(3, mesh=DeviceMesh({"model": 2}, ["/cpu:0", "/cpu:1"]), name="tied")
            inputs = keras.Input((3,))
            outputs = tied(layers.Dense(3, name="between")(tied(inputs)))
            found = keras.Model(inputs, outputs)
            found.compile("sgd", "mse")
        with pytest.raises(errors.InvalidLayer, match="tied/kernel is split over devices, but is used in the stages 0"):
            found.train_on_batch(IDS.astype(float), Y[:, :3])
