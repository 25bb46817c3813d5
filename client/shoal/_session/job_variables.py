"""The variables of a job, as its users see them: where they are, and their values."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from shoal import _tracing, errors
from shoal._rpc import TicketSource
from shoal._session.learning_rate import LearningRateControl
from shoal._status.placement import PlacedRows, placed_rows
from shoal._training import ParameterClient, locate
from shoal._wire import Placement
from shoal.job import Job
from shoal.optim import OptimizerState
from shoal.v1 import job_pb2

T = TypeVar("T")


class JobVariables(LearningRateControl):
    """The part of a job's handle that finds and reads the job's variables; see `LearningRateControl`."""

    def placement(self) -> tuple[PlacedRows, ...]:
        """Returns which rows of each variable are on which server, in the order of the variables.

        Raises:
            UnknownJob: there is no such job, or it was dropped.
            NotPlaced: see `pull`.
        """
        return placed_rows(self._placement())

    def pull(self) -> dict[str, np.ndarray]:
        """Returns the current values of the job's variables. While the job runs, shards may differ by some updates.

        Returns:
            New arrays by name, in the variables' shapes and dtypes.

        Raises:
            UnknownJob: there is no such job, or it was dropped.
            NotPlaced: the job's variables are not on servers yet, or were lost with a server after the job ended.
        """
        return self._read("pull", ParameterClient.pull)

    def optimizer_state(self) -> OptimizerState:
        """Returns the slots of the optimizer, and the number of updates. While the job runs, see `pull`.

        Returns:
            New arrays by slot and variable; see `Session.optimizer_state`.

        Raises:
            UnknownJob, NotPlaced: see `pull`.
        """
        request = job_pb2.GetRequest(job=self.name)
        spec = Job.from_proto(self._coordinator.call(self._coordinator.jobs.Get, request).status.spec)
        return self._read("optimizer state", lambda reader: reader.optimizer_state(spec.optimizer.slots))

    def _read(self, what: str, read: Callable[[ParameterClient], T]) -> T:
        """Reads variables of the job, under the name of a tracing span."""
        with _tracing.root(what, job=self.name):
            try:
                presented = TicketSource.of(self._coordinator, self.name).credentials
                with ParameterClient(
                    self._placement(),
                    refresh=self._placement,
                    locate=partial(locate, self._coordinator),
                    credentials=presented,
                ) as reader:
                    return read(reader)
            except (errors.Unreachable, *errors.SHARDS_LOST):
                self._placement()  # raises NotPlaced if the server is gone, and the values with it
                raise

    def _placement(self) -> Placement:
        request = job_pb2.GetPlacementRequest(job=self.name)
        return Placement.from_proto(self._coordinator.call(self._coordinator.jobs.GetPlacement, request))


__all__ = ["JobVariables"]
