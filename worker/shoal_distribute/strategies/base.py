"""Strategy: the base class of all strategies, and the surface that they have in common."""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np

from shoal import errors, optim
from shoal._training import failure_of
from shoal.program import Array
from shoal_distribute.collectives import Group, GroupTimings, RankTimes, ReduceOp, TimesBoard
from shoal_distribute.cross_device_ops import CrossDeviceOps
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.group_arrays import gathered
from shoal_distribute.input import InputSurface
from shoal_distribute.replica_context import ReplicaContext, current_replica, entered_strategies, reduce_op_of
from shoal_distribute.resolver import ClusterResolver
from shoal_distribute.strategies.gradients import GradientsAndVariables, checked_gradients
from shoal_distribute.strategies.optimizer_calls import OptimizerCalls
from shoal_distribute.strategies.reduction import arrays_of, joined_along, numbers_of, summed_along, total_of
from shoal_distribute.strategies.replica_threads import ReplicaThreads
from shoal_distribute.strategies.training_hooks import TrainingHooks
from shoal_distribute.tensor_parallel import DeviceMesh, PartGroup, SplitPlace, SplitVariable, group_of_devices
from shoal_distribute.values import DistributedVariable, PerReplica, part_of, rebuilt, regrouped


class Strategy(InputSurface, TrainingHooks, OptimizerCalls):
    """Runs the same code on one or more devices and processes, and keeps the variables of all replicas in step.

        strategy = MirroredStrategy(["/cpu:0", "/cpu:1"])
        with strategy.scope():
            model, optimizer = make_model(), keras.optimizers.SGD(0.1)
        losses = strategy.run(train_step, args=(batch,))
        loss = strategy.reduce(ReduceOp.MEAN, losses, axis=None)

    Args:
        devices: a replica runs on each. If there are several, each replica has a thread of its own.
        ops: how the replicas of this process join their arrays.

    Attributes:
        devices: the devices of this process.
        is_default: whether it is the strategy that is in use outside of any scope.
        first_replica: number of this process's first replica among those of all processes.
        keeps_split_variables: whether layers may split their variables over the devices of one process.
        applies_constraints: whether it applies constraints of variables after updates.
        cluster_resolver: describes the processes; None if nothing lists them.
    """

    devices: tuple[LogicalDevice, ...]
    is_default = False
    keeps_split_variables = False
    applies_constraints = True
    cluster_resolver: ClusterResolver | None = None
    _group: Group | None = None  # of the processes whose values `reduce` and `gather` join

    def __init__(self, devices: Sequence[LogicalDevice], ops: CrossDeviceOps) -> None:
        ops.check(devices)
        self.devices, self._ops = tuple(devices), ops
        self._threads, self._board = ReplicaThreads(self.devices), TimesBoard(0, 1)

    @property
    def local_replicas(self) -> int:
        """The number of replicas in this process."""
        return len(self.devices)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas in all processes."""
        return self.local_replicas

    @property
    def reduced_replicas(self) -> int:
        """The number of replicas whose values `reduce` joins."""
        return self.num_replicas_in_sync

    @property
    def has_results(self) -> bool:
        """Whether this process has the results of all samples of a step, so that nothing is to be reduced."""
        return self.num_replicas_in_sync == 1

    @contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Makes new variables within the block belong to this strategy.

        Raises:
            WrongContext: this thread is in the scope of another strategy, or runs a replica.
        """
        scopes = entered_strategies()
        if scopes and scopes[-1] is not self:
            raise errors.WrongContext(
                f"the scope of a {type(self).__name__} begins within that of a {type(scopes[-1]).__name__}; "
                "leave that one first"
            )
        if (replica := current_replica()) and replica.strategy is not self:
            raise errors.WrongContext("a scope begins within run; enter it before")
        scopes.append(self)
        try:
            yield self
        finally:
            scopes.pop()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None, options: Any = None) -> Any:
        """Calls a function once for each replica of this process, at the same time.

        Args:
            fn: the function. `get_replica_context()` tells it which replica it is.
            args: its arguments. Each replica gets its own value of a `PerReplica`, also within tuples, lists and dicts.
            kwargs: arguments by name, a dict.
            options: accepted for TensorFlow's sake, and ignored.

        Returns:
            What the function returned. With several replicas, the values are in `PerReplica`s.

        Raises:
            WrongContext: a replica calls it.
            RanksDisagree: the replicas make different collective calls.
        """
        del options
        if current_replica() is not None:
            raise errors.WrongContext("run is called within run; call the function itself")
        named = dict(kwargs or {})
        calls = [(part_of(args, number), part_of(named, number)) for number in range(self.local_replicas)]
        return regrouped(self._threads.run(self, fn, calls))

    experimental_run_v2 = run

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Joins the values of all replicas, on the host.

        Args:
            reduce_op: SUM or MEAN.
            value: what `run` returned: arrays or numbers, one for each replica; or a tuple, list or dict of them. A
                boolean counts as 0 or 1.
            axis: an axis of the arrays to reduce as well, such as the batch's. None reduces over replicas only. With
                MEAN, each element counts the same, so that the batches of the replicas may differ in length.

        Returns:
            A NumPy array or number, or the same structure of them.

        Raises:
            BadRequest: the op is unknown, a value is not a number, or SUM is asked of a value that is not `PerReplica`,
                with several replicas.
            InvalidShape: the arrays do not fit together, or have no such axis.
            WrongContext: a replica calls it.
        """
        self._require_cross_replica("reduce", "use get_replica_context().all_reduce")
        op = reduce_op_of(reduce_op)
        if isinstance(value, tuple | list):
            return rebuilt(value, [self.reduce(op, it, axis) for it in value])
        if isinstance(value, dict):
            return {key: self.reduce(op, it, axis) for key, it in value.items()}
        if not isinstance(value, PerReplica) and self.local_replicas > 1 and op is ReduceOp.SUM:
            raise errors.BadRequest(
                f"reduce got one {type(value).__name__} for {self.local_replicas} replicas, whose sum is not defined; "
                "give the result of run, or use ReduceOp.MEAN"
            )
        same = not isinstance(value, PerReplica) and self.local_replicas > 1
        arrays = numbers_of(value)
        if axis is None:
            total, count = total_of(arrays), self.reduced_replicas
            if same:
                total = total * self.local_replicas
            return _number(self._mean_or_sum(op, total, count))
        total, length = summed_along(arrays, axis)
        lengths = self._across(np.array(length, np.int64))
        return _number(self._mean_or_sum(op, total, int(lengths)))

    def gather(self, value: Any, axis: int) -> np.ndarray:
        """Returns the values of all replicas one after the other along an axis, on the host.

        Args:
            value: what `run` returned: arrays of the same shape, apart from this axis.
            axis: the axis.

        Raises:
            InvalidShape: the arrays do not fit together, or have no such axis.
            WrongContext: a replica calls it.
        """
        self._require_cross_replica("gather", "return the value from run, and gather it outside")
        return self._gathered(joined_along(arrays_of(value), axis), axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the values of this process's replicas."""
        return value.values if isinstance(value, PerReplica) else (value,)

    @abstractmethod
    def create_variable(self, name: str, initial: np.ndarray, *, trainable: bool = True) -> DistributedVariable:
        """Makes a variable. Models do so in this strategy's scope.

        Args:
            name: its name. The optimizer's settings select variables by it.
            initial: its initial value, which gives its shape and dtype.
            trainable: whether it gets gradients.

        Returns:
            The variable.
        """

    def create_split_variable(
        self, name: str, initial: np.ndarray, *, trainable: bool = True, place: SplitPlace
    ) -> DistributedVariable:
        """Makes a variable in parts on several devices or ranks. Split layers do so in this strategy's scope.

        Args:
            name: its name.
            initial: its initial value, whole.
            trainable: whether it gets gradients.
            place: the devices or ranks, and the axis that is split.

        Returns:
            The variable.

        Raises:
            WrongContext: this strategy keeps no split variables.
        """
        return SplitVariable(self, name, initial, trainable=trainable, place=place)

    def part_group(self, mesh: DeviceMesh, axis: str) -> PartGroup:
        """Returns what computes the parts of a layer that is made in this strategy's scope.

        Args:
            mesh: the devices or the ranks.
            axis: the axis of the mesh whose devices or ranks share the layer.

        Raises:
            BadRequest: the mesh has no such axis, or several groups along it, or this strategy has no such ranks.
            DeviceUnavailable: there is no such device.
        """
        if any(isinstance(it, int) for it in mesh.devices):
            raise errors.BadRequest(
                f"the mesh of a split layer has ranks, but a {type(self).__name__} splits layers over devices alone; "
                "make the layer in the scope of the MultiWorkerPipelineStrategy that has this mesh, or give a mesh of "
                "devices, such as DeviceMesh({'model': 2}, ['/gpu:0', '/gpu:1'])"
            )
        return group_of_devices([str(it) for it in mesh.only_group(axis)])

    def merge_statistics(self, variables: Sequence[DistributedVariable]) -> None:
        """Sets variables that are not trainable to the mean over all processes, for strategies that have several.

        Args:
            variables: the variables.
        """
        del variables  # one process: the mean of its replicas is computed at each read

    def apply_gradients(self, optimizer: optim.Optimizer, pairs: GradientsAndVariables) -> None:
        """Adds up the gradients of all replicas, and applies the optimizer once. All replicas call it, within `run`.

        Args:
            optimizer: the optimizer. Its state belongs to this object, not to its settings.
            pairs: gradients and their variables, in the same order in all replicas. A pair whose gradient is None is
                left out. An iterator may compute each gradient when it is asked for it: some strategies add up the
                first ones meanwhile.

        Raises:
            WrongContext: the call is not within `run`, or a variable is of another strategy.
            InvalidGradient: there is no gradient, a shape differs from its variable's, or a variable is given twice.
            RanksDisagree: the replicas give gradients of different variables.
        """
        replica = self._own_replica()
        checked = checked_gradients(self, replica, pairs)
        # A mistake in a list is found before any other replica or process gets a part of it.
        variables, arrays = self._collected(replica, checked if isinstance(pairs, Iterator) else iter(list(checked)))
        self._apply(replica, optimizer, variables, arrays)
        if replica.local_replica == 0 and self._group is None:
            self._board.own.steps += 1
            self._board.keep()

    def join(self, replica: ReplicaContext, op: ReduceOp, arrays: list[Array]) -> list[Array]:
        """Returns the sum or the mean of arrays over all replicas of all processes. All replicas call it.

        Args:
            replica: the calling replica.
            op: how the arrays are joined.
            arrays: this replica's arrays, on its device.

        Returns:
            The joined arrays, on the replica's device.
        """
        if self.local_replicas == 1:
            return arrays
        began = time.perf_counter()
        joined = self._ops.all_reduce(replica, op, arrays)
        if replica.local_replica == 0:
            self._times.local_reduce += time.perf_counter() - began
        return joined

    def merged(self, replica: ReplicaContext, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Calls a function for all replicas: see `ReplicaContext.merge_call`.

        Args:
            replica: the calling replica.
            fn: the function.
            args: its arguments, of this replica.
            kwargs: its arguments by name.

        Returns:
            This replica's part of the result.
        """
        given = replica.exchange(f"merge_call of {getattr(fn, '__qualname__', fn)}", (args, kwargs))
        outcome: Any = None
        if replica.local_replica == 0:
            outcome = self._threads.merged(
                lambda: fn(self, *regrouped([it[0] for it in given]), **regrouped([it[1] for it in given]))
            )
        result, error = replica.exchange("the end of merge_call", outcome)[0]
        if error is not None:
            raise error
        return part_of(result, replica.local_replica)

    def close(self, error: str = "") -> None:
        """Ends the replicas' threads, and whatever else the strategy holds. The end of a `with` block does so, too.

        Args:
            error: why the script fails, for the job of a `ParameterServerStrategy`: see `Session.close`. "" means that
                the script has finished its work.
        """
        del error
        self._threads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = failure_of(error)
        try:
            self.close(failure)
        except errors.ShoalError as second:
            if not (error and failure):
                raise
            error.add_note(f"the strategy could not be closed: {second.message}")  # the user needs the first error

    def _collected(
        self, replica: ReplicaContext, gradients: Iterator[tuple[DistributedVariable, Array]]
    ) -> tuple[list[DistributedVariable], list[Array]]:
        """Returns the variables that have gradients, and the arrays that `_apply` gets for them."""
        del replica
        found = list(gradients)
        return [variable for variable, _ in found], [gradient for _, gradient in found]

    @abstractmethod
    def _apply(
        self,
        replica: ReplicaContext,
        optimizer: optim.Optimizer,
        variables: list[DistributedVariable],
        arrays: list[Array],
    ) -> None:
        """Applies the gradients of all replicas. The arrays are those of `_collected`."""

    @property
    def _times(self) -> RankTimes:
        """The times of this process, to which the code that measures a phase adds."""
        return self._group.times if self._group else self._board.own

    def _timings(self) -> GroupTimings:
        return self._group.timings() if self._group else self._board.timings()

    def _across(self, array: np.ndarray) -> np.ndarray:
        """Returns the sum of an array over all processes."""
        return self._group.all_reduce(np.array(array)) if self._group else array

    def _gathered(self, array: np.ndarray, axis: int) -> np.ndarray:
        """Returns the arrays of all processes along an axis."""
        return gathered(self._group, array, axis) if self._group else array

    def _mean_or_sum(self, op: ReduceOp, total: np.ndarray, count: int) -> np.ndarray:
        total = self._across(total)
        return np.asarray(total / count) if op is ReduceOp.MEAN else total

    def _own_replica(self) -> ReplicaContext:
        replica = current_replica()
        if replica is None or replica.strategy is not self:
            raise errors.WrongContext(
                f"gradients are applied outside of the replicas of a {type(self).__name__}; "
                "call apply_gradients in the function that strategy.run runs"
            )
        return replica

    def _require_cross_replica(self, call: str, instead: str) -> None:
        replica = current_replica()
        if replica is not None and replica.strategy is self and not self.is_default:
            raise errors.WrongContext(f"{call} is called within run; {instead}")


def _number(array: np.ndarray) -> Any:
    return array[()] if array.ndim == 0 else array


__all__ = ["Strategy"]
