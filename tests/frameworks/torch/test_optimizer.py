"""`shoal.torch.DistributedOptimizer`: the results of plain PyTorch, its habits, and what it refuses."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
import shoal.torch
from shoal import errors, optim
from shoal.events import MetricsReported
from support.torch_training import (
    alone,
    arrays,
    batch,
    farthest,
    loss_of,
    name,
    network,
    part,
    together,
    trained,
)

STEPS = 50


class TestGradients:
    def test_that_accumulate_or_change_after_the_backward_pass(self, client: shoal.Client) -> None:
        """They were sent during the backward pass, so they are sent again."""

        def doubled(model: nn.Module) -> None:
            for it in model.parameters():
                assert it.grad is not None
                it.grad.mul_(2.0)

        model = network()
        plain = torch.optim.SGD(model.parameters(), 0.1)
        wanted = arrays(alone(model, plain, 5, lambda _: doubled(model)))
        for found in trained(client, optim.SGD(0.1), 5, after_backward=doubled):
            assert farthest(wanted, found) <= 1e-12
        with shoal.torch.DistributedOptimizer(again := network(), optim.SGD(0.1), job=name(), client=client) as it:
            for step in range(5):
                it.zero_grad()
                for _ in range(2):
                    loss_of(again, *batch(step)).backward()
                it.step()
        assert farthest(wanted, arrays(again)) <= 1e-12

    def test_that_add_up_in_a_loop_weigh_as_all_their_samples(self, client: shoal.Client) -> None:
        """The ranges of the data end between steps, too."""
        data = torch.utils.data.TensorDataset(*batch(0), *batch(1))
        model, job, steps = network(), name(), 0
        sizes: dict[str, Any] = {"batch_size": 2, "range_size": 2, "epochs": 2}
        with shoal.torch.DistributedOptimizer(model, optim.SGD(0.1), job=job, client=client, **sizes) as it:
            loader = shoal.torch.DataLoader(data, session=it)
            for epoch in range(2):
                for number, (x, y, _, _) in enumerate(loader):
                    loss_of(model, x, y).backward()
                    if number % 4 == 3:
                        assert it.batch_samples == 8
                        it.step()
                        it.zero_grad()
                        steps += 1
                assert loader.epoch == epoch
        progress = client.job(job).status().progress
        assert (progress.steps, progress.samples, steps) == (2, 16, 2)

    def test_of_a_batch_that_is_left_out_do_not_count(self, client: shoal.Client) -> None:
        model = network()
        data = torch.utils.data.TensorDataset(*batch(0))
        with shoal.torch.DistributedOptimizer(model, optim.SGD(0.1), job=name(), client=client, batch_size=2) as it:
            seen = []
            for number, (x, y) in enumerate(shoal.torch.DataLoader(data, session=it)):
                it.zero_grad()
                loss_of(model, x, y).backward()
                if number != 1:
                    seen.append(it.batch_samples)
                    it.step()
        assert seen == [2, 2, 2]

    def test_have_the_weight_that_is_set_after_the_backward_pass(self, client: shoal.Client) -> None:
        model, job = network(), name()
        with shoal.torch.DistributedOptimizer(model, optim.SGD(0.1), job=job, client=client) as it:
            for size in (5, 6, 7):
                it.zero_grad()
                loss_of(model, *batch(size)).backward()
                it.batch_samples = size
                it.step()
        assert client.job(job).status().progress.samples == 5 + 6 + 7


class TestHabits:
    @pytest.mark.parametrize(
        ("given", "plain", "bound"),
        [
            (optim.Momentum(0.5), lambda it: torch.optim.SGD(it, 0.5, momentum=0.9), 1e-12),
            (optim.AdamW(1e-2), lambda it: torch.optim.AdamW(it, 1e-2), 1e-10),
        ],
        ids=["momentum", "adamw"],
    )
    def test_a_scheduler_counts_from_the_next_step_on(
        self, client: shoal.Client, given: optim.Optimizer, plain: Callable[..., Any], bound: float
    ) -> None:
        def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=STEPS, cycle_momentum=False)

        wanted = network()
        alone_optimizer = plain(wanted.parameters())
        scheduler = scheduler_of(alone_optimizer)
        for step in range(STEPS):
            alone_optimizer.zero_grad()
            loss_of(wanted, *batch(step)).backward()
            alone_optimizer.step()
            scheduler.step()
        job, models = name(), [network() for _ in range(2)]

        def work(rank: int) -> None:
            with shoal.torch.DistributedOptimizer(models[rank], given, job=job, workers=2, client=client) as it:
                own = scheduler_of(it)
                for step in range(STEPS):
                    it.zero_grad()
                    loss_of(models[rank], *part(step, rank)).backward()
                    it.step()
                    own.step()

        together(work)
        for model in models:
            assert farthest(arrays(wanted), arrays(model)) <= bound

    def test_a_rate_that_is_set_after_the_backward_pass_counts_for_this_step(self, client: shoal.Client) -> None:
        model = network()
        before = arrays(model)
        with shoal.torch.DistributedOptimizer(model, optim.SGD(0.5), job=name(), client=client) as it:
            loss_of(model, *batch(0)).backward()
            it.param_groups[0]["lr"] = 0.0
            it.step()
            assert farthest(before, arrays(model)) == 0
            assert it.param_groups[0]["lr"] == 0

    def test_groups_show_the_schedule(self, client: shoal.Client) -> None:
        rates = optim.LinearLR(1.0, steps=4)
        given = optim.SGD(rates, groups=[optim.VariableGroup("*bias", rate=0.5)])
        model = network()
        with shoal.torch.DistributedOptimizer(model, given, job=name(), client=client) as it:
            alone(model, it, 2)
            assert sorted(group["lr"] for group in it.param_groups) == [rates.rate(2) / 2, rates.rate(2)]
            it.param_groups[0]["lr"] = 7.0
            with pytest.raises(errors.InvalidOptimizer, match="by different factors"):
                alone(model, it, 1)

    def test_with_overlap_gradients_may_change_while_they_are_sent(self, client: shoal.Client) -> None:
        model, steps = nn.Linear(1000, 100, bias=False, dtype=torch.float64), 40
        nn.init.zeros_(model.weight)
        options: dict[str, Any] = {"consistency": shoal.Asynchronous(), "overlap": True, "client": client}
        with shoal.torch.DistributedOptimizer(model, optim.SGD(1.0), job=name(), **options) as it:
            assert it.session.overlap
            for step in range(steps):
                (-step * model.weight.sum()).backward()
                it.step()
                it.zero_grad(set_to_none=False)
            it.session.settle()
            it.model_session.pull_into(model)
        assert (model.weight == sum(range(steps))).all()

    def test_a_closure_gives_the_loss(self, client: shoal.Client) -> None:
        model = network()

        def closure() -> torch.Tensor:
            loss = loss_of(model, *batch(0))
            loss.backward()
            return loss

        with shoal.torch.DistributedOptimizer(model, optim.SGD(0.1), job=name(), client=client) as it:
            assert it.step(closure).item() == loss_of(network(), *batch(0)).item()

    def test_a_gradient_in_the_place_of_another_one_is_pushed(self, client: shoal.Client) -> None:
        def clamped(model: nn.Module) -> None:
            for it in model.parameters():
                assert it.grad is not None
                it.grad = it.grad.clamp(-0.01, 0.01)

        wanted, model = network(), network()
        alone(wanted, torch.optim.SGD(wanted.parameters(), 0.1), 3, lambda _: clamped(wanted))
        with shoal.torch.DistributedOptimizer(model, optim.SGD(0.1), job=name(), client=client) as it:
            alone(model, it, 3, lambda _: clamped(model))
        assert farthest(arrays(wanted), arrays(model)) <= 1e-12

    def test_two_modules_with_a_job_each(self, client: shoal.Client) -> None:
        """The backward pass of one also computes gradients of the other, as in generative adversarial networks."""

        def play(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, np.ndarray]:
            torch.manual_seed(0)
            maker, judge = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
            for_maker, for_judge = optimizer_of(maker), optimizer_of(judge)
            for _ in range(4):
                noise = torch.randn(8, 4, dtype=torch.float64)
                for_judge.zero_grad()
                (judge(noise) - judge(maker(noise).detach())).mean().backward()
                for_judge.step()
                for_maker.zero_grad()
                judge(maker(noise)).mean().backward()
                for_maker.step()
            return {**arrays(maker), **{f"judge.{key}": it for key, it in arrays(judge).items()}}

        with ExitStack() as opened:

            def of_shoal(model: nn.Module) -> torch.optim.Optimizer:
                made = shoal.torch.DistributedOptimizer(model, optim.Adam(0.1), job=name(), client=client)
                return opened.enter_context(made)

            found = play(of_shoal)
        assert farthest(play(lambda it: torch.optim.Adam(it.parameters(), 0.1)), found) <= 1e-12

    def test_a_scaler_of_gradients_may_skip_steps(self, client: shoal.Client) -> None:
        """A worker that skips its first batch takes part in the first step with its second one."""
        wanted, job, models = network(), name(), [network() for _ in range(2)]
        plain = torch.optim.SGD(wanted.parameters(), 0.1)
        for step in range(4):
            plain.zero_grad()
            losses = [loss_of(wanted, *part(step + rank, rank)) for rank in range(2)]
            (sum(losses) / 2).backward()
            plain.step()

        def work(worker: int) -> None:
            own, scaler = models[worker], torch.amp.GradScaler("cpu", init_scale=2.0**10)
            with shoal.torch.DistributedOptimizer(own, optim.SGD(0.1), job=job, workers=2, client=client) as it:
                rank = it.session.rank
                for step in range(4 + rank):
                    it.zero_grad()
                    factor = float("inf") if rank and not step else 1.0
                    scaler.scale(loss_of(own, *part(step, rank)) * factor).backward()
                    scaler.step(it)
                    scaler.update()

        together(work)
        for model in models:
            assert farthest(arrays(wanted), arrays(model)) <= 1e-12

    def test_values_that_are_loaded_too_late_are_warned_of(
        self, client: shoal.Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, saved = network(), network().state_dict()
        with shoal.torch.DistributedOptimizer(model, optim.SGD(0.1), job=name(), client=client) as it:
            alone(model, it, 1)
            assert "values of the module were changed" not in caplog.text
            model.load_state_dict(saved)
            alone(model, it, 2)
        assert caplog.text.count("values of the module were changed") == 1
        assert "0.weight" in caplog.text

    def test_a_program_that_ends_after_a_backward_pass_without_a_step(self, client: shoal.Client) -> None:
        script = (
            "import torch, shoal.torch\n"
            "model = torch.nn.Linear(3, 1)\n"
            f"given = {{'job': {name()!r}, 'address': {client.address!r}}}\n"
            "optimizer = shoal.torch.DistributedOptimizer(model, shoal.optim.SGD(0.1), **given)\n"
            "model(torch.ones(3)).backward()\n"
            "raise ValueError('no step')\n"
        )
        ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 1
        assert "ValueError: no step" in ran.stderr

    def test_its_state_goes_into_files_and_back(self, client: shoal.Client) -> None:
        model, job = network(), name()
        with shoal.torch.DistributedOptimizer(model, optim.Adam(0.1), job=job, client=client) as it:
            alone(model, it, 2)
            state = it.state_dict()
            assert state["shoal"] == {"job": job, "step": 2}
            it.load_state_dict(state)
            assert it.param_groups[0]["lr"] == 0.1
            with pytest.raises(errors.InvalidOptimizer, match="give that as optimizer_state"):
                it.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())

    def test_a_loaded_state_does_not_replace_the_schedule_of_the_job(self, client: shoal.Client) -> None:
        def ending(*, loads: bool) -> dict[str, np.ndarray]:
            model = network()
            given = optim.CosineLR(0.1, steps=6)
            with shoal.torch.DistributedOptimizer(model, optim.SGD(given), job=name(), client=client) as it:
                state = it.state_dict()
                alone(model, it, 3)
                if loads:
                    it.load_state_dict(state)
                    assert it.param_groups[0]["lr"] == given.rate(3)
                alone(model, it, 3)
            return arrays(model)

        assert farthest(ending(loads=False), ending(loads=True)) == 0

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_metrics_reach_the_job(self, client: shoal.Client, when: str) -> None:
        model, job = network(), name()
        with shoal.torch.DistributedOptimizer(model, optim.SGD(0.1), job=job, client=client) as it:
            if when == "before":
                it.report(loss=2.5)
            else:  # the backward pass has begun to push, so the next step reports it
                alone(model, it, 1, before=lambda _: it.report(loss=2.5))
            alone(model, it, 1)
        reports = [it for it in client.job(job).events() if isinstance(it, MetricsReported)]
        assert [it.values["loss"] for it in reports if it.values] == [2.5]


def test_the_plain_form_trains_too(client: shoal.Client) -> None:
    model = network()
    wanted = arrays(alone(plain := network(), torch.optim.SGD(plain.parameters(), 0.1), 3))
    job, models = name(), [network() for _ in range(2)]

    def work(rank: int) -> dict[str, np.ndarray]:
        own = models[rank]
        with shoal.torch.session(own, optim.SGD(0.1), job=job, workers=2, client=client) as it:
            for step in range(3):
                it.pull_into(own)
                own.zero_grad()
                loss_of(own, *part(step, it.session.rank)).backward()
                it.push_from(own)
            it.pull_into(own)
        return arrays(own)

    for found in together(work):
        assert farthest(wanted, found) <= 1e-12
    with shoal.torch.session(model, job=name(), client=client) as it, pytest.raises(errors.InvalidVariable):
        it.pull_into(network())
