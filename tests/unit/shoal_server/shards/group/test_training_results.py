"""Results of 50 synchronous steps of two workers on two servers, compared with those of one PyTorch process."""

import numpy as np
import pytest

from shoal import optim
from support.training import training_problem
from support.training.server_training import lock_groups, train
from support.training.training_problem import CLIP_NORM, RECORDED, Combination, largest_difference, recorded


@pytest.mark.parametrize("combination", RECORDED, ids=str)
def test_groups_schedules_and_clipping_equal_one_process(combination: Combination) -> None:
    """`make reference` compares all combinations, over connections."""
    found, expected = train(combination, lock_groups), recorded(combination)
    difference = largest_difference(found, expected.values)
    print(f"largest relative difference of {combination}: {difference:.2g}")
    assert difference < 1e-10


def test_a_difference_that_is_not_finite_is_not_hidden() -> None:
    ones = np.ones(2)
    assert largest_difference({"a": ones, "b": ones * 1.5}, {"a": ones, "b": ones}) == 0.5
    for bad in (np.nan, np.inf):
        for name in ("a", "b"):
            found = {"a": ones, "b": ones} | {name: np.array([bad, 1.0])}
            assert largest_difference(found, {"a": ones, "b": ones}) == np.inf
    with pytest.raises(AssertionError):
        largest_difference({"a": ones}, {"a": ones, "b": ones})


def test_recorded_results_show_what_they_are_for() -> None:
    for combination in RECORDED:
        result = recorded(combination)
        assert (0 < result.clipped_steps < training_problem.STEPS) == combination.clips
        assert (result.reductions > 1) == combination.has_plateaus
        start = training_problem.start()
        frozen = {name for name, value in start.items() if np.array_equal(value, result.values[name])}
        assert frozen == ({"embed"} if combination.grouped else set())


def test_recorded_results_cover_every_optimizer_and_schedule() -> None:
    optimizers = [combination.build() for combination in RECORDED]
    assert {type(optimizer) for optimizer in optimizers} == {*optim.Optimizer.registry.values()} - {optim.FTRL}
    assert {type(optimizer.schedule) for optimizer in optimizers} == {*optim.Schedule.registry.values()}
    assert {(it.grouped, it.clips) for it in RECORDED} == {(True, True), (True, False), (False, True)}
    assert {optimizer.clip_norm for optimizer in optimizers} == {0.0, CLIP_NORM}
