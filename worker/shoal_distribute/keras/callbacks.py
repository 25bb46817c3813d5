"""Callbacks of `fit` by Keras' names. `fit` also takes the callbacks of `shoal.callbacks`, such as TensorBoard."""

import inspect
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from shoal import callbacks, errors, optim
from shoal_distribute.keras.checkpoints import Checkpoint, CheckpointManager
from shoal_distribute.keras.names import Advising, advice
from shoal_distribute.keras.training.callback import VALIDATION, Callback, History, LambdaCallback, Logs
from shoal_distribute.keras.training.event_callback import EventCallback

MonitorMode = Literal["auto", "min", "max"]
# Metrics of which more is better contain one of these.
_RISING = ("acc", "auc", "precision", "recall")
_METRICS = "only metrics are written"


class _Monitoring(Callback, Advising):
    """Base class of callbacks that watch a metric.

    Args:
        monitor: name of the metric.
        mode: whether less ("min") or more ("max") is better; "auto" means by the name.
    """

    def __init__(self, monitor: str, mode: MonitorMode, /) -> None:
        if mode not in {"auto", "min", "max"}:
            raise errors.BadRequest(f"{type(self).__name__}: mode is {mode!r}; it must be 'auto', 'min' or 'max'")
        self.monitor = monitor
        self._has_warned = False
        self._rises = mode == "max" or (mode == "auto" and any(word in monitor for word in _RISING))

    def _value(self, logs: Logs | None) -> float | None:
        """Returns the metric; None if the epoch has none, such as an epoch without validation.

        It warns once of a metric that no epoch can have.
        """
        found = logs or {}
        comes_later = self.params.get("validates") and not any(it.startswith(VALIDATION) for it in found)
        if self.monitor in found or self._has_warned or (comes_later and self.monitor.startswith(VALIDATION)):
            return found.get(self.monitor)
        self._has_warned = True
        lacks = self.monitor.startswith(VALIDATION) and not self.params.get("validates")
        warnings.warn(
            f"{type(self).__name__} does nothing, because no epoch has the metric {self.monitor!r}; "
            + ("give fit validation_data" if lacks else advice(self.monitor, found)),
            stacklevel=2,
        )
        return None

    def _improves(self, value: float, best: float, delta: float = 0.0) -> bool:
        return value - abs(delta) > best if self._rises else value + abs(delta) < best

    @property
    def _worst(self) -> float:
        return -math.inf if self._rises else math.inf


class EarlyStopping(_Monitoring):
    """Stops training when a metric no longer improves.

    Args:
        monitor: name of the metric.
        min_delta: smallest change that counts as an improvement.
        patience: epochs without an improvement after which training stops.
        verbose: whether to write a line.
        mode: "min", "max", or "auto": by the name.
        baseline: value that the first improvement must exceed.
        restore_best_weights: whether to set the variables to those of the best epoch at the end.
        start_from_epoch: epochs that are not counted.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: MonitorMode = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode)
        self._delta, self._patience, self._verbose = min_delta, patience, verbose
        self._baseline, self._restores, self._start = baseline, restore_best_weights, start_from_epoch
        self.stopped_epoch, self.best_epoch = 0, 0
        self.sets_state = restore_best_weights

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - each call has its own
        self.best, self._waited, self._weights = self._worst, 0, list[np.ndarray]()
        self.stopped_epoch = 0

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        value = self._value(logs)
        if value is None or epoch < self._start:
            return
        self._waited += 1
        if not self._weights and self._restores:
            self._weights = self.model.get_weights()
        if self._improves(value, self.best, self._delta):
            self.best, self.best_epoch = value, epoch
            if self._restores:
                self._weights = self.model.get_weights()
            if self._baseline is None or self._improves(value, self._baseline, self._delta):
                self._waited = 0
            return
        if self._waited >= self._patience and epoch > 0:
            self.stopped_epoch, self.model.stop_training = epoch, True

    def on_train_end(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - the epochs have brought them
        if self._restores and self._weights:
            self.model.set_weights(self._weights)
        if self.stopped_epoch and self._verbose:
            sys.stdout.write(f"Epoch {self.stopped_epoch + 1}: early stopping\n")


class ModelCheckpoint(_Monitoring):
    """Writes the model after epochs.

    Args:
        filepath: the file. "{epoch:02d}" and names of metrics are filled in.
        monitor: name of the metric.
        verbose: whether to write a line.
        save_best_only: whether to write only if the metric is better than ever.
        save_weights_only: whether to write the variables alone.
        mode: "min", "max", or "auto": by the name.
        save_freq: must be "epoch".
        initial_value_threshold: the first metric to beat, for `save_best_only`; None means none.

    Raises:
        BadRequest: `save_freq` is another value.
    """

    def __init__(
        self,
        filepath: str | Path,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: MonitorMode = "auto",
        save_freq: str = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__(monitor, mode)
        if save_freq != "epoch":
            raise errors.BadRequest(f"ModelCheckpoint: save_freq is {save_freq!r}; it must be 'epoch'")
        self._path, self._verbose = str(filepath), verbose
        self._best_only, self._weights_only = save_best_only, save_weights_only
        self.best = self._worst if initial_value_threshold is None else initial_value_threshold

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._best_only:
            value = self._value(logs)
            if value is None or not self._improves(value, self.best):
                return
            self.best = value
        path = self._filled_in({"epoch": epoch + 1, **(logs or {})})
        (self.model.save_weights if self._weights_only else self.model.save)(path)
        if self._verbose:
            sys.stdout.write(f"Epoch {epoch + 1}: saving model to {path}\n")

    def _filled_in(self, values: dict[str, float]) -> str:
        """Returns the path of an epoch.

        Raises:
            BadRequest: the path has a name that the epoch has no value for.
        """
        try:
            return self._path.format(**values)
        except KeyError as error:
            name = str(error.args[0])
            raise errors.BadRequest(
                f"ModelCheckpoint: {self._path!r} has {{{name}}}, but no epoch has it; {advice(name, values)}"
            ) from None


class LearningRateScheduler(Callback, Advising):
    """Sets the learning rate at the beginning of each epoch.

    Args:
        schedule: takes the epoch, from 0, and the current rate, or the epoch alone. It returns the rate.
        verbose: whether to write a line.
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        self._takes_rate = len(inspect.signature(schedule).parameters) > 1
        self._schedule, self._verbose = schedule, verbose

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras gives none
        optimizer = self.model.optimizer
        assert optimizer is not None
        rate = self._schedule(epoch, float(optimizer.learning_rate)) if self._takes_rate else self._schedule(epoch)
        optimizer.learning_rate = rate
        if self._verbose:
            sys.stdout.write(f"Epoch {epoch + 1}: LearningRateScheduler setting learning rate to {rate}.\n")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - as in Keras
        if logs is not None and self.model.optimizer:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)


class ReduceLROnPlateau(_Monitoring):
    """Reduces the learning rate when a metric no longer improves. `shoal.optim.ReduceOnPlateau` decides.

    Args:
        monitor: name of the metric.
        factor: factor of the rate, below 1.
        patience: epochs without an improvement after which the rate is reduced.
        verbose: whether to write a line.
        mode: "min", "max", or "auto": by the name.
        min_delta: smallest change that counts as an improvement.
        cooldown: epochs after a reduction that do not count.
        min_lr: smallest rate.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: MonitorMode = "auto",
        min_delta: float = 0.0001,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode)
        # Keras reduces in the epoch in which the patience is used up, PyTorch and Shoal in the next one.
        patience = max(patience - 1, 0)
        self._plateau = optim.ReduceOnPlateau(factor, patience, min_delta, False, cooldown, min_lr)
        self._state, self._verbose = optim.PlateauState(), verbose

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - each call has its own
        self._state = optim.PlateauState()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        value, optimizer = self._value(logs), self.model.optimizer
        if optimizer is None:
            return
        if logs is not None:
            logs["learning_rate"] = float(optimizer.learning_rate)
        if value is None:
            return
        self._state, reduces = self._plateau.after(self._state, value, minimizes=not self._rises)
        if reduces:
            optimizer.learning_rate = self._plateau.reduced(float(optimizer.learning_rate))
            if self._verbose:
                sys.stdout.write(f"Epoch {epoch + 1}: reducing learning rate to {optimizer.learning_rate}.\n")


class TensorBoard(EventCallback, Advising):
    """Writes the metrics of each epoch for TensorBoard: `shoal.callbacks.TensorBoard` as a callback of `fit`.

    Args:
        log_dir: the folder.

    Raises:
        ImportError: tensorboardX is not installed: pip install 'shoal[tensorboard]'.
    """

    refused: ClassVar = dict.fromkeys(("histogram_freq", "profile_batch", "embeddings_freq"), (0, _METRICS)) | {
        "write_graph": (True, "there is no graph"),
        "write_images": (False, _METRICS),
        "write_steps_per_second": (False, _METRICS),
        "update_freq": ("epoch", "metrics are written after each epoch"),
        "embeddings_metadata": (None, _METRICS),
    }

    def __init__(self, log_dir: str | Path = "logs") -> None:
        super().__init__(callbacks.TensorBoard(log_dir))


class BackupAndRestore(Callback, Advising):
    """Keeps a checkpoint of the last epoch, from which `fit` continues when it is called again after a failure.

    Args:
        backup_dir: folder of the checkpoint. It is emptied when training is complete. Several processes need a shared
            folder: the first one writes, and all read.
    """

    sets_state = True

    refused: ClassVar = {
        "save_freq": ("epoch", "it writes after each epoch"),
        "double_checkpoint": (False, "a file that was not finished is never read"),
        "delete_checkpoint": (True, "the files are deleted after training"),
    }

    def __init__(self, backup_dir: str | Path) -> None:
        self._folder = Path(backup_dir)

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - there are none
        self._checkpoint = Checkpoint(model=self.model, optimizer=self.model.optimizer, epoch=0)
        self._manager = CheckpointManager(self._checkpoint, self._folder, 1, "epoch")
        if self._manager.restore_or_initialize():
            self.model.first_epoch = self._checkpoint.epoch
        self._check_epochs(self.model.strategy.of_ranks(self.model.first_epoch))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - the state is written
        self._checkpoint.epoch = epoch + 1
        self._manager.save()

    def on_train_end(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - the state is removed
        if self.model.strategy.writes_files:
            for path in self._manager.checkpoints:
                Path(f"{path}.npz").unlink(missing_ok=True)

    def _check_epochs(self, epochs: list[int]) -> None:
        """Raises RanksDisagree if the processes begin with different epochs."""
        latest = max(epochs)
        if lacking := [rank for rank, epoch in enumerate(epochs) if epoch < latest]:
            named = f"rank {lacking[0]} has" if len(lacking) == 1 else f"ranks {', '.join(map(str, lacking))} have"
            raise errors.RanksDisagree(
                f"{named} no checkpoint of epoch {latest} in its backup_dir, from which rank {epochs.index(latest)} "
                "continues; give all processes a shared folder, or copy the checkpoint to each of them",
                rank=lacking[0],
            )


__all__ = [
    "BackupAndRestore",
    "Callback",
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ReduceLROnPlateau",
    "TensorBoard",
]
