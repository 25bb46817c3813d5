"""Variables of a strategy whose values are on servers."""

from typing import Protocol

import numpy as np

from shoal.partitioners import Partitioner
from shoal.program import Array
from shoal.variables import Variable
from shoal_distribute.replica_context import Replicated, current_replica
from shoal_distribute.values import DistributedVariable


class VariableValues(Protocol):
    """The values of the variables of a strategy, as this process sees them."""

    def of(self, variable: "ServerVariable", replica: int | None) -> np.ndarray:
        """Returns the value of a variable on the host, as a replica of this process sees it.

        Args:
            variable: the variable.
            replica: number of the replica; None outside of `run`.
        """

    def assign(self, variable: "ServerVariable", value: np.ndarray, replica: int | None) -> None:
        """Sets an initial value, or the value that a replica has computed for the next push.

        Args:
            variable: the variable.
            value: the value, in its shape and dtype.
            replica: number of the replica; None outside of `run`.
        """


class ServerVariable(DistributedVariable):
    """A variable on the servers. Until training begins, its initial value is in this process.

    Args:
        strategy, name, initial, trainable: see `DistributedVariable`.
        found: gives its value.
    """

    def __init__(
        self, strategy: Replicated, found: VariableValues, name: str, initial: np.ndarray, *, trainable: bool
    ) -> None:
        super().__init__(strategy, name, initial, trainable=trainable)
        self._found = found
        self.initial = np.array(initial)

    def described(self, partitioner: Partitioner | None, *, joins: bool) -> Variable:
        """Returns the variable of the job.

        Args:
            partitioner, joins: see `job_variable`.
        """
        return job_variable(self.initial, trainable=self.trainable, joins=joins, partitioner=partitioner)

    def update(self, replicas: int) -> np.ndarray:
        """Returns the mean of the values that the replicas of this process see.

        Args:
            replicas: number of these replicas.
        """
        return self._mean(replicas).astype(self.dtype)

    def increment(self, replicas: int, workers: int, rank: int) -> np.ndarray:
        """Returns what this process adds to the value, for workers that push at different times.

        If they pushed values instead, these would replace each other, and a moving average would include the steps of
        one worker only. TensorFlow adds increments, too.

        Args:
            replicas: number of replicas of this process.
            workers: number of workers in a group, whose increments are added.
            rank: rank of this worker in its group.
        """
        added: np.ndarray = self._mean(replicas) - self._found.of(self, None)
        if self.dtype.kind == "f":
            added = added / workers
        elif rank > 0:
            added = np.zeros_like(added)  # parts of integers would be cut off
        return added.astype(self.dtype)

    def _mean(self, replicas: int) -> np.ndarray:
        return np.asarray(np.mean([self._found.of(self, number) for number in range(replicas)], axis=0))

    @property
    def values(self) -> tuple[Array, ...]:
        return (self.read(),)

    def read(self) -> Array:
        replica = current_replica()
        if replica is None or replica.strategy is not self.strategy:
            return self._found.of(self, None)
        return replica.device.put(self._found.of(self, replica.local_replica))

    def _set(self, value: np.ndarray) -> None:
        replica = current_replica()
        number = replica.local_replica if replica and replica.strategy is self.strategy else None
        self._found.assign(self, np.array(value, self.dtype), number)


def job_variable(
    initial: np.ndarray, *, trainable: bool, joins: bool, partitioner: Partitioner | None = None
) -> Variable:
    """Returns the variable of a job.

    Args:
        initial: its initial value.
        trainable: whether it gets gradients.
        joins: whether the pushes of all workers in a step are joined. Else, if it is not trainable, they are
            increments, which the servers add.
        partitioner: cuts the variable if it is trainable.
    """
    if trainable:
        return Variable.of(initial, partitioner=partitioner)
    return Variable.of(
        initial, trainable=False, aggregation=("mean" if initial.dtype.kind == "f" else "last") if joins else "sum"
    )


__all__ = ["ServerVariable", "VariableValues", "job_variable"]
