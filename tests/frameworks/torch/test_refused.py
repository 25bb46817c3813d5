"""Refusals of `shoal.torch.DistributedOptimizer`: what it does not take, and what its errors advise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
import shoal.torch
from shoal import errors, optim
from support.torch_training import CLASSES, batch, loss_of, name, network


def make(client: shoal.Client, model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    given = optimizer or optim.SGD(0.1)
    return shoal.torch.DistributedOptimizer(model, given, job=name(), client=client, **options)


def test_a_parameter_in_the_place_of_another_one(client: shoal.Client) -> None:
    model = network()
    with make(client, model) as it:
        model[2] = nn.Linear(16, CLASSES).double()
        loss_of(model, *batch(0)).backward()
        with pytest.raises(errors.InvalidVariable, match=r"new: 2\.weight, 2\.bias; missing: none"):
            it.step()


def test_a_parameter_that_is_trained_from_now_on(client: shoal.Client) -> None:
    model = network()
    frozen = next(model.parameters()).requires_grad_(False)
    with shoal.torch.DistributedOptimizer(model, optim.SGD(0.1), job=name(), client=client) as it:
        frozen.requires_grad_(True)
        loss_of(model, *batch(0)).backward()
        with pytest.raises(errors.InvalidVariable, match=r"requires_grad of 0\.weight has changed"):
            it.step()


def test_a_parameter_that_appears_later(client: shoal.Client) -> None:
    model = network()
    with make(client, model) as it:
        model.append(nn.Linear(CLASSES, CLASSES).double())
        loss_of(model, *batch(0)).backward()
        with pytest.raises(errors.InvalidVariable, match=r"new: 3\.weight, 3\.bias"):
            it.step()
        with pytest.raises(errors.InvalidVariable, match="gets no more variables"):
            it.add_param_group({"params": [*model[3].parameters()]})


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), "on the meta device.*to_empty"),
        (lambda: nn.Linear(2, 2).to(torch.complex64), r"is torch\.complex64; .*view_as_real"),
        (lambda: nn.LazyLinear(2), "has no shape yet; call the module with one batch"),
    ],
)
@pytest.mark.filterwarnings("ignore:Complex modules:UserWarning", "ignore:Lazy modules:UserWarning")
def test_a_parameter_without_real_values(client: shoal.Client, model: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(errors.InvalidVariable, match=said):
        make(client, model())


def test_a_sparse_gradient(client: shoal.Client) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    with make(client, model) as it:
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(errors.InvalidGradient, match=r"the gradient of 'weight' is sparse; .*sparse=False"):
            it.step()


def test_a_step_without_a_backward_pass(client: shoal.Client) -> None:
    with make(client, network()) as it, pytest.raises(errors.BadRequest, match=r"call loss\.backward\(\)"):
        it.step()


def test_other_shapes_than_those_of_the_job(client: shoal.Client) -> None:
    job = name()
    with (
        shoal.torch.DistributedOptimizer(nn.Linear(2, 2), optim.SGD(0.1), job=job, client=client),
        pytest.raises(errors.InvalidJob, match="weight"),
    ):
        shoal.torch.DistributedOptimizer(nn.Linear(3, 2), optim.SGD(0.1), job=job, client=client)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda it: torch.optim.SGD(it, 0.1), r"shoal\.optim\.SGD\(0\.1, weight_decay=0\)"),
        (
            lambda it: torch.optim.SGD(it, 0.1, momentum=0.9, nesterov=True),
            r"shoal\.optim\.Momentum\(0\.1, momentum=0\.9, nesterov=True, weight_decay=0\)",
        ),
        (lambda it: torch.optim.AdamW(it, 1e-3), r"shoal\.optim\.AdamW\(0\.001, betas=\(0\.9, 0\.999\), eps=1e-08"),
        (lambda it: torch.optim.SGD(it, 0.1, maximize=True), "maximize=True, which the servers cannot do"),
        (lambda it: torch.optim.Adam(it, 0.1, amsgrad=True), "amsgrad=True, which the servers cannot do"),
        (
            lambda it: torch.optim.AdamW([{"params": [each], "weight_decay": at} for at, each in enumerate(it)]),
            r"weight_decay=0, groups=\[shoal\.optim\.VariableGroup",
        ),
        (torch.optim.Rprop, r"torch\.Rprop; give one of shoal\.optim"),
        (lambda _: "adam", r"builtins\.str; give one of shoal\.optim"),
    ],
)
def test_an_optimizer_of_another_library(client: shoal.Client, given: Callable[[Any], Any], said: str) -> None:
    model = network()
    with pytest.raises(errors.InvalidOptimizer, match=said):
        make(client, model, given(model.parameters()))


def test_parameters_in_the_place_of_the_module(client: shoal.Client) -> None:
    with pytest.raises(errors.BadRequest, match=r"give the module itself, such as model, not model\.parameters"):
        make(client, network().parameters())


def test_another_weight_decay(client: shoal.Client) -> None:
    model = network()
    with make(client, model) as it:
        it.param_groups[0]["weight_decay"] = 0.5
        loss_of(model, *batch(0)).backward()
        with pytest.raises(errors.InvalidOptimizer, match=r"weight_decay of a group is 0\.5, and was 0"):
            it.step()
