"""Training of two workers on two servers, compared with one process of PyTorch: 50 synchronous steps in float64."""

import pytest

from support.training.server_training import grpc_servers, train
from support.training.training_problem import ALL, RECORDED, Combination, largest_difference, recorded

pytest.importorskip("torch", reason="PyTorch is not installed: `make reference` does that")

from support.training import torch_training


@pytest.mark.parametrize("combination", ALL, ids=str)
def test_groups_schedules_and_clipping_equal_one_process(combination: Combination) -> None:
    difference = largest_difference(train(combination, grpc_servers), torch_training.train(combination).values)
    print(f"largest relative difference of {combination}: {difference:.2g}")
    assert difference < 1e-10


@pytest.mark.parametrize("combination", RECORDED, ids=str)
def test_recorded_results_are_those_of_the_installed_pytorch(combination: Combination) -> None:
    result, kept = torch_training.train(combination), recorded(combination)
    assert largest_difference(result.values, kept.values) < 1e-10
    assert (result.clipped_steps, result.reductions) == (kept.clipped_steps, kept.reductions)
