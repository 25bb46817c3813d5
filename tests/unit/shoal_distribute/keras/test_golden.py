"""Values of the Keras-shaped front compared with those of Keras from `tests/golden/make_keras.py`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal_distribute import GradientTape, keras
from support.keras_front import cases

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "keras.json").read_text())


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def check_close(found: Any, golden: Any, what: str) -> None:
    """Asserts that no element is further off than a millionth of the largest: Keras computes some in float32."""
    expected = np.asarray(golden)
    array = np.asarray(found)
    assert array.shape == expected.shape, what
    assert np.abs(array - expected).max(initial=0) <= 1e-6 * np.abs(expected).max(initial=0), what


@pytest.mark.parametrize("name", cases.LAYERS)
def test_layers(name: str) -> None:
    case, golden = cases.LAYERS[name], GOLDEN["layers"][name]
    layer = case.build(keras)
    xs = [keras.Tensor(it) for it in cases.inputs_of(name)]
    fed = xs if len(xs) > 1 else xs[0]
    layer(fed)
    for variable in layer.weights:
        variable.assign(cases.weight_of(name, variable.name.rpartition("/")[2], variable.shape))
    with GradientTape() as tape:
        if not case.rows:
            tape.watch(xs)
        output = layer(fed, training=case.training)
        losses = layer.losses
        total = (output * cases.drawn(f"{name} dy", output.shape)).sum() + sum(losses)
    check_close(output, golden["output"], "output")
    check_close([float(it) for it in losses], golden.get("losses", []), "losses")
    found = tape.gradient(total, [*layer.trainable_variables, *([] if case.rows else xs)])
    expected = [*golden["gradients"], *golden["dx"]]
    assert len(found) == len(expected)
    for number, (gradient, wants) in enumerate(zip(found, expected, strict=True)):
        check_close(gradient, wants, f"gradient {number}")
    state = layer.non_trainable_variables
    assert len(state) == len(golden["state"])
    for variable, wants in zip(state, golden["state"], strict=True):
        check_close(variable.numpy(), wants, variable.name)


@pytest.mark.parametrize("name", cases.LOSSES)
def test_losses(name: str) -> None:
    build, kind = cases.LOSSES[name]
    labels, outputs, weights = cases.answers_of(kind)
    loss, y = build(keras), keras.Tensor(outputs)
    check_close(loss(labels, outputs), GOLDEN["losses"][name]["value"], "value")
    with GradientTape() as tape:
        tape.watch(y)
        value = loss(labels, y, weights)
    check_close(value, GOLDEN["losses"][name]["weighted"], "weighted")
    check_close(tape.gradient(value, y), GOLDEN["losses"][name]["gradient"], "gradient")


@pytest.mark.parametrize("name", cases.METRICS)
def test_metrics(name: str) -> None:
    build, kind = cases.METRICS[name]
    metric, found = build(keras), []
    for part in range(2):
        labels, outputs, weights = cases.answers_of(kind, part)
        metric.update_state(labels, outputs, weights if part else None)
        found.append(float(metric.result()))
    check_close(found, GOLDEN["metrics"][name], name)
    metric.reset_state()
    assert float(metric.result()) == 0


@pytest.mark.parametrize("name", cases.OPTIMIZERS)
def test_optimizers(name: str) -> None:
    optimizer = cases.OPTIMIZERS[name](keras)
    variable = optimizer.strategy.create_variable(f"golden {name}", cases.drawn("variable", (4,)))
    found = []
    for number in range(5):
        optimizer.apply_gradients([(cases.drawn(f"gradient {number}", (4,)) / 10, variable)])
        found.append(variable.numpy())
    check_close(found, GOLDEN["optimizers"][name], name)
    assert optimizer.iterations == 5


@pytest.mark.parametrize("name", cases.SCHEDULES)
def test_schedules(name: str) -> None:
    schedule = cases.SCHEDULES[name](keras)
    check_close([schedule(step) for step in range(12)], GOLDEN["schedules"][name], name)


@pytest.mark.parametrize("name", cases.CONSTRAINTS)
def test_constraints(name: str) -> None:
    build, shape = cases.CONSTRAINTS[name]
    check_close(build(keras)(cases.drawn(name, shape)), GOLDEN["constraints"][name], name)
