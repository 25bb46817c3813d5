"""Training of a `Trainer` of Hugging Face in a job, together with the other workers of the job."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from shoal import errors, optim
from shoal._adapters import check_client
from shoal._system.logs import Log
from shoal.client import Client
from shoal.session import Session
from shoal.torch import DistributedOptimizer
from shoal.torch._equivalents import checked_optimizer, converted
from shoal.torch._tensors import BufferRule, named_parameters
from shoal.transformers._checkpoints import restore_of, write_link
from shoal.transformers._data import EpochPlan, TrainerData
from shoal.transformers._rates import JobRates
from shoal.transformers._settings import check_trainer, schedule_of

_log = Log(__name__)


def distribute(
    trainer: transformers.Trainer,
    optimizer: optim.Optimizer | None = None,
    *,
    job: str,
    workers: int = 1,
    address: str | None = None,
    client: Client | None = None,
    buffers: BufferRule = "mean",
    worker: str = "",
    on_error: Literal["leave", "fail"] = "leave",
    **options: Any,
) -> "DistributedTraining":
    """Lets `train` of a trainer be a worker of a job.

        trainer = Trainer(model=model, args=TrainingArguments("out", learning_rate=3e-4), train_dataset=data)
        shoal.transformers.distribute(trainer, job="m", workers=2)
        trainer.train(resume_from_checkpoint=False)

    `train` opens a session, waits until all workers of the job are there, and closes the session at its end. An
    exception is the error of the session. The workers divide the samples of each epoch among themselves.

    Without an optimizer, the servers compute what the trainer's own optimizer, schedule and `max_grad_norm` would: in
    synchronous mode, this is what one process computes on the batches of all workers together, up to rounding.

    When the worker with rank 0 saves, the job takes a checkpoint, and the folder names it (`shoal.json`). Other ranks
    save nothing. `train(resume_from_checkpoint=...)` starts the job from that checkpoint, with the moments and the
    position in the data.

    Args:
        trainer: the trainer.
        optimizer: the optimizer of the job, from `shoal.optim`. Its learning rate and `clip_norm` then replace those of
            the `TrainingArguments`. None means that of the trainer.
        job: name of the job.
        workers: number of workers of the job.
        address: host:port of the coordinator; see `shoal.Client`. Not with a client.
        client: the client to use, which stays open. None opens one.
        buffers: see `shoal.torch.session`.
        worker: see `shoal.Client.session`.
        on_error: see `shoal.Client.session`.
        options: see `shoal.Client.session`. `batch_size` and `epochs` are those of the `TrainingArguments`.

    Returns:
        The callback that the trainer now has.

    Raises:
        BadRequest: a setting of the trainer cannot be combined with Shoal, or there are an address and a client.
        InvalidData: the data set has no length, or no samples.
        InvalidOptimizer: the optimizer is one of another library. The message has its equivalent.
    """
    check_client(address, client)
    checked_optimizer(optimizer)
    check_trainer(trainer, options)
    given = {"address": address, "client": client, "buffers": buffers, "worker": worker, "on_error": on_error}
    training = DistributedTraining(trainer, optimizer, job, workers, {**options, **given})
    trainer.add_callback(training)
    return training


class DistributedTraining(transformers.TrainerCallback):
    """A callback that trains with a job; `distribute` makes it.

    It replaces the methods of the trainer that Transformers documents for this: `get_train_dataloader`,
    `create_optimizer`, `create_scheduler`, and `train` and `get_batch_samples`, which it calls.

    Args:
        trainer: the trainer.
        optimizer: the optimizer of the job. None means that of the trainer.
        job: name of the job.
        workers: number of workers of the job.
        options: options of `shoal.torch.DistributedOptimizer`.

    Raises:
        BadRequest: the trainer belongs to a job already.
    """

    def __init__(
        self, trainer: Any, optimizer: optim.Optimizer | None, job: str, workers: int, options: dict[str, Any]
    ) -> None:
        if any(isinstance(it, DistributedTraining) for it in trainer.callback_handler.callbacks):
            raise errors.BadRequest("distribute was called for this trainer already; call it once")
        self._trainer, self._given, self._job, self._workers = trainer, optimizer, job, workers
        self._options, self._restore = options, ""
        self._own = trainer.optimizer  # that of PyTorch, if the user has given one to the trainer
        self._optimizer: DistributedOptimizer | None = None
        self._follows = False  # whether the optimizer has the schedule, so that the trainer only shows the rates
        self._plan: EpochPlan | None = None
        self._plain = {name: getattr(trainer, name) for name in _REPLACED}
        for name in _REPLACED:
            setattr(trainer, name, getattr(self, f"_{name}"))

    @property
    def optimizer(self) -> DistributedOptimizer:
        """The optimizer of the last call of `train`.

        Raises:
            BadRequest: `train` has not opened the session yet.
        """
        if self._optimizer is None:
            raise errors.BadRequest(
                f"the session of job {self._job} opens when train begins; call trainer.train() first"
            )
        return self._optimizer

    @property
    def session(self) -> Session:
        """The session of the last call of `train`, for example for its `rank` and `log`.

        Raises:
            BadRequest: `train` has not opened it yet.
        """
        return self.optimizer.session

    # What the trainer calls in place of its own methods, in this order.

    def _train(self, resume_from_checkpoint: Any = None, *further: Any, **kwargs: Any) -> Any:
        self._restore = restore_of(resume_from_checkpoint, self._trainer.args.output_dir)
        args, self._optimizer = self._trainer.args, None
        before = {name: getattr(args, name) for name in ("ignore_data_skip", "save_strategy")}
        # The coordinator knows which samples were read, so the trainer must skip none.
        args.ignore_data_skip = True
        try:
            trained = self._plain["train"](resume_from_checkpoint, *further, **kwargs)
        except BaseException as error:
            self._close(error)
            raise
        finally:
            for name, value in before.items():
                setattr(args, name, value)
        self._close()
        return trained

    def _get_train_dataloader(self) -> TrainerData:
        plain, args = self._plain["get_train_dataloader"](), self._trainer.args
        self._plan = EpochPlan.of(len(plain.dataset), args, self._workers, self._options)
        return TrainerData(plain, self._plan, args.gradient_accumulation_steps, lambda: self.optimizer)

    def _create_optimizer(self, _model: Any = None) -> DistributedOptimizer:
        trainer, plan = self._trainer, self._plan
        assert plan is not None
        spec, self._follows = (self._given, True) if self._given else self._converted()
        sizes = {"batch_size": plan.batch_size, "range_size": plan.range_size, "epochs": trainer.state.num_train_epochs}
        restore = {"restore": self._restore} if self._restore else {}
        self._optimizer = DistributedOptimizer(
            trainer.model,
            spec,
            job=self._job,
            workers=self._workers,
            **{**self._options, **sizes, **restore},
        )
        if self.session.rank:
            trainer.args.save_strategy = SaveStrategy.NO
        trainer.accelerator.clip_grad_norm_ = gradient_norm  # the servers clip
        trainer.optimizer = self._optimizer
        return self._optimizer

    def _converted(self) -> tuple[optim.Optimizer, bool]:
        """Returns the trainer's optimizer as one of Shoal, and whether that has the schedule, too."""
        trainer, steps = self._trainer, self._trainer.state.max_steps
        trainer.optimizer = self._own
        names = {it: name for name, it in named_parameters(trainer.model).items()}
        plain = self._plain["create_optimizer"]()
        found = converted(plain, names, clip_norm=trainer.args.max_grad_norm or 0.0)
        trainer.lr_scheduler = None
        scheduler = self._plain["create_scheduler"](steps, optimizer=plain)
        schedule = schedule_of(scheduler, found.rate(0), steps, int(trainer.args.get_warmup_steps(steps)))
        return (found, False) if schedule is None else (dataclasses.replace(found, learning_rate=schedule), True)

    def _create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        trainer.lr_scheduler = JobRates(self.optimizer) if self._follows else None
        return trainer.lr_scheduler or self._plain["create_scheduler"](num_training_steps, *args, **kwargs)

    def _get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, items = self._plain["get_batch_samples"](*args, **kwargs)
        # The loss is the mean of these items, such as tokens, if the trainer counts them.
        self.optimizer.model_session.batch_weight = max(float(items), 1e-9) if items is not None else None
        return batches, items

    # Events.

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Shows the step of the job, which another worker or an earlier run may have begun."""
        state.global_step = self.session.step

    def on_optimizer_step(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Shows the step of the job: the trainer adds 1. A worker without samples has skipped steps."""
        state.global_step = self.session.step - 1

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        """Reports the numbers that the trainer logs as metrics of the next step."""
        if self._optimizer is not None:
            numbers = {name: float(it) for name, it in (logs or {}).items() if isinstance(it, int | float)}
            self._optimizer.report(**numbers)

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Takes a checkpoint of the job, and writes its number into the trainer's checkpoint folder."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        try:
            saved = self.session.checkpoint()
        except errors.StorageFailed as error:
            _log.warning(
                "the job has no checkpoint for this folder, so train cannot resume from it",
                job=self._job,
                folder=str(folder),
                reason=error.message,
            )
            return
        write_link(folder, self._job, saved.number, saved.step)

    def _close(self, error: str | BaseException = "") -> None:
        if self._optimizer is None:
            return
        try:
            self._optimizer.close(error)
        except errors.ShoalError as second:
            if not error:
                raise
            _log.warning("closing the session raised a second error", job=self._job, reason=second.message)


_REPLACED = ("train", "get_train_dataloader", "create_optimizer", "create_scheduler", "get_batch_samples")


def gradient_norm(parameters: Any, _max_norm: float, norm_type: float = 2) -> torch.Tensor:
    """Returns the norm of the gradients of this worker, and changes none, in place of `Accelerator.clip_grad_norm_`."""
    gradients = [it.grad for it in parameters if it.grad is not None]
    return torch.nn.utils.get_total_norm(gradients, norm_type)


__all__ = ["DistributedTraining", "distribute", "gradient_norm"]
