"""Parameters and buffers of modules as variables of a job, and their memory."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
import shoal.torch
from shoal import optim
from shoal.torch._tensors import ModelTensors, named_parameters
from support.torch_training import (
    CLASSES,
    FEATURES,
    alone,
    arrays,
    batch,
    farthest,
    loss_of,
    name,
    network,
    part,
    trained,
)


class TestVariables:
    def test_buffers_of_batch_norm_are_the_mean_of_the_workers(self, client: shoal.Client) -> None:
        def model() -> nn.Module:
            return nn.Sequential(nn.BatchNorm1d(FEATURES, momentum=0.5), network()).double()

        found = trained(client, optim.SGD(0.1), 1, model=model)
        alone_each = []
        for rank in range(2):
            own = model()
            own(part(0, rank)[0])
            alone_each.append(arrays(own))
        mean = (alone_each[0]["0.running_mean"] + alone_each[1]["0.running_mean"]) / 2
        for it in found:
            np.testing.assert_allclose(it["0.running_mean"], mean, rtol=1e-12)
            assert it["0.num_batches_tracked"] == 1

    def test_buffers_by_sum_count_the_changes_of_all_workers(self, client: shoal.Client) -> None:
        class Counting(nn.Module):
            """A perceptron that counts its samples."""

            def __init__(self) -> None:
                super().__init__()
                self.inner = network()
                self.inner[0].weight.requires_grad_(False)
                self.register_buffer("samples", torch.tensor(100))
                self.register_buffer("share", torch.tensor([0.5, 0.0]).double())

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.samples += len(x)
                self.share += 0.25
                return self.inner(x)

        for found in trained(client, optim.SGD(0.1), 3, model=Counting, buffers="sum"):
            assert found["samples"] == 100 + sum(len(batch(step)[0]) for step in range(3))
            assert found["share"].tolist() == [0.5 + 2 * 3 * 0.25, 2 * 3 * 0.25]

    def test_a_compiled_module_has_the_names_of_its_own(self, client: shoal.Client) -> None:
        wanted = network()
        plain = torch.optim.Adam(wanted.parameters(), 0.1)
        alone(wanted, plain, 3)
        model = network()
        model[0] = torch.compile(model[0], backend="eager")
        whole: Any = torch.compile(model, backend="eager")
        with shoal.torch.DistributedOptimizer(whole, optim.Adam(0.1), job=name(), client=client) as it:
            alone(whole, it, 3)
            assert it.session.pull().keys() == wanted.state_dict().keys()
            state = it.state_dict_for(torch.optim.Adam(whole.parameters(), 0.1))
        found = {key: it.detach().numpy() for key, it in named_parameters(whole).items()}
        assert farthest(arrays(wanted), found) <= 1e-12
        assert torch.allclose(state["state"][0]["exp_avg"], plain.state_dict()["state"][0]["exp_avg"], atol=1e-12)

    def test_buffers_that_change_after_the_backward_pass_count(self, client: shoal.Client) -> None:
        model = network()
        model.register_buffer("steps", torch.tensor(0.0, dtype=torch.float64))
        with shoal.torch.DistributedOptimizer(model, optim.SGD(0.1), job=name(), client=client) as it:

            def count(_: int) -> None:
                model.steps += 1

            alone(model, it, 5, before=count)
            assert model.steps == 5

    def test_frozen_parameters_stay_and_are_in_checkpoints(self, client: shoal.Client) -> None:
        model = network()
        frozen = next(model.parameters()).requires_grad_(False)
        before, job = frozen.detach().clone(), name()
        with shoal.torch.DistributedOptimizer(model, optim.AdamW(0.1), job=job, client=client) as it:
            loss_of(model, *batch(0)).backward()
            it.step()
            assert torch.equal(frozen, before)
            assert client.job(job).pull()["0.weight"].tolist() == before.tolist()

    def test_a_frozen_parameter_beside_batch_norm(self, client: shoal.Client) -> None:
        model = nn.Sequential(nn.BatchNorm1d(FEATURES), network()).double()
        frozen = model[1][0].weight.requires_grad_(False)
        before = frozen.detach().clone()
        with shoal.torch.DistributedOptimizer(model, optim.SGD(0.1), job=name(), client=client) as it:
            alone(model, it, 3)
            assert torch.equal(frozen, before)
            assert model[0].num_batches_tracked == 3

    def test_tied_weights_are_one_variable(self, client: shoal.Client) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
                self.second.weight = self.first.weight

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.second(self.first(x))[:, :CLASSES]

        model, plain = Tied().double(), Tied().double()
        wanted = arrays(alone(plain, torch.optim.SGD(plain.parameters(), 0.1), 3))
        with shoal.torch.DistributedOptimizer(model, optim.SGD(0.1), job=name(), client=client) as it:
            alone(model, it, 3)
        assert farthest(wanted, arrays(model)) <= 1e-12
        assert model.second.weight is model.first.weight

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_halves_are_float32_on_the_servers(self, client: shoal.Client, dtype: torch.dtype) -> None:
        """Updates that a half cannot show add up."""
        model = nn.Linear(1, 1, bias=False).to(dtype)
        with torch.no_grad():
            model.weight.fill_(1.0)
        with shoal.torch.DistributedOptimizer(model, optim.SGD(2.0**-14), job=name(), client=client) as it:
            for _ in range(512):
                model.weight.grad = torch.ones_like(model.weight)
                it.step()
            assert model.weight.item() == 1 - 512 * 2.0**-14

    def test_a_parameter_without_a_gradient_counts_as_zeros(self, client: shoal.Client) -> None:
        model = nn.ModuleDict({"used": nn.Linear(FEATURES, CLASSES), "unused": nn.Linear(2, 2)}).double()
        before = arrays(model)
        given = optim.Adam(0.1)
        with shoal.torch.DistributedOptimizer(model, given, job=name(), client=client) as it:
            loss_of(model["used"], *batch(0)).backward()
            it.step()
        after = arrays(model)
        assert farthest(before, after, ["unused.weight", "unused.bias"]) == 0
        assert farthest(before, after, ["used.weight"]) > 0

    def test_the_memory_of_pulled_arrays_is_used_and_layouts_stay(self) -> None:
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 2)).to(memory_format=torch.channels_last)
        tensors = ModelTensors(model)
        values = {key: np.ones(it.shape, it.dtype) for key, it in tensors.variables().items()}
        tensors.load(values)
        assert model[2].weight.data_ptr() == values["2.weight"].ctypes.data
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        model[2].weight.grad = torch.ones_like(model[2].weight)
        assert tensors.gradients()["2.weight"].ctypes.data == model[2].weight.grad.data_ptr()
