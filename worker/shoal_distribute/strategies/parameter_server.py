"""ParameterServerStrategy: variables on the servers of a cluster, computation in any number of worker processes."""

import atexit
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import shoal
from shoal import errors, optim
from shoal._system.logs import Log
from shoal._training import failure_at_exit
from shoal.consistency import Asynchronous, Consistency
from shoal.partitioners import Partitioner
from shoal.program import Array
from shoal_distribute.collectives import Group, GroupTimings, ReduceOp
from shoal_distribute.cross_device_ops import CrossDeviceOps, default_cross_device_ops
from shoal_distribute.devices import logical_devices
from shoal_distribute.group_session import GroupSession
from shoal_distribute.replica_context import ReplicaContext
from shoal_distribute.resolver import ClusterResolver, TFConfigClusterResolver
from shoal_distribute.strategies.base import Strategy
from shoal_distribute.strategies.hybrid_group import HybridGroup, open_hybrid_group
from shoal_distribute.strategies.optimizer_calls import JobOptimizer
from shoal_distribute.strategies.process_join import join_processes
from shoal_distribute.strategies.pulled_values import PulledValues
from shoal_distribute.strategies.server_tasks import (
    TrainingTask,
    check_schedulable,
    enter_task,
    resolver_of_cluster,
    script_name,
)
from shoal_distribute.strategies.server_variable import ServerVariable
from shoal_distribute.strategies.step_metrics import StepMetrics
from shoal_distribute.values import DistributedVariable
from shoal_worker.arrays import on_host

_log = Log(__name__)

# Seconds to wait for a coordinator that another task starts, and for one that runs.
_START_S, _RETRY_S = 120.0, 20.0


class ParameterServerStrategy(Strategy):
    """Variables on the servers of a Shoal cluster. Each process that runs the script is a worker.

    Each worker pulls the values, computes gradients on its devices and pushes them. The servers apply the optimizer,
    asynchronously by default. Workers may join late, be slow, or die; the others go on.

        strategy = ParameterServerStrategy(workers=4)      # with the cluster of SHOAL_COORDINATOR, or of `shoal up`
        with strategy.scope():
            model = make_model()
            optimizer = keras.optimizers.SGD(0.1)

    Or the tasks of `TF_CONFIG` form the cluster, and all of them run the same script: a `ps` task becomes a server, and
    never returns from this constructor. The `chief` starts the coordinator, and trains as the `worker` tasks do. The
    servers run until they are stopped.

    Training begins with the first `run` after an optimizer was made in the scope: then a session opens, and the
    variables are placed on the servers. All processes get the values of the first one.
    With `Synchronous`, the gradients of all workers are added, as those of replicas are, and applied once; then
    `num_replicas_in_sync` counts the replicas of all workers, which must have the same number of devices.

    With `group_size=2`, every two workers add up their gradients, and the first one pulls and pushes for both. They
    must make the same variables, and the same calls of `run`, `reduce` and `gather` and reads of variables. If a worker
    dies, the others of its group get `RankLost` with its number, and the other groups go on.

    Args:
        cluster_resolver: describes the tasks that form a cluster. None means those of `TF_CONFIG`, unless a client is
            given or `SHOAL_COORDINATOR` is set.
        variable_partitioner: cuts the trainable variables, so that several servers share one.
        consistency: in which order pushes and pulls happen; by default `Asynchronous()`, as in TensorFlow.
        workers: number of worker processes, unless a resolver describes them; by default, this one alone. Training
            begins when all have opened their sessions.
        job: name of the job, the same for all workers; by default the name of the script.
        client: a client of the cluster; by default one of `SHOAL_COORDINATOR`, or of `shoal up`.
        devices: names of this process's devices, as for `MirroredStrategy`.
        cross_device_ops: how the replicas of one process add up their gradients, as for `MirroredStrategy`.
        group_size: number of workers in a group. Above 1, `TF_CONFIG` or the resolver must list the workers' addresses,
            where they listen for each other; a chief listens at the port after that of its coordinator.
        group: an open group of this worker and others, instead of `group_size`. All groups have the same size.
        options: further options of `shoal.Client.session`, such as `checkpoints`, `restore` and `wire_dtype`.

    Raises:
        BadRequest: `TF_CONFIG` is invalid, or describes no cluster with a chief and servers; or the workers cannot be
            divided into groups.
        DeviceUnavailable: there is no such device.
        RankLost: another worker of the group did not come.
        StartFailed: the chief's coordinator did not start.
        Unreachable: the coordinator did not answer.
    """

    reports_metrics, applies_constraints = True, False
    restores_by = "ParameterServerStrategy(checkpoints=..., restore='auto')"

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        consistency: Consistency | None = None,
        workers: int = 1,
        job: str = "",
        client: shoal.Client | None = None,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        group_size: int = 1,
        group: Group | None = None,
        **options: Any,
    ) -> None:
        found = logical_devices(devices)
        super().__init__(found, cross_device_ops or default_cross_device_ops(found))
        resolver = resolver_of_cluster(cluster_resolver, client)
        self._task, self.cluster_resolver = enter_task(resolver) if resolver else None, resolver or cluster_resolver
        self._partitioner, self._options = variable_partitioner, options
        workers = self._task.workers if self._task else workers
        self._place = HybridGroup.of(group, workers)
        if group_size != 1 and not group:
            self.cluster_resolver = cluster_resolver or TFConfigClusterResolver()
            self._place = open_hybrid_group(self.cluster_resolver, group_size, coordinator=self._task is not None)
        self._group, self._workers = self._place.group, self._place.workers
        self._consistency = consistency or Asynchronous()
        self._job = job or script_name(sys.argv[0] if sys.argv else "")
        self._owned_client = client is None
        address, wait_s = (self._task.coordinator, _START_S) if self._task else (None, _RETRY_S)
        self._client = client or shoal.connect(address, retry_for_s=wait_s)
        if self._task:
            self._take_place(self._task.number)
        self._variables: dict[str, ServerVariable] = {}
        self._optimizer = JobOptimizer("a ParameterServerStrategy has", "this ParameterServerStrategy", "run")
        self._session: shoal.Session | GroupSession | None = None
        self._metrics = StepMetrics()
        self._coordinated = False  # a ClusterCoordinator gives the calls to the workers, and the chief computes nothing
        self._values = PulledValues()
        self._rank, self._steps = 0, 0  # of the session, even after its end
        self._closed = False
        atexit.register(self._close_at_exit)

    @property
    def session(self) -> shoal.Session | None:
        """The session of this worker; None before training begins, and in all workers of a group but the first."""
        return self._session.session if isinstance(self._session, GroupSession) else self._session

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are added: with `Synchronous` those of all workers."""
        return self.local_replicas * self._joined

    @property
    def reduced_replicas(self) -> int:
        return self.local_replicas * self._place.size

    @property
    def input_pipelines(self) -> int:
        return max(1, self._workers - 1) if self._coordinated else self._workers

    @property
    def input_pipeline_id(self) -> int:
        """The number of this worker: that of its task, or else the rank of its session, which it opens."""
        if self._task:
            return max(0, self._task.number - 1) if self._coordinated else self._task.number
        if not (self._session or self._closed) and self._workers > 1:
            if self._optimizer.settings is None:
                raise errors.WrongContext(
                    "a worker gets its number when its session opens, which needs the optimizer; make the optimizer "
                    "within the strategy's scope, before the data are divided"
                )
            self._open()
        return self._rank * self._place.size + (self._group.rank if self._group else 0)

    @property
    def writes_files(self) -> bool:
        if self._coordinated and self._task:
            return self._task.number == 0  # the chief; the first worker has its number among those that read data
        return super().writes_files

    def create_variable(self, name: str, initial: np.ndarray, *, trainable: bool = True) -> DistributedVariable:
        if self._session or self._closed:
            raise errors.WrongContext(
                f"variable {name} is made after training has begun; make all variables before the first run"
            )
        if name in self._variables:
            raise errors.InvalidVariable(f"there is a variable {name} already; give each variable a name of its own")
        made = self._variables[name] = ServerVariable(self, self._values, name, initial, trainable=trainable)
        return made

    def adopt_optimizer(self, optimizer: optim.Optimizer) -> None:
        self._optimizer.adopt(optimizer)

    def coordinate(self) -> TrainingTask | None:
        """Lets a `ClusterCoordinator` give the steps to the workers. The chief then computes none itself.

        Returns:
            The task of this process; None without a resolver.

        Raises:
            BadRequest: the consistency is not `Asynchronous`, the workers are in groups, or no resolver lists them.
            WrongContext: the strategy has a `ClusterCoordinator` already.
        """
        check_schedulable(self._consistency, grouped=self._group is not None)
        if self._task is None and self._workers > 1:
            raise errors.BadRequest(
                f"the strategy has {self._workers} workers, but nothing says where they are; set TF_CONFIG in each "
                "task, or leave out the ClusterCoordinator"
            )
        if self._coordinated:
            raise errors.WrongContext("the strategy has a ClusterCoordinator already; use that one")
        self._coordinated = True
        return self._task

    def check_fit(self) -> None:
        self._require_open()
        if self._coordinated:
            raise errors.WrongContext(
                "fit takes the steps in all tasks itself, but a ClusterCoordinator gives them to the workers; leave it "
                "out, or schedule a function that calls model.train_on_batch"
            )

    def report(self, metrics: Mapping[str, float], samples: int) -> None:
        self._metrics.add(self._own_replica().local_replica, metrics, samples)

    def begin(self) -> None:
        """Opens the session if the optimizer is known. The first `run` does so by itself."""
        if self._optimizer.settings and not (self._session or self._closed):
            self._open()

    def refresh(self) -> None:
        """Makes the next read of a variable get its value from the servers."""
        self._values.forget()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None, options: Any = None) -> Any:
        self.begin()
        self._metrics.clear()
        # In a group, all workers pull: one that has no samples may read nothing.
        self._values.begin_step(pulls=self._group is not None)
        return super().run(fn, args, kwargs, options)

    experimental_run_v2 = run

    def iterations(self, optimizer: optim.Optimizer) -> int:
        self._optimizer.check_adopted(optimizer)
        return self._session.step if self._session else self._steps

    def set_learning_rate(self, optimizer: optim.Optimizer, learning_rate: float | optim.Schedule) -> None:
        self._optimizer.check_adopted(optimizer)
        self._optimizer.set_learning_rate(self._session, learning_rate)

    def optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, np.ndarray]:
        raise self._state_is_on_servers(optimizer)

    def restore_optimizer(self, optimizer: optim.Optimizer, iterations: int, state: dict[str, np.ndarray]) -> None:
        del iterations, state
        raise self._state_is_on_servers(optimizer)

    def timings(self) -> GroupTimings:
        """Returns the times of this worker over the last minute, or by rank those of its group."""
        return self._timings()

    def join(self, replica: ReplicaContext, op: ReduceOp, arrays: list[Array]) -> list[Array]:
        if self._group is None:
            return super().join(replica, op, arrays)
        sums = super().join(replica, ReduceOp.SUM, arrays)
        return join_processes(self._group, replica, op, sums, self.reduced_replicas)

    def close(self, error: str = "") -> None:
        """Ends the session, and so this worker's part of the job. At the end of the process this happens by itself.

        Variables keep their last values, so the model can be evaluated and saved. It cannot be trained further. With
        `Synchronous`, the last values exist when the other workers have taken the step. If that takes more than 60 s,
        this call goes on without them, and reading a variable raises `WrongContext`.
        """
        self._end(error, keeps=not error)

    def _end(self, error: str, *, keeps: bool) -> None:
        atexit.unregister(self._close_at_exit)
        self._closed = True
        session, self._session = self._session, None
        try:
            self._values.close(keeps=keeps)
            if session:
                self._steps = session.step
                session.close(error)
            elif self._group:
                self._group.close()
        finally:
            if self._task:
                self._task.close(self._client, self._job)
            if self._owned_client:
                self._client.close()
            super().close(error)

    def _close_at_exit(self) -> None:
        try:
            self._end(failure_at_exit(), keeps=False)  # nothing reads the values any more
        except errors.ShoalError as error:  # the job's status says how it ended
            _log.warning("could not end the session", job=self._job, reason=error.message)

    def _apply(
        self,
        replica: ReplicaContext,
        optimizer: optim.Optimizer,
        variables: list[DistributedVariable],
        arrays: list[Array],
    ) -> None:
        self._optimizer.check_adopted(optimizer)
        self._require_open()
        if self._session is None:
            raise errors.WrongContext(
                "gradients are applied before the optimizer is known; make it within the strategy's scope"
            )
        joined = super().join(replica, ReduceOp.SUM, arrays)
        replica.exchange("the push", None)  # every replica has read its values
        if replica.local_replica == 0:
            self._push(self._session, dict(zip([it.name for it in variables], map(on_host, joined), strict=True)))
        replica.exchange("the end of apply_gradients", None)

    @property
    def _joined(self) -> int:
        """The number of workers whose gradients are added: those of the group, or of the job in synchronous mode."""
        return self._workers if self._consistency.joins_gradients else self._place.size

    def _push(self, session: shoal.Session | GroupSession, gradients: dict[str, np.ndarray]) -> None:
        if self._joined > 1:  # a group and the servers compute the mean of the workers' gradients; a strategy adds them
            gradients = {name: it * it.dtype.type(self._joined) for name, it in gradients.items()}
        whole = {name: gradients.get(name) for name, it in self._variables.items() if it.trainable}
        weight = 1 if self._joined > 1 else max(self._metrics.samples or 0, 1)  # gradients of a mean: equal weights
        kept, rank = [it for it in self._variables.values() if not it.trainable], self._group.rank if self._group else 0
        if self._consistency.joins_gradients:
            updates = {it.name: it.update(self.local_replicas) for it in kept}
        else:
            updates = {it.name: it.increment(self.local_replicas, self._place.size, rank) for it in kept}
        with self._values.pushing():
            session.push(whole, updates=updates or None, weight=weight, **self._metrics.told(self._group))

    def _open(self) -> None:
        joins = self._consistency.joins_gradients
        variables = {name: it.described(self._partitioner, joins=joins) for name, it in self._variables.items()}
        if not variables:
            raise errors.WrongContext(
                "training begins, but the model has no variables yet; give it an Input, or call build with the shape "
                "of a sample"
            )
        options = {"optimizer": self._optimizer.at_start(), "consistency": self._consistency, **self._options}
        options["workers"] = self._workers // self._place.size
        if self._group is None:
            self._session = self._client.session(self._job, variables=variables, **options)
        else:
            named = {"worker": self._place.member_id(self._job), **options}
            self._session = GroupSession(self._group, self._client, self._job, variables, **named)
        self._values.open(self._session)
        self._rank = self._session.rank
        if not self._task:
            self._take_place(self.input_pipeline_id)

    def _take_place(self, number: int) -> None:
        """Numbers the replicas of this worker, which has this number, among those in sync."""
        in_group = self._group.rank if self._group else 0
        self.first_replica = (number if self._consistency.joins_gradients else in_group) * self.local_replicas

    def _require_open(self) -> None:
        if self._closed:
            raise errors.WrongContext(
                f"the strategy is closed, so this worker's part of job {self._job} has ended; make another "
                "ParameterServerStrategy to train further"
            )

    def _state_is_on_servers(self, optimizer: optim.Optimizer) -> errors.WrongContext:
        self._optimizer.check_adopted(optimizer)
        return errors.WrongContext(
            "the servers have the state of the optimizer; save it with strategy.session.checkpoint(), and continue "
            "with ParameterServerStrategy(restore=...)"
        )


__all__ = ["ParameterServerStrategy"]
