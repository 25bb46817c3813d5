"""Settings of a `Trainer`: the optimizer of Shoal that computes the same, and what cannot be combined with Shoal."""

import math
from collections.abc import Sized
from typing import Any

import torch
import transformers

from shoal import errors, optim

# Steps between which a schedule is linear. A schedule of Shoal has at most 1,000.
_MOST_POINTS = 900
# Options of a session that the `TrainingArguments` have.
_OF_ARGUMENTS = {"batch_size": "per_device_train_batch_size", "epochs": "num_train_epochs"}


def check_trainer(trainer: Any, options: dict[str, Any]) -> None:
    """Checks that a trainer can train in a job.

    Args:
        trainer: what the user gave.
        options: the options of the session.

    Raises:
        BadRequest: it is no `Trainer`, or one of its settings cannot be combined with Shoal.
        InvalidData: its data set has no length, or no samples.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise errors.BadRequest(
            f"the trainer is {type(trainer).__module__}.{type(trainer).__name__}; give a transformers.Trainer"
        )
    for name in _OF_ARGUMENTS.keys() & options.keys():
        raise errors.BadRequest(f"{name} is given; set {_OF_ARGUMENTS[name]} of the TrainingArguments instead")
    args: Any = trainer.args
    refused = {
        "fp16": (args.fp16, "its scaler skips steps that the trainer counts; use bf16"),
        "auto_find_batch_size": (args.auto_find_batch_size, "the job has one batch size; set it"),
        "deepspeed": (trainer.is_deepspeed_enabled, "the servers update the values; leave it out"),
        "fsdp": (trainer.is_fsdp_enabled, "the servers hold the values; leave it out"),
        "dataloader_drop_last": (args.dataloader_drop_last, "each sample is read once in an epoch; leave it out"),
        "train_sampling_strategy": (
            getattr(args, "train_sampling_strategy", "random") != "random",
            "the coordinator leases shuffled samples to the workers; leave it out",
        ),
    }
    for name, (given, advice) in refused.items():
        if given:
            raise errors.BadRequest(f"{name} of the TrainingArguments cannot be combined with Shoal: {advice}")
    if args.world_size > 1:
        raise errors.BadRequest(
            f"this process is one of {args.world_size} of torch.distributed; start each worker of the job as a program "
            "of its own, without torchrun or accelerate launch"
        )
    if trainer.lr_scheduler is not None:
        raise errors.BadRequest(
            "the trainer has a learning rate scheduler of its own; leave it out of `optimizers`, and set "
            "lr_scheduler_type, or give distribute an optimizer with a schedule of shoal.optim"
        )
    check_data(trainer.train_dataset, args)


def check_data(data: Any, args: Any) -> None:
    """Checks that workers can divide the samples of a data set.

    Raises:
        InvalidData: it has no length or no samples, or too few for the last batch of an epoch.
    """
    name = type(data).__name__
    if isinstance(data, torch.utils.data.IterableDataset) or not isinstance(data, Sized):
        raise errors.InvalidData(
            f"the train_dataset is {name}, which has no length, so the workers cannot divide its samples; give one "
            "with __len__ and __getitem__"
        )
    if not len(data):
        raise errors.InvalidData(f"the train_dataset is {name} without samples; give one with some")
    parts = args.gradient_accumulation_steps
    if 0 < (rest := len(data) % (parts * args.train_batch_size)) < parts:
        raise errors.InvalidData(
            f"the last step of an epoch has {rest} samples, fewer than the {parts} of gradient_accumulation_steps; "
            "change the batch size, or remove these samples"
        )


def schedule_of(scheduler: Any, rate: float, steps: int, warmup: int) -> float | optim.Schedule | None:
    """Returns the schedule of Shoal that gives the learning rates of a scheduler of PyTorch.

    It is exact for up to 900 steps. For more, it is linear between 900 steps, which is exact for linear schedules.

    Args:
        scheduler: the scheduler, before its first step.
        rate: the learning rate that the scheduler multiplies.
        steps: number of updates of the job.
        warmup: number of updates of its warm-up, after which its slope changes.

    Returns:
        The schedule, or None if the scheduler depends on more than the step.
    """
    if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) or steps < 1:
        return None
    at = sorted({math.ceil(steps * it / _MOST_POINTS) for it in range(1, _MOST_POINTS + 1)} | {warmup, steps} - {0})
    factors = [[float(factor(step)) for step in (0, *at)] for factor in scheduler.lr_lambdas]
    first = factors[0]
    if any(it != first for it in factors):
        return None
    if set(first) == {first[0]}:
        return rate * first[0]
    rates = tuple(rate * it for it in first)
    return optim.PiecewiseLR(rates[0], boundaries=tuple(at), rates=rates[1:], interpolate=True)


__all__ = ["check_data", "check_trainer", "schedule_of"]
