"""State of PyTorch's optimizers: a job goes on from it as PyTorch would, and PyTorch from that of a job."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
import shoal.torch
from shoal import errors, optim
from shoal.torch import optimizer_state, state_dict_for
from support.torch_training import CLASSES, FEATURES, arrays, batch, farthest, loss_of, name, network, together

HALF = 20
Plain = Callable[[Any], torch.optim.Optimizer]
CASES: dict[str, tuple[optim.Optimizer, Plain, float]] = {
    "sgd": (optim.SGD(0.1), lambda it: torch.optim.SGD(it, 0.1), 1e-12),
    "momentum": (optim.Momentum(0.1), lambda it: torch.optim.SGD(it, 0.1, momentum=0.9), 1e-12),
    "nesterov": (
        optim.Momentum(0.1, nesterov=True, weight_decay=0.01),
        lambda it: torch.optim.SGD(it, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        1e-12,
    ),
    "adam": (optim.Adam(1e-2), lambda it: torch.optim.Adam(it, 1e-2), 1e-10),
    "adamw": (optim.AdamW(1e-2), lambda it: torch.optim.AdamW(it, 1e-2), 1e-10),
    "adagrad": (
        optim.Adagrad(0.1, initial_accumulator_value=0.5),
        lambda it: torch.optim.Adagrad(it, 0.1, initial_accumulator_value=0.5),
        1e-10,
    ),
    "rmsprop": (optim.RMSProp(1e-2), lambda it: torch.optim.RMSprop(it, 1e-2), 1e-10),
    "rmsprop-centered": (
        optim.RMSProp(1e-2, momentum=0.9, centered=True),
        lambda it: torch.optim.RMSprop(it, 1e-2, momentum=0.9, centered=True),
        1e-10,
    ),
}


def steps(model: nn.Module, optimizer: Any, first: int, count: int) -> None:
    """Trains on the batches from `first` on."""
    for step in range(first, first + count):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()


def stored(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state of an optimizer after it went through a file, without code in it."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def copy_of(model: nn.Module, make: Callable[[], nn.Module] = network) -> nn.Module:
    other = make()
    other.load_state_dict(model.state_dict())
    return other


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, in another order than the module's, with other rates and decays."""
    biases = [it for name, it in model.named_parameters() if name.endswith("bias")]
    weights = [it for name, it in model.named_parameters() if not name.endswith("bias")]
    return [{"params": biases, "lr": 2e-2, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.1}]


@pytest.mark.parametrize("case", CASES)
class TestEachOptimizer:
    def test_a_job_goes_on_as_pytorch_would(self, client: shoal.Client, case: str) -> None:
        given, plain, bound = CASES[case]
        model = network()
        optimizer = plain(model.parameters())
        steps(model, optimizer, 0, HALF)
        switched, saved = copy_of(model), stored(optimizer)
        steps(model, optimizer, HALF, HALF)
        loaded = plain(switched.parameters())
        loaded.load_state_dict(saved)
        with shoal.torch.DistributedOptimizer(switched, given, job=name(), client=client, optimizer_state=loaded) as it:
            steps(switched, it, HALF, HALF)
        assert farthest(arrays(model), arrays(switched)) <= bound

    def test_pytorch_goes_on_from_a_job(self, client: shoal.Client, case: str) -> None:
        given, plain, bound = CASES[case]
        model = network()
        steps(model, plain(model.parameters()), 0, HALF)
        wanted = network()
        optimizer = plain(wanted.parameters())
        steps(wanted, optimizer, 0, 2 * HALF)
        trained = network()
        with shoal.torch.DistributedOptimizer(trained, given, job=name(), client=client) as it:
            steps(trained, it, 0, HALF)
            saved = it.state_dict_for(plain(trained.parameters()))
        later = copy_of(trained)
        resumed = plain(later.parameters())
        resumed.load_state_dict(saved)
        steps(later, resumed, HALF, HALF)
        assert farthest(arrays(wanted), arrays(later)) <= bound


def test_two_workers_go_on_with_groups_a_schedule_and_frozen_parameters(client: shoal.Client) -> None:
    rates = optim.CosineLR(1e-2, steps=2 * HALF)
    biases = optim.VariableGroup("*bias", rate=2.0, weight_decay=0.0)
    given = optim.AdamW(rates, weight_decay=0.1, groups=[biases])

    def make() -> nn.Module:
        model = network()
        next(model.parameters()).requires_grad_(False)
        return model

    def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
        for step in range(first, first + count):
            for group, factor in zip(optimizer.param_groups, (2.0, 1.0), strict=True):
                group["lr"] = rates.rate(step) * factor
            steps(model, optimizer, step, 1)

    model = make()
    plain = torch.optim.AdamW(groups(model), 1e-2)
    scheduled(model, plain, 0, HALF)
    halfway, saved = copy_of(model, make), stored(plain)
    scheduled(model, plain, HALF, HALF)
    models, job, found = [copy_of(halfway, make) for _ in range(2)], name(), {}

    def run(rank: int) -> None:
        own = models[rank]
        loaded = torch.optim.AdamW(groups(own), 1e-2)
        loaded.load_state_dict(saved)
        options: dict[str, Any] = {"workers": 2, "client": client, "optimizer_state": loaded}
        with shoal.torch.DistributedOptimizer(own, given, job=job, **options) as it:
            assert sorted(group["lr"] for group in it.param_groups) == [rates.rate(HALF), 2 * rates.rate(HALF)]
            for step in range(HALF, 2 * HALF):
                it.zero_grad()
                x, y = batch(step)
                loss_of(own, x, y).backward()  # each has the whole batch, so the mean is that of one process
                it.step()
            found[rank] = it.state_dict_for(torch.optim.AdamW(groups(own), 1e-2))

    together(run)
    for own in models:
        assert farthest(arrays(model), arrays(own)) <= 1e-10
    wanted = plain.state_dict()
    for rank in range(2):
        assert found[rank]["state"].keys() == wanted["state"].keys()
        for index, state in wanted["state"].items():
            for key, tensor in state.items():
                torch.testing.assert_close(found[rank]["state"][index][key], tensor, rtol=0, atol=1e-12)
        lrs = [group["lr"] for group in found[rank]["param_groups"]]
        assert lrs == [2 * rates.rate(2 * HALF), rates.rate(2 * HALF)]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))[:, :CLASSES]


def test_tied_weights_have_one_state(client: shoal.Client) -> None:
    model = Tied()
    plain = torch.optim.Adam(model.parameters(), 1e-2)
    steps(model, plain, 0, HALF)
    switched = copy_of(model, Tied)
    loaded = torch.optim.Adam(switched.parameters(), 1e-2)
    loaded.load_state_dict(stored(plain))
    steps(model, plain, HALF, HALF)
    options: dict[str, Any] = {"client": client, "optimizer_state": loaded}
    with shoal.torch.DistributedOptimizer(switched, optim.Adam(1e-2), job=name(), **options) as it:
        steps(switched, it, HALF, HALF)
        saved = it.state_dict_for(loaded)
    assert farthest(arrays(model), arrays(switched)) <= 1e-10
    assert sorted(saved["state"]) == [0, 1, 2]
    assert switched.second.weight is switched.first.weight


def test_halves_lose_only_what_pytorch_rounds(client: shoal.Client) -> None:
    model = nn.Linear(4, 2).to(torch.bfloat16)
    plain = torch.optim.Adam(model.parameters(), 1e-2)
    for it in model.parameters():
        it.grad = torch.full_like(it, 1e-3)
    plain.step()
    state = optimizer_state(plain, model)
    options: dict[str, Any] = {"client": client, "optimizer_state": state}
    with shoal.torch.DistributedOptimizer(model, optim.Adam(1e-2), job=name(), **options) as it:
        found = it.session.optimizer_state()
        for slot, of in state.slots.items():
            for variable, array in of.items():
                np.testing.assert_array_equal(found.slots[slot][variable], array.astype(np.float32))


class TestPure:
    def test_names_are_those_of_the_module(self) -> None:
        model = network()
        plain = torch.optim.Adam(groups(model), 1e-2)
        steps(model, plain, 0, 3)
        state = optimizer_state(plain, model)
        assert state.updates == 3
        assert state.slots["exp_avg"].keys() == dict(model.named_parameters()).keys()
        back = state_dict_for(state, plain, model)
        for index, wanted in plain.state_dict()["state"].items():
            assert all(torch.equal(back["state"][index][key], it) for key, it in wanted.items())

    def test_a_new_optimizer_has_no_state(self) -> None:
        model = network()
        assert optimizer_state(torch.optim.Adam(model.parameters()), model) == optim.OptimizerState()
        assert optimizer_state(torch.optim.SGD(model.parameters(), 0.1), model, updates=7).updates == 7

    def test_the_result_shares_no_memory(self) -> None:
        model = network()
        plain = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        state = optim.OptimizerState({"momentum_buffer": {key: it.copy() for key, it in arrays(model).items()}})
        found = state_dict_for(state, plain, model)
        found["state"][0]["momentum_buffer"].zero_()
        assert state.slots["momentum_buffer"]["0.weight"].any()

    def test_what_is_refused(self) -> None:
        model, other = network(), network()
        for optimizer, said in [
            (torch.optim.Adamax(model.parameters()), "the optimizer is Adamax, whose state the servers do not have"),
            (torch.optim.Adam(other.parameters()), "of 4 parameters of the optimizer are not in the module"),
        ]:
            with pytest.raises(errors.InvalidOptimizer, match=said):
                optimizer_state(optimizer, model)
        amsgrad = torch.optim.Adam(model.parameters(), amsgrad=True)
        steps(model, amsgrad, 0, 1)
        with pytest.raises(errors.InvalidOptimizer, match="has max_exp_avg_sq, which the servers do not keep"):
            optimizer_state(amsgrad, model)
        adam = torch.optim.Adam(model.parameters())
        steps(model, adam, 0, 1)
        adam.state[model[0].weight]["step"] += 1
        with pytest.raises(errors.InvalidOptimizer, match=r"0\.weight has taken 2 steps; 0\.bias has taken 1 steps"):
            optimizer_state(adam, model)
        state = optim.OptimizerState({"linear": {}, "accumulator": {}})
        with pytest.raises(errors.InvalidOptimizer, match="the job has the slots linear, which Adagrad of PyTorch"):
            state_dict_for(state, torch.optim.Adagrad(model.parameters()), model)
        lacking = optim.OptimizerState({"momentum_buffer": {"0.weight": np.zeros(1), "2.bias": np.zeros(1)}})
        with pytest.raises(errors.InvalidOptimizer, match=r"lacks parameters that the job trains: 0\.weight; "):
            state_dict_for(lacking, torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9), model)
        for plain, said in [
            (torch.optim.SGD(model.parameters(), 0.1), "has the slot momentum_buffer, so momentum"),
            (torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True), "no slot grad_avg, so centered"),
            (torch.optim.Adam(model.parameters(), amsgrad=True), "no slot max_exp_avg_sq, so amsgrad"),
        ]:
            kept = ["momentum_buffer"] if "momentum" in plain.defaults else ["exp_avg", "exp_avg_sq"]
            with pytest.raises(errors.InvalidOptimizer, match=said):
                state_dict_for(optim.OptimizerState({slot: {} for slot in kept}), plain, model)


def test_a_state_of_another_optimizer_is_refused_before_the_job_starts(client: shoal.Client) -> None:
    model, job = network(), name()
    plain = torch.optim.Adam(model.parameters())
    steps(model, plain, 0, 1)
    with pytest.raises(errors.InvalidOptimizer, match="momentum has no slot 'exp_avg'; the slots of momentum are"):
        shoal.torch.DistributedOptimizer(model, optim.Momentum(0.1), job=job, client=client, optimizer_state=plain)
    with pytest.raises(errors.UnknownJob):
        client.job(job).status()
