"""Training hooks: what `fit` and other training loops ask of a strategy, or tell it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shoal import errors, optim
from shoal_distribute.values import DistributedVariable


class ModelStages(Protocol):
    """A model that a strategy computes in stages, micro-batch by micro-batch."""

    def outputs(self, x: Any) -> Any:
        """Returns the outputs of the model in evaluation.

        Args:
            x: the inputs of a batch.
        """

    def backward(self, batch: tuple[Any, Any, Any], loss: Callable[..., Any]) -> float:
        """Computes the gradients of a batch, and keeps their sums.

        Args:
            batch: inputs, labels and weights.
            loss: takes the outputs, labels and weights of a micro-batch, and whether it is called again for the same
                one. It returns the sum of the losses, and what divides it for the mean.

        Returns:
            The sum of these divisors.
        """

    def apply(self, optimizer: optim.Optimizer, divisor: float) -> None:
        """Applies an optimizer once to the sums of the gradients.

        Args:
            optimizer: the optimizer.
            divisor: what divides the sums.
        """


class TrainingHooks:
    """The part of a strategy that training loops use.

    Attributes:
        may_grow: whether more processes may join later.
        progress: how far training is, in units of the training loop. Elastic groups of processes share it.
        evaluations: calls of `evaluate` before any training, and after `fit`, that have ended. Elastic groups share it.
        reports_metrics: whether `report` shows the metrics of a step anywhere.
        restores_by: how training continues from a saved state, if the process cannot set it; otherwise "".
    """

    may_grow = False
    progress = 0
    evaluations = 0
    reports_metrics = False
    restores_by = ""

    def check_fit(self) -> None:
        """Checks that `fit` may take steps.

        Raises:
            WrongContext: something else gives the steps to the workers.
        """

    def check_batch(self, samples: int) -> None:
        """Checks that a step can take a batch.

        Args:
            samples: number of its samples.

        Raises:
            InvalidData: it has too few.
        """
        del samples  # most strategies take any batch

    def of_ranks(self, number: int) -> list[int]:
        """Returns a number of each process, by rank. All processes call it.

        An elastic group has only that of this process: the others may be at another place in the script.

        Args:
            number: the number of this process.
        """
        return [number]

    def check_variables(self, variables: Sequence[DistributedVariable]) -> None:
        """Checks that all processes have the same values of trainable variables. All processes call it.

        Args:
            variables: variables of a model. Each process may have other values of those that are not trainable.

        Raises:
            RanksDisagree: a process has other values.
        """
        del variables  # most strategies have one process, or the values of one

    def stages_of(self, model: Any, x: Any, optimizer: optim.Optimizer | None = None) -> ModelStages | None:
        """Returns what computes a model in stages; None if the model computes as a whole.

        Args:
            model: the model.
            x: the inputs of the batch that is to be computed.
            optimizer: what applies its gradients, in training.

        Raises:
            InvalidLayer: the model cannot be cut into the stages of the strategy.
        """
        del model, x, optimizer
        return None

    def share_state(self) -> None:
        """Waits until all processes of an elastic group have the state of one: variables, optimizers and progress.

        `run`, `elastic` and `fit` call it, so all variables and optimizers must be made before.
        """

    def recover(self, error: errors.ShoalError) -> bool:
        """Makes training possible again after a call has failed, if it can; otherwise returns False.

        `progress` then says where training is: variables may be those of another process.
        """
        del error
        return False

    def report(self, metrics: Mapping[str, float], samples: int) -> None:
        """Says the metrics of this step, before its gradients are applied, to a strategy whose job shows them.

        Within `run`, each replica calls it with the same names, or none does.

        Args:
            metrics: means over the samples of this replica, by name.
            samples: number of these samples: the weight in the mean over all replicas.
        """
        del metrics, samples  # without a job, there is nothing that shows them


__all__ = ["ModelStages", "TrainingHooks"]
