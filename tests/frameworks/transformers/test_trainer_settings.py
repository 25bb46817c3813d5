"""Settings that `shoal.transformers.distribute` takes from a trainer, or refuses. No test here trains."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.optimization import get_scheduler

import shoal.transformers
from shoal import consistency, errors, optim
from shoal.torch._equivalents import converted
from shoal.transformers._checkpoints import restore_of, write_link
from shoal.transformers._data import EpochPlan
from shoal.transformers._settings import schedule_of


def arguments(folder: Path, **given: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(str(folder), report_to=[], use_cpu=True, **given)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = torch.nn.LayerNorm(3), torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(self.norm(x)).mean()}


def trainer(folder: Path, *, data: Any = None, optimizers: Any = (None, None), **given: Any) -> Any:
    samples = [{"x": [0.0, 1.0, 2.0]}] * 4 if data is None else data
    args = arguments(folder, **given)
    return transformers.Trainer(model=Model(), args=args, train_dataset=samples, optimizers=optimizers)


def scheduler_of(kind: str, warmup: int, steps: int, **given: Any) -> Any:
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.3)
    return get_scheduler(kind, plain, warmup, steps, scheduler_specific_kwargs=given)


class TestSchedules:
    @pytest.mark.parametrize("warmup", [0, 7])
    @pytest.mark.parametrize(
        "kind", ["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "inverse_sqrt"]
    )
    @pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
    def test_give_the_rates_of_transformers(self, kind: str, warmup: int) -> None:
        scheduler, steps = scheduler_of(kind, warmup, 50), 50
        found = optim.SGD(schedule_of(scheduler, 0.3, steps, warmup) or 0.0)
        for step in range(steps):
            assert found.rate(step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12, abs=1e-15)
            scheduler.step()
        if kind == "constant":
            assert found.learning_rate == 0.3

    @pytest.mark.parametrize(("kind", "bound"), [("linear", 1e-12), ("cosine", 3e-6)])
    def test_of_many_steps_are_interpolated(self, kind: str, bound: float) -> None:
        scheduler, steps = scheduler_of(kind, 101, 100_000), 100_000
        found = optim.SGD(schedule_of(scheduler, 1.0, steps, 101) or 0.0)
        (factor,) = scheduler.lr_lambdas
        assert max(abs(found.rate(step) - factor(step)) for step in range(0, steps, 37)) < bound

    def test_that_depend_on_more_than_the_step_are_left_to_the_trainer(self) -> None:
        assert schedule_of(scheduler_of("reduce_lr_on_plateau", 0, 50), 0.1, 50, 0) is None


class TestOptimizers:
    @staticmethod
    def of(model: Model, optimizer: torch.optim.Optimizer) -> optim.Optimizer:
        return converted(optimizer, {it: name for name, it in model.named_parameters()}, clip_norm=0.5)

    def test_of_the_trainer_have_its_groups(self, tmp_path: Path) -> None:
        its = trainer(tmp_path, learning_rate=0.1, weight_decay=0.2, adam_beta2=0.9)
        found = self.of(its.model, its.create_optimizer())
        assert isinstance(found, optim.AdamW)
        assert (found.learning_rate, found.beta2, found.clip_norm) == (0.1, 0.9, 0.5)
        decays = {name: found.settings_of(name).weight_decay for name, _ in its.model.named_parameters()}
        assert decays == {"norm.weight": 0.0, "norm.bias": 0.0, "head.weight": 0.2, "head.bias": 0.0}

    def test_keep_the_factors_of_groups(self) -> None:
        model = Model()
        groups = [{"params": model.norm.parameters(), "lr": 0.2}, {"params": [model.head.weight]}]
        found = self.of(model, torch.optim.SGD(groups, 0.1, momentum=0.9))
        assert isinstance(found, optim.Momentum)
        factors = {name: found.settings_of(name).rate for name in ("norm.weight", "head.weight")}
        assert factors["norm.weight"] == pytest.approx(2 * factors["head.weight"])

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (lambda it: torch.optim.AdamW(it, amsgrad=True), "AdamW has amsgrad=True"),
            (lambda it: torch.optim.SGD(it, 0.1, maximize=True), "SGD has maximize=True"),
            (lambda it: torch.optim.SGD(it, 0.1, momentum=0.9, dampening=0.1), r"Momentum has dampening=0\.1"),
            (lambda it: torch.optim.Adagrad(it, 0.1, lr_decay=0.1), r"Adagrad has lr_decay=0\.1"),
            (torch.optim.Rprop, "Rprop, which the servers do not have"),
        ],
    )
    def test_with_other_settings_are_refused(self, given: Any, said: str) -> None:
        model = Model()
        with pytest.raises(errors.InvalidOptimizer, match=said):
            self.of(model, given(model.parameters()))

    def test_with_groups_that_differ_in_more_are_refused(self) -> None:
        model = Model()
        groups = [{"params": model.norm.parameters(), "eps": 1e-3}, {"params": model.head.parameters()}]
        with pytest.raises(errors.InvalidOptimizer, match="groups have eps="):
            self.of(model, torch.optim.AdamW(groups))

    def test_adam_with_decoupled_decay_is_adamw(self) -> None:
        model = Model()
        given = torch.optim.Adam(model.parameters(), weight_decay=0.1, decoupled_weight_decay=True)
        assert type(self.of(model, given)) is optim.AdamW


@pytest.mark.parametrize(
    ("options", "range_size", "steps"),
    [
        ({}, 4, 4),  # 13 batches of 4 samples in 13 ranges: 4 at most for each of 4 workers
        ({"range_size": 8}, 8, 4),  # 7 ranges: 2 at most
        ({"consistency": consistency.Asynchronous()}, 4, 13),  # one worker may take all
    ],
)
def test_the_steps_of_an_epoch(tmp_path: Path, options: dict[str, Any], range_size: int, steps: int) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert EpochPlan.of(50, args, 4, options) == EpochPlan(50, 4, range_size, steps)
    with pytest.raises(errors.BadRequest, match="range_size is 6; give a multiple of 4"):
        EpochPlan.of(50, args, 4, {"range_size": 6})


class TestIsRefused:
    @pytest.mark.parametrize(
        ("name", "given", "said"),
        [
            ("fp16", True, "fp16 .* use bf16"),
            ("auto_find_batch_size", True, "auto_find_batch_size .* one batch size"),
            ("dataloader_drop_last", True, "dataloader_drop_last .* read once"),
            ("train_sampling_strategy", "group_by_length", "train_sampling_strategy .* leases shuffled samples"),
        ],
    )
    def test_an_argument_that_cannot_be_combined(self, tmp_path: Path, name: str, given: Any, said: str) -> None:
        its = trainer(tmp_path)
        setattr(its.args, name, given)
        with pytest.raises(errors.BadRequest, match=said):
            shoal.transformers.distribute(its, job="m")

    def test_an_option_that_the_arguments_have(self, tmp_path: Path) -> None:
        for name in ("batch_size", "epochs"):
            with pytest.raises(errors.BadRequest, match=f"{name} is given; set .* of the TrainingArguments"):
                shoal.transformers.distribute(trainer(tmp_path), job="m", **{name: 1})  # type: ignore[arg-type] # by name

    def test_something_else_than_a_trainer_and_a_second_call(self, tmp_path: Path) -> None:
        with pytest.raises(errors.BadRequest, match=r"the trainer is .*Model; give a transformers\.Trainer"):
            shoal.transformers.distribute(Model(), job="m")
        training = shoal.transformers.distribute(its := trainer(tmp_path), job="m")
        with pytest.raises(errors.BadRequest, match="opens when train begins"):
            _ = training.session
        with pytest.raises(errors.BadRequest, match="call it once"):
            shoal.transformers.distribute(its, job="m")

    def test_a_data_set_that_cannot_be_divided(self, tmp_path: Path) -> None:
        class Stream(torch.utils.data.IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(10))

        with pytest.raises(errors.InvalidData, match="Stream, which has no length"):
            shoal.transformers.distribute(trainer(tmp_path, data=Stream(), max_steps=1), job="m")
        with pytest.raises(errors.InvalidData, match="without samples"):
            shoal.transformers.distribute(trainer(tmp_path, data=[]), job="m")
        given = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}
        with pytest.raises(errors.InvalidData, match="has 1 samples, fewer than the 3"):
            shoal.transformers.distribute(trainer(tmp_path, **given), job="m")

    def test_an_optimizer_of_another_library_and_a_scheduler(self, tmp_path: Path) -> None:
        its = trainer(tmp_path)
        plain = torch.optim.AdamW(its.model.parameters(), 1e-3)
        with pytest.raises(errors.InvalidOptimizer, match=r"so give shoal\.optim\.AdamW\(0\.001"):
            shoal.transformers.distribute(its, plain, job="m")
        scheduler = torch.optim.lr_scheduler.ConstantLR(plain)
        with pytest.raises(errors.BadRequest, match="scheduler of its own"):
            shoal.transformers.distribute(trainer(tmp_path, optimizers=(plain, scheduler)), job="m")

    def test_a_folder_that_names_no_checkpoint_of_a_job(self, tmp_path: Path) -> None:
        assert (restore_of(None, str(tmp_path)), restore_of(True, str(tmp_path))) == ("", "")
        for number in (3, 12):
            (tmp_path / f"checkpoint-{number}").mkdir()
        write_link(tmp_path / "checkpoint-12", "m", 4, 12)
        assert restore_of(True, str(tmp_path)) == "m/4"
        training = trainer(tmp_path)
        shoal.transformers.distribute(training, job="m")
        with pytest.raises(errors.BadRequest, match=r"checkpoint-3/shoal\.json does not name a checkpoint"):
            training.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize("package", ["transformers", "accelerate", "torch"])
def test_a_package_that_is_missing_is_named_with_the_extra(package: str) -> None:
    script = f"import sys; sys.modules[{package!r}] = None\nimport shoal\nimport shoal.transformers"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode
    assert f"needs {package}, which cannot be imported" in ran.stderr
    assert "pip install 'shoal[transformers]'" in ran.stderr
