"""Training hooks: what `fit` and other training loops ask of a strategy, or tell it."""

from collections.abc import Mapping

from shoal import errors


class TrainingHooks:
    """The part of a strategy that training loops use.

    Attributes:
        may_grow: whether more processes may join later.
        progress: how far training is, in units of the training loop. Elastic groups of processes share it.
        evaluations: calls of `evaluate` before any training, and after `fit`, that have ended. Elastic groups share it.
        reports_metrics: whether `report` shows the metrics of a step anywhere.
    """

    may_grow = False
    progress = 0
    evaluations = 0
    reports_metrics = False

    def check_fit(self) -> None:
        """Checks that `fit` may take steps.

        Raises:
            WrongContext: something else gives the steps to the workers.
        """

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


__all__ = ["TrainingHooks"]
