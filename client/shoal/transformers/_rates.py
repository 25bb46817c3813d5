"""Learning rates of a job in the form of a scheduler, for a `Trainer` that shows them."""

from typing import Any

from shoal.torch import DistributedOptimizer


class JobRates:
    """The learning rates of the schedule that the servers follow. Steps of this object change nothing there.

    Args:
        optimizer: the optimizer of the job.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        self._rates = self._present()

    def step(self, *_: Any) -> None:
        """Takes the rates of the next update."""
        self._rates = self._present()

    def get_last_lr(self) -> list[float]:
        """Returns the rate of each group of parameters in the last update."""
        return self._rates

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing to store: the job has the state."""
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        """Ignores a stored state."""

    def _present(self) -> list[float]:
        return [group["lr"] for group in self._optimizer.param_groups]


__all__ = ["JobRates"]
