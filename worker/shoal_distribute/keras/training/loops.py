"""The loops over epochs and batches. The steps are those of `Trainer`, run by the strategy on all replicas."""

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal import errors
from shoal_distribute.keras.training.callback import VALIDATION, Callback, CallbackList, History, check_callbacks
from shoal_distribute.keras.training.data import split_off
from shoal_distribute.keras.training.event_callback import EventCallback
from shoal_distribute.keras.training.place import EvaluationPlace, FitPlace
from shoal_distribute.keras.training.progress import Progbar
from shoal_distribute.keras.training.sources import BatchSource, is_arrays
from shoal_distribute.keras.training.trained import Trained


@dataclass
class FitPlan:
    """What `fit` is to do.

    Attributes:
        epochs: number of the last epoch.
        initial_epoch: epochs that were done before.
        verbose: 1 or "auto", 2, or 0.
        callbacks: objects of `keras.callbacks` or `shoal.callbacks`.
        validation: batches to evaluate after epochs; None for none.
        validation_every: epochs from one validation to the next.
    """

    epochs: int
    initial_epoch: int = 0
    verbose: Any = "auto"
    callbacks: list[Any] = field(default_factory=list)
    validation: BatchSource | None = None
    validation_every: int = 1


def train(model: Trained, batches: BatchSource, plan: FitPlan) -> History:
    """Trains a model, epoch by epoch.

    Args:
        model: the compiled model.
        batches: the batches of an epoch.
        plan: what to do.

    Returns:
        The metrics of each epoch.

    Raises:
        BadRequest: `validation_every` is less than 1.
    """
    if plan.validation_every < 1:
        raise errors.BadRequest(f"validation_freq is {plan.validation_every}; give 1 or more epochs")
    if batches.smallest is not None:
        model.strategy.check_batch(batches.smallest)
    history, verbose = History(), level(plan.verbose)
    params = {
        "epochs": plan.epochs,
        "steps": batches.steps,
        "verbose": verbose,
        "validates": plan.validation is not None,
    }
    # The history is the last one: it has what callbacks add to the metrics, such as the learning rate.
    calls = CallbackList([*map(_callback, plan.callbacks), history], model, params)
    check_callbacks(calls.callbacks, model.strategy)
    model.stop_training, model.first_epoch = False, plan.initial_epoch
    logs: dict[str, float] = {}
    calls.call("on_train_begin", {})
    place = FitPlace(model.strategy, model.first_epoch)
    model.strategy.check_variables([*model.trainable_variables, *model.non_trainable_variables])
    while not (place.is_over or model.stop_training) and (epoch := place.epoch) < plan.epochs:
        if verbose:
            sys.stdout.write(f"Epoch {epoch + 1}/{plan.epochs}\n")
        bar = Progbar(batches.steps, verbose)
        calls.call("on_epoch_begin", epoch, {})
        logs = _Epoch(model, batches, plan, calls, bar, place).run()
        bar.update(place.step, logs, finished=True)
        calls.call("on_epoch_end", epoch, dict(logs))
        place.end_epoch(epoch)
    place.end()
    calls.call("on_train_end", dict(logs))
    return history


def evaluate(model: Trained, batches: BatchSource, verbose: Any, callbacks: list[Any]) -> dict[str, float]:
    """Returns the metrics of a model by name.

    Before any training and after `fit`, an elastic group goes on after a failure: it begins the evaluation again.

    Args:
        model: the compiled model.
        batches: the batches.
        verbose: see `FitPlan`.
        callbacks: see `FitPlan`.

    Returns:
        The metrics. They are those of this process alone if the other processes have ended this evaluation.
    """
    shown = level(verbose)
    params = {"epochs": 1, "steps": batches.steps, "verbose": shown}
    calls = CallbackList(map(_callback, callbacks), model, params)
    place = EvaluationPlace(model.strategy)
    while not place.is_over:
        try:
            found = _evaluated(model, batches, calls, Progbar(batches.steps, shown))
        except errors.RankLost as error:
            if not (place.is_known and batches.can_resume and model.strategy.recover(error)):
                raise
            batches.renew()
        else:
            place.end()
            return found
    return _local_results(model)


def predict(model: Trained, batches: BatchSource, verbose: Any, callbacks: list[Any]) -> Any:
    """Returns the outputs of a model for all samples, on the host.

    Args:
        model: the model.
        batches: the batches.
        verbose: see `FitPlan`.
        callbacks: see `FitPlan`.

    Raises:
        InvalidData: there is no batch.
    """
    shown, strategy = level(verbose), model.strategy
    bar = Progbar(batches.steps, shown)
    calls = CallbackList(map(_callback, callbacks), model, {"steps": batches.steps, "verbose": shown})
    calls.call("on_predict_begin", {})
    found: list[list[np.ndarray]] = []
    several, steps = False, 0
    for steps, batch in enumerate(batches, 1):
        outputs = strategy.run(model.predict_step, args=(batch,))
        several = isinstance(outputs, list)
        for output in outputs if several else [outputs]:
            parts = strategy.experimental_local_results(output)
            found.append([np.asarray(part) for part in parts if len(part)])
        if bar.is_due():
            bar.update(steps, {})
    bar.update(steps, {}, finished=True)
    calls.call("on_predict_end", {})
    if not found:
        raise errors.InvalidData("predict got no batch; give samples")
    count = len(found) // steps  # of outputs
    joined = [np.concatenate([part for parts in found[number::count] for part in parts]) for number in range(count)]
    return joined if several else joined[0]


def split_for_validation(x: Any, y: Any, sample_weight: Any, share: float) -> tuple[list[Any], tuple[Any, ...]]:
    """Returns arrays without their last samples, and these samples.

    Args:
        x: inputs.
        y: labels.
        sample_weight: weights of the samples.
        share: share of the samples to split off.

    Raises:
        BadRequest: the inputs are a data set.
    """
    if not is_arrays(x):
        raise errors.BadRequest(
            f"validation_split needs arrays, but x is a {type(x).__name__}; give validation_data instead"
        )
    kept, held_out = split_off([x, y, sample_weight], share)
    return kept, tuple(held_out)


def listed(callbacks: Any) -> list[Any]:
    """Returns the callbacks that `fit` gets: a list, or one."""
    if callbacks is None:
        return []
    return [callbacks] if isinstance(callbacks, Callback) or callable(callbacks) else list(callbacks)


def level(verbose: Any) -> int:
    """Returns how much to show: 0, 1 or 2."""
    return 1 if verbose == "auto" else int(verbose)


@dataclass
class _Epoch:
    """An epoch of training: its steps, and its end. After the loss of a process, both go on from where training is.

    Attributes:
        model, batches, plan, calls, bar: see `train`.
        place: the next step.
        sums: the sums of the metrics after the last step.
    """

    model: Trained
    batches: BatchSource
    plan: FitPlan
    calls: CallbackList
    bar: Progbar
    place: FitPlace
    sums: list[Any] = field(default_factory=list)

    def run(self) -> dict[str, float]:
        """Returns the metrics of the epoch."""
        self.model.reset_metrics()
        epoch = self.place.epoch
        self._keep()
        while not self.place.is_over and self.place.epoch == epoch:
            try:
                self._take_steps(epoch)
                return self._end(epoch)
            except errors.RankLost as error:
                self._recover(error)
        return _local_results(self.model)  # the other processes have ended this epoch

    def _take_steps(self, epoch: int) -> None:
        for batch in self.batches.of_epoch(epoch, self.place.step):
            step = self.place.step
            self.calls.call("on_train_batch_begin", step, {})
            self.model.strategy.run(self.model.train_step, args=(batch,))
            self.place.end_step()
            self._keep()
            due = self.bar.is_due()
            logs = _local_results(self.model) if due or self.calls.wants_batches else {}
            if due:
                self.bar.update(step + 1, logs)
            self.calls.call("on_train_batch_end", step, logs)

    def _end(self, epoch: int) -> dict[str, float]:
        """Returns the metrics of the epoch and of its validation."""
        model, plan = self.model, self.plan
        model.strategy.merge_statistics(model.non_trainable_variables)
        logs = model.get_metrics_result()
        if plan.validation is not None and (epoch + 1) % plan.validation_every == 0:
            found = _evaluated(model, plan.validation, self.calls, Progbar(None, 0))
            logs |= {f"{VALIDATION}{name}": value for name, value in found.items()}
        return logs

    def _keep(self) -> None:
        """Keeps the sums of the metrics: a step that is repeated must not count twice."""
        if self.model.strategy.may_grow:
            self.sums = [metric.snapshot() for metric in self.model.metrics]

    def _recover(self, error: errors.RankLost) -> None:
        """Goes on with the processes that are left, or raises the error."""
        sources = [self.batches, *([self.plan.validation] if self.plan.validation else [])]
        if not (all(it.can_resume for it in sources) and self.model.strategy.recover(error)):
            raise error
        for metric, sums in zip(self.model.metrics, self.sums, strict=True):
            metric.restore_snapshot(sums)
        for source in sources:
            source.renew()


def _evaluated(model: Trained, batches: BatchSource, calls: CallbackList, bar: Progbar) -> dict[str, float]:
    model.reset_metrics()
    calls.call("on_test_begin", {})
    step = 0
    for step, batch in enumerate(batches, 1):
        calls.call("on_test_batch_begin", step - 1, {})
        model.strategy.run(model.test_step, args=(batch,))
        if bar.is_due():
            bar.update(step, _local_results(model))
        calls.call("on_test_batch_end", step - 1, {})
    found = model.get_metrics_result()
    bar.update(step, found, finished=True)
    calls.call("on_test_end", dict(found))
    return found


def _local_results(model: Trained) -> dict[str, float]:
    """Returns the metrics of this process alone: other processes may be at another step."""
    return {metric.name: float(metric.local_result()) for metric in model.metrics}


def _callback(given: Any) -> Callback:
    if isinstance(given, type):
        raise errors.BadRequest(f"callbacks has the class {given.__name__}; give an object, such as {given.__name__}()")
    return given if isinstance(given, Callback) else EventCallback(given)


__all__ = ["FitPlan", "evaluate", "level", "listed", "predict", "split_for_validation", "train"]
