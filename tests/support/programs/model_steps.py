"""Functions that take training steps of `shoal_nn`'s programs, as a worker does, but without a worker."""

from typing import Any

import numpy as np

import shoal


def check_begin(program: Any) -> dict[str, Any]:
    """Returns the initial values of all variables, by name."""
    params, state = program.net.init(np.random.default_rng(1), program.shape)
    values = {**params, **state}
    assert values.keys() == program.variables().keys()
    return values


def check_step(program: Any, values: Any, batch: Any = None, *, seed: int = 3) -> Any:
    """Takes one step as a worker does. The result has the names, shapes and dtypes that servers accept."""
    taken: object = program
    assert isinstance(taken, shoal.program.RandomProgram)
    batch = program.dataset.batch(np.arange(8), seed=7) if batch is None else batch
    step = program.loss_and_gradients(values, batch, seed=seed)
    variables = program.variables()
    trained = {name for name, it in variables.items() if it.trainable}
    assert {name: (it.shape, it.dtype) for name, it in step.gradients.items()} == {
        name: (variables[name].shape, variables[name].dtype) for name in trained
    }
    statistics = {name for name, it in variables.items() if it.aggregation.name == "MEAN"}
    assert step.updates.keys() == statistics, "all of an aggregation or none"
    return step


def trained(program: Any, steps: int, rate: float, *, batch: Any = 64) -> dict[str, Any]:
    """Returns all variables after some steps of SGD on random samples."""
    values = check_begin(program)
    rng = np.random.default_rng(0)
    for number in range(steps):
        numbers = rng.integers(0, len(program.dataset), batch)
        step = check_step(program, values, program.dataset.batch(numbers, seed=0), seed=number)
        moved = {name: values[name] - rate * gradient for name, gradient in step.gradients.items()}
        values = {**values, **moved, **step.updates}
    return values
