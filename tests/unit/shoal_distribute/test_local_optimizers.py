"""Local optimizers against the servers' kernels, which other tests compare with PyTorch and Keras."""

import numpy as np
import pytest

from shoal import errors, optim
from shoal_distribute.local_optimizers import LocalOptimizer
from shoal_server.optimizers.update_rules import rule_for, setting_ranges_for

GROUPS = [optim.VariableGroup("a", rate=0.5, weight_decay=0.03), optim.VariableGroup("c", frozen=True)]
OPTIMIZERS = [
    optim.SGD(0.1, weight_decay=0.01),
    optim.SGD(optim.LinearLR(0.1, steps=4), groups=GROUPS),
    optim.Momentum(0.1, momentum=0.8, weight_decay=0.01),
    optim.Momentum(0.1, nesterov=True),
    optim.Adagrad(0.1, initial_accumulator_value=0.2),
    optim.RMSProp(0.01, weight_decay=0.1),
    optim.RMSProp(0.01, momentum=0.5, centered=True),
    optim.Adam(0.01, weight_decay=0.1),
    optim.Adam(0.01, groups=GROUPS),
    optim.AdamW(0.01, weight_decay=0.1),
    optim.FTRL(0.1, l1=0.01, l2=0.02, l2_shrinkage=0.03, beta=0.1),
    optim.FTRL(0.1, learning_rate_power=-0.7),
]
SIZES = {"a": 3, "b": 4, "c": 2}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_updates_equal_those_of_the_servers(optimizer: optim.Optimizer, dtype: str) -> None:
    rng = np.random.default_rng(0)
    arena = rng.normal(size=9).astype(dtype)
    values = dict(zip(SIZES, (it.copy() for it in np.split(arena, [3, 7])), strict=True))
    rule, local = rule_for(optimizer), LocalOptimizer(optimizer)
    slots = {slot: np.full(9, rule.initial(slot), dtype) for slot in rule.slots}
    ranges = setting_ranges_for([*SIZES.items()], optimizer)
    for version in range(6):
        gradient = rng.normal(size=9).astype(dtype)
        rule.apply(arena, gradient, slots, version=version, lr_scale=1.0, setting_ranges=ranges)
        parts = dict(zip(SIZES, np.split(gradient, [3, 7]), strict=True))
        local.update([(name, values[name], parts[name]) for name in SIZES])
    tolerance = 1e-13 if dtype == "float64" else 2e-6
    np.testing.assert_allclose(np.concatenate([*values.values()]), arena, rtol=tolerance, atol=tolerance)
    assert local.version == 6
    for path, array in local.state().items():
        name, _, slot = path.partition("/")
        start = {"a": 0, "b": 3, "c": 7}[name]
        np.testing.assert_allclose(array, slots[slot][start : start + SIZES[name]], rtol=tolerance, atol=tolerance)


def test_the_global_norm_is_limited_over_all_variables_but_frozen_ones() -> None:
    optimizer = optim.SGD(1.0, clip_norm=5.0, groups=[optim.VariableGroup("c", frozen=True)])
    values = [np.zeros(1), np.zeros(1), np.zeros(1)]
    LocalOptimizer(optimizer).update(
        [("a", values[0], np.array([6.0])), ("b", values[1], np.array([8.0])), ("c", values[2], np.array([1e9]))]
    )
    np.testing.assert_allclose(values, [[-3.0], [-4.0], [0.0]], rtol=1e-6)


def test_state_continues_in_another_optimizer() -> None:
    first, second = LocalOptimizer(optim.Adam(0.1)), LocalOptimizer(optim.Adam(0.1))
    a, b, gradient = np.ones(3), np.ones(3), np.array([1.0, -2.0, 3.0])
    first.update([("w", a, gradient)])
    first.update([("w", a, gradient)])
    second.update([("w", b, gradient)])
    third = LocalOptimizer(optim.Adam(0.1))
    third.restore(second.version, {path: array.copy() for path, array in second.state().items()})
    third.update([("w", b, gradient)])
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("other", [optim.SGD(0.1), optim.Momentum(0.1)])
def test_the_state_of_another_kind_of_optimizer_is_refused(other: optim.Optimizer) -> None:
    saved, again = LocalOptimizer(optim.Adam(0.1)), LocalOptimizer(other)
    saved.update([("w", np.ones(3), np.ones(3))])
    with pytest.raises(errors.IncompatibleCheckpoint, match=r"has exp_avg, exp_avg_sq of w, but .* keeps"):
        again.restore(saved.version, saved.state())
    assert again.version == 0


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(errors.InvalidOptimizer, match=r"shoal\.optim"):
        LocalOptimizer("sgd")  # type: ignore[arg-type]
