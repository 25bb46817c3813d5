"""The stage of a process whose variables are on servers: its session, and its variables."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

import shoal
from shoal import errors, optim
from shoal.program import Array
from shoal.variables import Variable
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.pipeline.processes.runner import RankStage
from shoal_distribute.pipeline.processes.variables import RankVariable
from shoal_distribute.pipeline.stage_optimizers import StageGradients
from shoal_distribute.replica_context import Replicated, current_replica
from shoal_distribute.strategies import JobOptimizer, job_variable
from shoal_distribute.values import DistributedVariable
from shoal_worker.arrays import on_host


class ServerStage:
    """The `StageUpdates` of one stage: a session of the stage's job, whose servers apply the optimizer.

    Args:
        open_session: opens the session of the stage's job, with an optimizer and the variables of the stage.
        joins: whether the servers apply the gradients of all replicas in one update.
        in_step: number of replicas whose gradients they join: what a step's divisor is multiplied by.

    Attributes:
        session: the session. None before training, after `close`, and if the stage has no variables.
        is_opened: whether training has begun, so that the values are those of the servers.
        optimizer: the optimizer of the job.
    """

    def __init__(
        self,
        open_session: Callable[[optim.Optimizer, Mapping[str, Variable]], shoal.Session],
        *,
        joins: bool,
        in_step: int,
    ) -> None:
        self._open_session, self._joins, self._in_step = open_session, joins, in_step
        self.session: shoal.Session | None = None
        self.is_opened = False
        self.optimizer = JobOptimizer("stages with servers have", "this strategy", "step")
        self._variables: dict[str, ServerStageVariable] = {}
        self._pulled: Mapping[str, np.ndarray] = {}  # the last values of the servers
        self._is_fresh = False  # whether nothing was pushed since
        self._steps = 0  # of the session, even after its end

    def adopt(self, optimizer: optim.Optimizer) -> None:
        """Takes the optimizer of the job.

        Raises:
            InvalidOptimizer: there is another one, or it limits the norm over all stages.
        """
        if optimizer.clip_norm:
            raise errors.InvalidOptimizer(
                f"the optimizer limits the global norm to {optimizer.clip_norm}, but the servers of a stage know the "
                "gradients of that stage alone; leave out clip_norm (global_clipnorm)"
            )
        self.optimizer.adopt(optimizer)

    @property
    def steps(self) -> int:
        """The number of steps of the session."""
        return self.session.step if self.session else self._steps

    def set_learning_rate(self, learning_rate: float | optim.Schedule) -> None:
        """Sets the learning rate of the job.

        Args:
            learning_rate: a number or a schedule.
        """
        self.optimizer.set_learning_rate(self.session, learning_rate)

    def open(self, variables: Sequence["ServerStageVariable"]) -> None:
        """Opens the session, unless it is open. It waits for the same stage of the other replicas.

        Args:
            variables: the variables of the stage.

        Raises:
            WrongContext: the session is open for other variables.
        """
        if self.is_opened:
            if any(self._variables.get(it.name) is not it for it in variables):
                raise errors.WrongContext(
                    "a second model is trained, but stages with servers train one, whose variables are those of their "
                    "jobs; use another strategy for the second model"
                )
            return
        self._variables = {it.name: it for it in variables}
        described = {
            it.name: job_variable(on_host(it.values[0]), trainable=it.trainable, joins=self._joins) for it in variables
        }
        if described:
            self.session = self._open_session(self.optimizer.at_start(), described)
        self.is_opened = True

    def pull(self) -> None:
        """Gets the values of the stage's variables from the servers."""
        if self.session:
            self._pulled = self.session.pull()
            for name, value in self._pulled.items():
                self._variables[name].take(value)
            self._is_fresh = True

    def refresh(self) -> None:
        """Gets the values of the servers, if the stage has pushed since it got them last."""
        if not self._is_fresh:
            self.pull()

    def update(
        self,
        strategy: Replicated,
        optimizer: optim.Optimizer,
        gradients: Sequence[StageGradients],
        divisor: float = 1.0,
    ) -> None:
        """Pushes the mean of the gradients, which weighs as much as the samples of this replica.

        Args:
            strategy, optimizer, gradients, divisor: see `StageUpdates.update`.
        """
        del strategy
        self.optimizer.check_adopted(optimizer)
        if self.session is None:
            return
        weight = divisor / self._in_step  # that of this replica: servers divide by the weights of all
        found = {it.name: on_host(total) / it.dtype.type(weight) for part in gradients for it, total in part}
        whole = {name: found.get(name) for name, it in self._variables.items() if it.trainable}
        updates = {name: self._update_of(it) for name, it in self._variables.items() if not it.trainable}
        self._is_fresh = False
        self.session.push(whole, updates=updates or None, weight=weight)

    def close(self, error: str) -> None:
        """Ends the session.

        Args:
            error: see `Strategy.close`.
        """
        if session := self.session:
            self._steps, self.session = session.step, None
            session.close(error)

    def _update_of(self, variable: "ServerStageVariable") -> np.ndarray:
        """Returns what a push says of a variable that is not trainable: its value, or what the servers add to it."""
        value = on_host(variable.values[0])
        return value if self._joins else value - self._pulled[variable.name]


class ServerStageVariable(RankVariable):
    """A variable on servers. The process of its stage has the value that it has pulled last.

    Args:
        strategy, name, initial, trainable, ranks: see `RankVariable`.
        servers: pulls the values of the stage of this process.
    """

    def __init__(
        self,
        strategy: Replicated,
        name: str,
        initial: np.ndarray,
        *,
        trainable: bool,
        ranks: RankStage,
        servers: ServerStage,
    ) -> None:
        super().__init__(strategy, name, initial, trainable=trainable, ranks=ranks)
        self._servers = servers

    def place(self, stages: Sequence[int], devices: Sequence[LogicalDevice]) -> None:
        if len(stages) > 1:
            raise errors.InvalidLayer(
                f"variable {self.name} is used in the stages {' and '.join(map(str, stages))}, but each stage has "
                "servers for its own variables alone; choose a cut that leaves all its layers in one stage"
            )
        super().place(stages, devices)

    def take(self, value: np.ndarray) -> None:
        """Sets the value that the servers have."""
        super()._set(value)

    def read(self) -> Array:
        replica = current_replica()
        if not (replica and replica.strategy is self.strategy) and self.is_here:
            self._servers.refresh()
        return super().read()

    def _set(self, value: np.ndarray) -> None:
        if self._servers.is_opened and (self.trainable or current_replica() is None):
            raise errors.WrongContext(
                f"variable {self.name} is on the servers and cannot be assigned after training has begun; assign it "
                "before, or give the strategy restore=CHECKPOINT"
            )
        super()._set(value)


def stage_variables(variables: Sequence[DistributedVariable]) -> list[ServerStageVariable]:
    """Returns those variables of a model whose values are in this process."""
    return [it for it in variables if isinstance(it, ServerStageVariable) and it.is_here]


__all__ = ["ServerStage", "ServerStageVariable", "stage_variables"]
