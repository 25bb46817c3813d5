"""Steps of models that a strategy computes in stages."""

from abc import abstractmethod
from typing import Any

from shoal import errors
from shoal_distribute.keras.tensor import Tensor
from shoal_distribute.keras.training.compiled import CompiledTrainer


class StagedTrainer(CompiledTrainer):
    """Base class of `Trainer`: what it does if its strategy computes models in stages."""

    losses: list[Tensor]
    added_losses: list[Tensor]

    def _trained_in_stages(self, x: Any, y: Any, weights: Any) -> bool:
        """Takes a step of training, if the model is in stages. Returns whether it is.

        The stages compute the loss of each micro-batch, divide the sums of the gradients once by the weights of all
        samples, and apply the optimizer.

        Raises:
            WrongContext: a layer of a model in stages has a regularizer, or adds a loss of its own.
        """
        assert self.optimizer is not None
        stages = self.strategy.stages_of(self, x, self.optimizer.spec)
        if stages is None:
            return False
        self._refuse(self.losses)  # before statistics change; what layers add is known only after the step
        divisor = stages.backward((x, y, weights), self._micro_batch_loss)
        self._refuse(self.added_losses)
        stages.apply(self.optimizer.spec, self._shared(divisor))
        return True

    def _check_tested_in_stages(self, x: Any) -> None:
        """Raises WrongContext if a layer of a model in stages has added a loss, which is of one micro-batch alone."""
        if self.added_losses and self.strategy.stages_of(self, x) is not None:
            self._refuse(self.added_losses)

    def _refuse(self, losses: list[Tensor]) -> None:
        if losses:
            raise errors.WrongContext(
                f"{type(self.strategy).__name__} does not add the penalties of regularizers, or losses of `add_loss`, "
                "to the loss of a model in stages; leave them out, or give the optimizer a weight decay in place of "
                "an L2 regularizer"
            )

    def _micro_batch_loss(self, outputs: Any, y: Any, weights: Any, again: bool) -> tuple[Tensor, float]:
        """Returns the sum of the losses of a micro-batch, and what divides it. The first time, it counts in metrics."""
        if again:
            return self._summed_loss(y, outputs, weights)
        self._update_metrics(y, outputs, weights)
        return self._loss_parts(y, outputs, weights, None)

    @abstractmethod
    def _loss_parts(self, y: Any, outputs: Any, weights: Any, penalty: Tensor | None) -> tuple[Tensor, float]:
        """See `Trainer`."""

    @abstractmethod
    def _shared(self, divisor: float) -> float:
        """See `Trainer`."""


__all__ = ["StagedTrainer"]
