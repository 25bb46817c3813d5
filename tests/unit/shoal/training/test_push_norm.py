"""Push norm: the squares of a whole push, without frozen variables, whatever the arrays look like."""

import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from shoal import errors, optim
from shoal._training.push_norm import PushNorm, check_pushed

OPTIMIZER = optim.SGD(0.1, clip_norm=1.0, groups=[optim.VariableGroup("frozen*", frozen=True)])


def test_squares_are_those_of_all_variables_that_are_not_frozen() -> None:
    draws = np.random.default_rng(0)
    gradients: dict[str, np.ndarray] = {
        "large": draws.standard_normal((300, 500)).astype(np.float32),
        "strided": draws.standard_normal((40, 6))[::2, ::3],
        "half": draws.standard_normal(9).astype(ml_dtypes.bfloat16),
        "scalar": np.array(3.0),
        "empty": np.zeros((0, 4)),
    }
    expected = math.fsum(float(np.sum(it.astype(np.float64) ** 2)) for it in gradients.values())
    norm = PushNorm(OPTIMIZER)
    found = norm.squares({**gradients, "frozen_one": np.full(3, math.nan)})
    assert found == pytest.approx(expected, rel=1e-13)
    assert found == norm.squares(dict(reversed(gradients.items())))


def test_squares_need_little_memory() -> None:
    gradient, norm = np.ones(1 << 20, np.float32), PushNorm(OPTIMIZER)
    tracemalloc.start()
    try:
        assert norm.squares({"w": gradient}) == 1 << 20
        assert tracemalloc.get_traced_memory()[1] < gradient.nbytes / 2
    finally:
        tracemalloc.stop()


def test_squares_may_be_infinite_but_not_nan() -> None:
    norm = PushNorm(OPTIMIZER)
    for values in ([1e300, 1.0], [1.2e154, 1.2e154], [math.inf]):
        check_pushed(squares := norm.squares({f"w{index}": np.array(value) for index, value in enumerate(values)}))
        assert squares == math.inf
    with pytest.raises(errors.NonFiniteGradient, match="contain NaN; nothing was sent"):
        check_pushed(norm.squares({"w": np.array([1.0, math.nan]), "v": np.array(math.inf)}))
