"""Training, evaluation and prediction of models: `fit`, `evaluate`, `predict`, and their steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal import errors
from shoal_distribute.collectives import ReduceOp
from shoal_distribute.keras.tape import GradientTape
from shoal_distribute.keras.tensor import Tensor
from shoal_distribute.keras.training import loops
from shoal_distribute.keras.training.callback import History
from shoal_distribute.keras.training.class_weights import weighted_by_class
from shoal_distribute.keras.training.data import BatchTuple, arrays_of, divided, samples_of, unpacked
from shoal_distribute.keras.training.penalties import added_up, check_takes_part, gradients_without_samples, share_of
from shoal_distribute.keras.training.sources import source_of, validation_of
from shoal_distribute.keras.training.staged import StagedTrainer
from shoal_distribute.replica_context import current_replica
from shoal_distribute.strategies import get_strategy, has_strategy
from shoal_distribute.values import DistributedVariable, PerReplica
from shoal_worker.arrays import namespace_of

_SMALLEST = 1e-30  # divides nothing by 0: the sum of the weights of a batch may be 0


class Trainer(StagedTrainer):
    """Base class of models: what trains and evaluates them.

    Attributes:
        stop_training: whether `fit` ends after this epoch. Callbacks set it.
        first_epoch: the epoch that `fit` begins with, from 0. Callbacks that restore a model set it.
    """

    built: bool
    is_complete: bool
    trainable_variables: list[DistributedVariable]
    losses: list[Tensor]
    stop_training = False
    first_epoch = 0

    def train_step(self, data: Any) -> None:
        """Takes a step of training with a replica's part of a batch. `fit` passes it to `Strategy.run`.

        Args:
            data: inputs, labels and weights of the samples; the last two may be missing.
        """
        x, y, weights = unpacked(data)
        assert self.optimizer is not None
        before = [metric.snapshot() for metric in self.metrics] if self.strategy.reports_metrics else []
        if samples_of((x,)) == 0:  # the last batch may leave a replica without samples
            check_takes_part(self)  # type: ignore[arg-type]
            self._shared(0.0)
            self._report(before, 0)
            self.optimizer.apply_gradients(gradients_without_samples(self))  # type: ignore[arg-type]
            return
        if self._trained_in_stages(x, y, weights):
            return
        with GradientTape() as tape:
            outputs = self._outputs_of(x, training=True)
            penalty = added_up(self.losses)
            total, divisor = self._loss_parts(y, outputs, weights, penalty)
            loss = total / self._shared(divisor)
            if penalty is not None:
                loss = loss + share_of(penalty, self.strategy)
        # Before the backward pass: strategies may use the group of processes from its beginning to its end.
        self._update_metrics(y, outputs, weights)
        self._report(before, samples_of((x,)))
        self.optimizer.minimize(loss, self.trainable_variables, tape)  # a first batch has made the variables

    def test_step(self, data: Any) -> None:
        """Adds a replica's part of a batch to the loss and the metrics. `evaluate` passes it to `Strategy.run`.

        Args:
            data: as for `train_step`.
        """
        x, y, weights = unpacked(data)
        if samples_of((x,)):
            outputs = self._outputs_of(x, training=False)
            if self.loss is not None:
                self._check_tested_in_stages(x)
                self._loss_parts(y, outputs, weights, added_up(self.losses))
            self._update_metrics(y, outputs, weights)

    def predict_step(self, data: Any) -> Any:
        """Returns the outputs for a replica's part of a batch. `predict` passes it to `Strategy.run`."""
        return self._outputs_of(unpacked(data)[0], training=False)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
    ) -> History:
        """Trains the model. Each step runs `train_step` on all replicas.

        Args:
            x: inputs: an array, a list of arrays, or a data set: an iterable of batches.
            y: labels; None if `x` is a data set.
            batch_size: samples of a step, over all replicas and processes; None means 32. A data set has its own.
            epochs: number of the last epoch.
            verbose: 1 or "auto": a progress bar; 2: a line for each epoch; 0: nothing.
            callbacks: objects of `keras.callbacks` or `shoal.callbacks`: a list, or one.
            validation_split: share of the last samples of arrays that are for validation, without `validation_data`.
            validation_data: (x, y), (x, y, sample_weight), or a data set, to evaluate after each epoch.
            shuffle: whether arrays have another order in each epoch.
            class_weight: weights of the samples by the number of their class; 1 for other classes.
            sample_weight: weights of the samples.
            initial_epoch: epochs that were done before.
            steps_per_epoch: steps of an epoch; None means all batches.
            validation_steps, validation_batch_size: see `steps_per_epoch` and `batch_size`; for validations.
            validation_freq: epochs from one validation to the next.

        Returns:
            The metrics of each epoch.

        Raises:
            BadRequest: the model is not compiled, or has no loss, or `class_weight` comes with weights of samples.
            InvalidData: a batch has fewer samples than there are replicas, or the arrays do not match.
            WrongContext: the model is of another scope, or a `ClusterCoordinator` gives the steps to the workers.
        """
        self._require_ready(training=True)
        self.strategy.check_fit()
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = loops.split_for_validation(x, y, sample_weight, validation_split)
        options: Any = {"shuffle": shuffle, "steps": steps_per_epoch, "class_weight": class_weight}
        batches = source_of(self.strategy, x, y, sample_weight, batch_size, **options)
        self._build_before_run(batches.first_sample)
        plan = loops.FitPlan(epochs, initial_epoch, verbose, loops.listed(callbacks))
        if validation_data is not None:
            size = validation_batch_size or batch_size
            plan.validation = validation_of(self.strategy, validation_data, size, validation_steps)
            plan.validation_every = validation_freq
        return loops.train(self, batches, plan)  # type: ignore[arg-type]

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Returns the loss and the metrics over samples.

        Args:
            x, y, batch_size, verbose, sample_weight: as for `fit`.
            steps: batches; None means all.
            callbacks: as for `fit`.
            return_dict: whether to return a dict by name instead of a list.

        Raises:
            BadRequest: the model is not compiled.
            InvalidData: as for `fit`.
        """
        self._require_ready(training=False)
        batches = source_of(self.strategy, x, y, sample_weight, batch_size, steps=steps)
        self._build_before_run(batches.first_sample)
        found = loops.evaluate(self, batches, verbose, loops.listed(callbacks))  # type: ignore[arg-type]
        return _listed(found, return_dict)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Returns the outputs for all samples, on the host. In several processes, each one computes all of them.

        Args:
            x, batch_size, verbose, callbacks: as for `fit`.
            steps: batches; None means all.
        """
        batches = source_of(self.strategy, x, None, None, batch_size, steps=steps, divides=False)
        self._build_before_run(batches.first_sample)
        return loops.predict(self, batches, verbose, loops.listed(callbacks))  # type: ignore[arg-type]

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Takes a step of training with one batch, which the replicas divide.

        Args:
            x: inputs.
            y: labels.
            sample_weight: weights of the samples.
            class_weight: see `fit`.
            return_dict: whether to return a dict by name instead of a list.

        Returns:
            The loss and the metrics since `reset_metrics`.
        """
        self._require_ready(training=True)
        self._run_on_batch(self.train_step, weighted_by_class((x, y, sample_weight), class_weight))
        return _listed(self.get_metrics_result(), return_dict)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Evaluates one batch, which the replicas divide.

        Args:
            x, y, sample_weight, return_dict: as for `train_on_batch`.

        Returns:
            As for `train_on_batch`.
        """
        self._require_ready(training=False)
        self._run_on_batch(self.test_step, (x, y, sample_weight))
        return _listed(self.get_metrics_result(), return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Returns the outputs for one batch, on the host."""
        return self.predict(given := arrays_of(x), batch_size=samples_of((given,)), verbose=0)

    def _outputs_of(self, x: Any, *, training: bool) -> Any:
        stages = None if training else self.strategy.stages_of(self, x)
        return stages.outputs(x) if stages else self(x, training=training)  # type: ignore[operator] # a layer, too

    def _loss_parts(self, y: Any, outputs: Any, weights: Any, penalty: Tensor | None) -> tuple[Tensor, float]:
        """Returns the sum of the losses and what divides it for the mean. Adds both to the running mean.

        Args:
            y: labels.
            outputs: outputs of the model.
            weights: weights of the samples; None means 1.
            penalty: what regularizers add to the mean; None means nothing.
        """
        if y is None:
            raise errors.InvalidData(f"model {self.name} has a loss, but the data has no labels; give y")
        total, divisor = self._summed_loss(y, outputs, weights)
        shown = (total if penalty is None else total + penalty * divisor).array.astype("float64")
        self._tracker.add(shown, namespace_of(shown).asarray(divisor, "float64"))
        return total, divisor

    def _shared(self, divisor: float) -> float:
        """Returns what divides the loss of each replica, so that the replicas' gradients add up to that of the mean.

        It is the sum of the divisors of all replicas. Where workers of a parameter server are in step, each knows its
        own, and takes those of the others to be the same. All replicas call it.
        """
        replica = current_replica()
        if self.loss is not None and self.loss.reduction == "sum":
            return 1.0
        if replica is not None and replica.num_replicas_in_sync > 1:
            total, joined = replica.all_reduce(ReduceOp.SUM, np.array([divisor, 1.0]))
            divisor = float(total) * replica.num_replicas_in_sync / float(joined)
        return max(divisor, _SMALLEST)

    def _report(self, before: Sequence[Any], samples: int) -> None:
        """Tells the strategy the metrics of this replica's samples in this step, if its job shows them.

        Args:
            before: snapshots of the metrics at the beginning of the step; empty if no job shows them.
            samples: number of the samples.
        """
        if before:
            found = {it.name: it.value_since(sums) for it, sums in zip(self.metrics, before, strict=True)}
            self.strategy.report(found, samples)

    def _run_on_batch(self, step: Callable[[Any], None], batch: BatchTuple) -> None:
        self._build_before_run(None if isinstance(batch[0], PerReplica) else arrays_of(batch[0]))
        self.strategy.run(step, args=(divided(batch, self.strategy),))

    def _build_before_run(self, x: Any) -> None:
        """Makes the variables of a model before the first run: servers and elastic groups need all of them then."""
        if not self.is_complete and x is not None:
            self._outputs_of(x, training=False)

    def _require_ready(self, *, training: bool) -> None:
        self.metrics  # noqa: B018 - raises if the model is not compiled
        if training and self.loss is None:
            raise errors.BadRequest(f"model {self.name} was compiled without a loss; give one, such as loss='mse'")
        if has_strategy() and get_strategy() is not self.strategy:
            current = type(get_strategy()).__name__
            raise errors.WrongContext(
                f"model {self.name} was made outside of the scope of the {current} that is in use; make it within "
                "`with strategy.scope():`"
            )


def _listed(found: dict[str, float], as_dict: bool) -> Any:
    """Returns metrics as a dict, or as Keras does by default: as a list, or one number if there is one."""
    values = list(found.values())
    return found if as_dict else values[0] if len(values) == 1 else values


__all__ = ["Trainer"]
