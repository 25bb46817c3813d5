"""Layers split over devices, compared with those that are not: training, gradients, files, and wrong use."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import (
    CentralStorageStrategy,
    Checkpoint,
    DeviceMesh,
    GradientTape,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    keras,
)
from shoal_distribute.tensor_parallel import SplitArray, group_of_devices

layers = keras.layers
RNG = np.random.default_rng(0)
IDS, LABELS = RNG.integers(0, 11, (48, 3)), RNG.normal(size=(48, 5))
X = RNG.normal(size=(8, 6))
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.3),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
}


def mesh(count: int) -> DeviceMesh:
    return DeviceMesh({"model": count}, [f"/cpu:{number}" for number in range(count)])


def dense(units: int, *args: Any, on: int, inputs: int = 6, split: str = "column", **options: Any) -> Any:
    """Returns a layer with an input of this width; on no device, one that is not split."""
    keras.utils.set_random_seed(3)
    if not on:
        options = {name: value for name, value in options.items() if name not in ("gather_output", "input_is_parallel")}
        layer: Any = layers.Dense(units, *args, dtype="float64", **options)
    else:
        kind = {"column": layers.ColumnParallelDense, "row": layers.RowParallelDense}[split]
        layer = kind(units, *args, mesh=mesh(on), dtype="float64", **options)
    layer.build((inputs,))
    return layer


def model(on: int) -> keras.Sequential:
    """Returns a model whose dense layers and embedding are split. No number of devices divides 13 and 11."""
    keras.utils.set_random_seed(7)
    if not on:
        parts: list[Any] = [
            layers.Embedding(11, 6, dtype="float64"),
            layers.Flatten(dtype="float64"),
            layers.Dense(13, "gelu", dtype="float64"),
            layers.Dense(7, "tanh", dtype="float64"),
            layers.Dense(9, "softmax", dtype="float64"),
            layers.Dense(5, use_bias=False, dtype="float64"),
        ]
    else:
        place: Any = {"mesh": mesh(on), "dtype": "float64"}
        parts = [
            layers.ParallelEmbedding(11, 6, **place),
            layers.Flatten(dtype="float64"),
            layers.ColumnParallelDense(13, "gelu", gather_output=False, **place),
            layers.RowParallelDense(7, "tanh", input_is_parallel=True, **place),
            layers.ColumnParallelDense(9, "softmax", **place),
            layers.RowParallelDense(5, use_bias=False, **place),
        ]
    return keras.Sequential([keras.Input((3,)), *parts])


def trained(on: int, optimizer: str, epochs: int = 10) -> keras.Sequential:
    found = model(on)
    found.compile(OPTIMIZERS[optimizer](), "mse")
    found.fit(IDS, LABELS, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return found


def assert_close(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert len(found) == len(wanted)
    for own, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-10)


def test_thirty_steps_give_the_variables_of_the_model_that_is_not_split() -> None:
    wanted, before = trained(0, "adam"), model(0).get_weights()
    assert all(np.abs(own - other).max() > 1e-3 for own, other in zip(wanted.get_weights(), before, strict=True))
    for count in (2, 4):
        found = trained(count, "adam")
        assert_close(found.get_weights(), wanted.get_weights())
        loss = wanted.evaluate(IDS, LABELS, verbose=0)
        assert found.evaluate(IDS, LABELS, verbose=0) == pytest.approx(loss, abs=1e-10)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "rmsprop"])
def test_optimizers_update_the_parts_as_the_whole(optimizer: str) -> None:
    assert_close(trained(3, optimizer, epochs=2).get_weights(), trained(0, optimizer, epochs=2).get_weights())


@pytest.mark.parametrize(
    "make",
    [
        lambda on: [dense(7, on=on)],
        lambda on: [dense(7, "gelu", use_bias=False, on=on)],
        lambda on: [dense(7, "softmax", on=on)],
        lambda on: [dense(3, "relu", on=on, split="row")],
        lambda on: [dense(8, on=on), dense(3, on=on, split="row", inputs=8)],
        lambda on: [
            dense(8, "tanh", on=on, gather_output=False),
            layers.Activation("relu", dtype="float64"),  # needs the whole
            dense(3, on=on, split="row", inputs=8),
        ],
    ],
)
def test_outputs_and_gradients(make: Callable[[int], list[Any]]) -> None:
    def passed(on: int) -> list[np.ndarray]:
        chain, x = make(on), keras.Tensor(X)
        with GradientTape() as tape:
            tape.watch(x)
            y = x
            for layer in chain:
                y = layer(y, training=True)
            loss = (y * y).sum()
        variables = [it for layer in chain for it in layer.trainable_variables]
        return [y.numpy(), *(it.numpy() for it in tape.gradient(loss, [x, *variables]))]

    wanted = passed(0)
    for count in (1, 2, 3):
        assert_close(passed(count), wanted)


def test_an_output_in_parts_can_go_to_several_layers() -> None:
    def gradients(on: int) -> list[np.ndarray]:
        column = dense(8, "tanh", on=on, gather_output=False)
        row = dense(8, on=on, split="row", inputs=8, input_is_parallel=True)
        inputs = keras.Input((6,))
        hidden = column(inputs)
        merged = layers.Add(dtype="float64")([row(hidden), hidden])
        functional = keras.Model(inputs, merged)
        with GradientTape() as tape:
            loss = (functional(X) ** 2).sum()
        return [it.numpy() for it in tape.gradient(loss, functional.trainable_variables)]

    assert_close(gradients(2), gradients(0))


def test_nothing_is_gathered_between_a_column_and_a_row_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    column = dense(8, "relu", on=2, gather_output=False)
    row = dense(3, on=2, split="row", inputs=8, input_is_parallel=True)

    def refused(*_: Any) -> None:
        raise AssertionError("gathered")

    monkeypatch.setattr(SplitArray, "gathered", refused)
    with GradientTape() as tape:
        hidden = column(keras.Tensor(X))
        loss = (row(hidden) ** 2).sum()
    assert (hidden.shape, hidden.dtype, hidden.ndim) == ((8, 8), np.float64, 2)
    variables = [*column.trainable_variables, *row.trainable_variables]
    optimizer = keras.optimizers.Adam(0.1, global_clipnorm=1.0)
    optimizer.minimize(loss, variables, tape)
    assert optimizer.iterations == 1


def test_calls_in_flight_keep_their_own_state() -> None:
    column = dense(8, "gelu", on=2, gather_output=False)
    row = dense(3, on=2, split="row", inputs=8, input_is_parallel=True)
    kernel = column.trainable_variables[0]

    def gradient(tape: GradientTape, loss: Any) -> np.ndarray:
        found: np.ndarray = tape.gradient(loss, kernel).numpy()
        return found

    def forward(x: np.ndarray) -> tuple[GradientTape, Any]:
        with GradientTape() as tape:
            loss = (row(column(keras.Tensor(x))) ** 2).sum()
        return tape, loss

    alone = [gradient(*forward(x)) for x in (X[:5], X[5:])]
    flying = [forward(x) for x in (X[:5], X[5:])]
    assert_close([gradient(*it) for it in flying], alone)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: gradient(*forward(x)), [X[:5], X[5:]] * 4))
    assert_close(found, alone * 4)


def test_a_custom_loop_and_whole_gradients_update_the_parts() -> None:
    def updated(on: int) -> list[np.ndarray]:
        layer, optimizer = dense(5, on=on), keras.optimizers.Adam(0.1)
        for _ in range(2):
            with GradientTape() as tape:
                loss = (layer(keras.Tensor(X)) ** 2).mean()
            kernel, bias = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply_gradients(zip([kernel * 0.5, bias], layer.trainable_variables, strict=True))
        found: list[np.ndarray] = layer.get_weights()
        return found

    assert_close(updated(2), updated(0))


def test_a_layer_that_is_not_trained_keeps_its_variables() -> None:
    found = model(2)
    found.layers[2].trainable = False
    before = found.get_weights()
    found.compile("sgd", "mse")
    found.fit(IDS, LABELS, batch_size=16, verbose=0)
    after = found.get_weights()
    assert [bool((own == other).all()) for own, other in zip(after, before, strict=True)][1:3] == [True, True]
    assert not (after[0] == before[0]).all()


def test_files_fit_any_number_of_devices(tmp_path: Path) -> None:
    whole, path = trained(4, "adam", epochs=2), str(tmp_path / "model")
    whole.save(path)
    wanted = trained(4, "adam", epochs=3).get_weights()
    for count in (None, 2):
        loaded = keras.models.load_model(path, mesh=None if count is None else mesh(count))
        assert all((own == other).all() for own, other in zip(loaded.get_weights(), whole.get_weights(), strict=True))
        loaded.compile(OPTIMIZERS["adam"](), "mse")
        loaded.fit(IDS, LABELS, batch_size=16, epochs=1, shuffle=False, verbose=0)
        assert_close(loaded.get_weights(), wanted)
    plain = model(0)
    plain.load_weights(path)  # the same variables, by the same places
    assert all((own == other).all() for own, other in zip(plain.get_weights(), whole.get_weights(), strict=True))
    plain.save_weights(str(tmp_path / "weights"))
    model(2).load_weights(str(tmp_path / "weights"))


def test_a_checkpoint_has_whole_slots(tmp_path: Path) -> None:
    whole = trained(2, "momentum", epochs=1)
    checkpoint = Checkpoint(model=whole, optimizer=whole.optimizer).save(tmp_path / "ckpt")
    other = model(4)
    other.compile(OPTIMIZERS["momentum"](), "mse")
    Checkpoint(model=other, optimizer=other.optimizer).restore(checkpoint)
    assert other.optimizer is not None
    again = Checkpoint(model=other, optimizer=other.optimizer).save(tmp_path / "again")  # before the first update
    third = model(3)
    third.compile(OPTIMIZERS["momentum"](), "mse")
    Checkpoint(model=third, optimizer=third.optimizer).restore(again)
    for it in (whole, other, third):
        it.fit(IDS, LABELS, batch_size=16, shuffle=False, verbose=0)
    assert_close(other.get_weights(), whole.get_weights())
    assert_close(third.get_weights(), whole.get_weights())


def test_variables_are_whole_to_users() -> None:
    layer = dense(7, on=4)
    plain = dense(7, on=0)
    assert [it.shape for it in layer.weights] == [(6, 7), (7,)]
    assert all((own == other).all() for own, other in zip(layer.get_weights(), plain.get_weights(), strict=True))
    assert [it.shape for it in layer.weights[0].storage().parts] == [(6, 2), (6, 2), (6, 2), (6, 1)]
    layer.set_weights([np.ones((6, 7)), np.zeros(7)])
    np.testing.assert_allclose(layer(X).numpy(), np.repeat(X.sum(axis=1, keepdims=True), 7, axis=1))
    assert (np.asarray(layer.weights[0]) == 1).all()
    assert (layer.weights[0].read() == 1).all()
    assert layer.count_params() == 49
    assert repr(layer.weights[0].storage()).startswith(
        "SplitArray(shape=(6, 7), dtype=float64, axis=1, devices=[/cpu:0"
    )


def test_layers_on_the_same_devices_share_threads() -> None:
    assert group_of_devices(["/cpu:0", "/cpu:1"]) is group_of_devices(["cpu:0", "cpu:1"])
    group = group_of_devices(["/cpu:0", "/cpu:1"])

    def failing(device: Any, number: int) -> int:
        if number:
            raise ValueError("no")
        return number

    with pytest.raises(ValueError, match="no") as failed:
        group.map(failing, [0, 1])
    assert failed.value.__notes__ == ["raised on /cpu:1"]


def test_one_replica_in_one_process_keeps_split_variables() -> None:
    for strategy in (OneDeviceStrategy("/cpu:0"), MirroredStrategy(["/cpu:0"])):
        with strategy, strategy.scope():
            found = model(2)
            found.compile("sgd", "mse")
            found.fit(IDS, LABELS, batch_size=16, verbose=0)
    refusing: list[Any] = [
        MirroredStrategy(["/cpu:0", "/cpu:1"]),
        CentralStorageStrategy(["/cpu:0"]),
        MultiWorkerMirroredStrategy(devices=["/cpu:0"]),
    ]
    for strategy in refusing:
        kind = type(strategy).__name__
        with (
            strategy,
            strategy.scope(),
            pytest.raises(
                errors.WrongContext, match=f"but a {kind} .* keeps no split variables; make the model outside"
            ),
        ):
            model(2)


def test_wrong_use_is_named() -> None:
    with pytest.raises(errors.InvalidShape, match=r"the output of layer few has 3 elements, too few .* over 4 devices"):
        layers.ColumnParallelDense(3, mesh=mesh(4), name="few")
    with pytest.raises(errors.InvalidShape, match=r"the input of layer few has 3 elements, too few .* over 4 devices"):
        layers.RowParallelDense(8, mesh=mesh(4), name="few").build((3,))
    with pytest.raises(errors.InvalidShape, match="the table of layer few has 3 elements"):
        layers.ParallelEmbedding(3, 8, mesh=mesh(4), name="few")
    with pytest.raises(errors.InvalidLayer, match="has its outputs on several devices, but Softmax needs all of them"):
        layers.ColumnParallelDense(8, "softmax", mesh=mesh(2), gather_output=False)
    with pytest.raises(errors.BadRequest, match="2 groups along 'model'"):
        layers.ColumnParallelDense(8, mesh=DeviceMesh({"data": 2, "model": 2}, [f"/cpu:{it}" for it in range(4)]))
    with pytest.raises(errors.BadRequest, match="has no axis 'model'; it has data"):
        layers.ColumnParallelDense(8, mesh=DeviceMesh({"data": 2}, ["/cpu:0", "/cpu:1"]))
    with pytest.raises(errors.BadRequest, match="the mesh of a split layer has ranks, but a DefaultStrategy"):
        layers.ColumnParallelDense(8, mesh=DeviceMesh({"model": 2}, [0, 1]))
    with pytest.raises(TypeError, match="did you mean 'gather_output'"):
        layers.ColumnParallelDense(8, mesh=mesh(2), gather_outputs=True)
    parallel = dense(3, on=2, split="row", inputs=8, input_is_parallel=True, name="row")
    with pytest.raises(errors.InvalidLayer, match="row has input_is_parallel=True, but its input is not in parts"):
        parallel(np.ones((2, 8)))
    with pytest.raises(
        errors.InvalidLayer, match=r"row is on /cpu:0, /cpu:1, but the parts .* on /cpu:0, /cpu:1, /cpu:2"
    ):
        parallel(dense(8, on=3, gather_output=False)(X))
    with pytest.raises(errors.InvalidShape, match=r"row got samples of the shape \(9,\), but was built for \(..., 8\)"):
        parallel(dense(9, on=2, gather_output=False)(X))
    with pytest.raises(errors.InvalidShape, match=r"got samples of the shape \(5,\), but was built for \(..., 6\)"):
        dense(8, on=2)(np.ones((2, 5)))


def test_ids_may_have_a_dtype_that_holds_no_number_of_the_last_row() -> None:
    layer = layers.ParallelEmbedding(1_000, 2, mesh=mesh(2))
    ids = np.array([[0, 255]], "uint8")
    np.testing.assert_array_equal(layer(ids).numpy(), layer(ids.astype("int64")).numpy())


@pytest.mark.parametrize(
    ("ids", "message"), [([[0, 11]], "ids from 0 to 11, but its rows are 0 to 10"), ([[-1]], "-1")]
)
def test_ids_without_a_row_are_refused(ids: list[list[int]], message: str) -> None:
    layer = layers.ParallelEmbedding(11, 4, mesh=mesh(2))
    with pytest.raises(errors.InvalidData, match=message):
        layer(np.array(ids))
    assert layer(np.zeros((0, 2), np.int64)).shape == (0, 2, 4)
    assert layer(np.array([[1.0, 10.0]])).shape == (1, 2, 4)
