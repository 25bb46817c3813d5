"""ParameterServerPipelineStrategy: stages in several processes, whose variables are on the servers of a cluster."""

import atexit
import sys
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

import shoal
from shoal import errors, optim
from shoal._system import check_type
from shoal._system.logs import Log
from shoal._training import check_options, failure_at_exit
from shoal.consistency import Asynchronous, Consistency
from shoal.variables import Variable
from shoal_distribute.collectives import Group
from shoal_distribute.pipeline.model_stages import PipelinedModel
from shoal_distribute.pipeline.processes.server_stage import ServerStage, ServerStageVariable, stage_variables
from shoal_distribute.pipeline.processes.strategy import MultiWorkerPipelineStrategy
from shoal_distribute.resolver import ClusterResolver, TFConfigClusterResolver, ranked_tasks
from shoal_distribute.strategies import (
    TrainingTask,
    enter_task,
    open_hybrid_group,
    resolver_of_cluster,
    script_name,
)
from shoal_distribute.tensor_parallel import RankMesh, SplitPlace, SplitVariable
from shoal_distribute.values import DistributedVariable

_log = Log(__name__)

# Seconds to wait for a coordinator that another task starts, and for one that runs.
_START_S, _RETRY_S = 120.0, 20.0


class ParameterServerPipelineStrategy(MultiWorkerPipelineStrategy):
    """One model in stages, each in a process of its own. Replicas of the pipeline push to the servers of a cluster.

    Each stage has a job of its own, with the variables of that stage. The processes that compute it, one for each
    replica, are the workers of this job: they pull its variables and push their gradients. So servers apply the
    optimizer in any consistency mode, as those of a `ParameterServerStrategy` do. The jobs are called JOB-stage-0,
    JOB-stage-1 and so on.

        strategy = ParameterServerPipelineStrategy(stages=2, replicas=4, cut=["conv8"])
        with strategy.scope():
            model = make_model()
            model.compile("adam", "mse")
        model.fit(x, y, batch_size=64)

    The processes of one replica pass activations to each other. Replicas share only the servers: they may be slow, join
    late, or end, and the others go on as the consistency mode allows. If a process ends, the others of its replica get
    `RankLost`. Start the processes of this replica again.

    `TF_CONFIG` or a resolver lists all processes that train: the stages of a replica follow each other. It may also
    list `ps` tasks and a chief, as for `ParameterServerStrategy`. Without it, give each process the number of its
    replica, and the coordinator brings the stages of each replica together.

    Args:
        stages: number of stages.
        replicas: number of replicas of the pipeline.
        cluster_resolver: describes the tasks. None means those of `TF_CONFIG`.
        replica: number of this process's replica, if no resolver lists the processes.
        consistency: in which order pushes and pulls happen; by default `Asynchronous()`.
        job: what the names of the jobs begin with, the same for all processes; by default the name of the script.
        client: a client of the cluster; by default one of `SHOAL_COORDINATOR`, or of `shoal up`.
        device: see `MultiWorkerPipelineStrategy`.
        micro_batches: see `MultiWorkerPipelineStrategy`.
        schedule: see `PipelineStrategy`.
        recompute: see `PipelineStrategy`.
        cut: see `PipelineStrategy`. Several replicas need one, and so does `restore`: a measured cut could be
            another one than that of the other replicas, or of the checkpoint.
        memory_limit: see `PipelineStrategy`.
        carry_residuals: see `PipelineStrategy`.
        group: an open group of the stages of this replica, instead of a resolver. It needs `replica`.
        options: further options of `shoal.Client.session`, such as `checkpoints`, `restore` and `wire_dtype`. They are
            those of each job.

    Attributes:
        mesh: the processes by "replica" and "stage".
        rank: number of this process.
        stage: the stage of this process.

    Raises:
        BadRequest: an argument or `TF_CONFIG` is invalid, or the number of processes is not stages * replicas.
        TypeError: sessions have no such option.
        DeviceUnavailable: there is no such device.
        RankLost: another process of the replica did not come.
        StartFailed: the chief's coordinator did not start.
        Unreachable: the coordinator did not answer.
    """

    applies_constraints = keeps_split_variables = False
    restores_by = "ParameterServerPipelineStrategy(checkpoints=..., restore='auto')"
    _after_loss = "start the processes of this replica again"

    def __init__(
        self,
        stages: int,
        replicas: int = 1,
        cluster_resolver: ClusterResolver | None = None,
        *,
        replica: int | None = None,
        consistency: Consistency | None = None,
        job: str = "",
        client: shoal.Client | None = None,
        device: str | None = None,
        micro_batches: int = 8,
        schedule: str = "1f1b",
        recompute: bool = False,
        cut: Sequence[str | int] | None = None,
        memory_limit: int | Sequence[int] | None = None,
        carry_residuals: bool = True,
        group: Group | None = None,
        **options: Any,
    ) -> None:
        mesh = RankMesh(stages, replicas)
        check_options(options)
        self._consistency, self._options = consistency or Asynchronous(), options
        check_type("consistency", self._consistency, Consistency, "a consistency mode, such as shoal.Synchronous()")
        _check_cut(cut, stages, replicas, restores=bool(options.get("restore")))
        self._job = job or script_name(sys.argv[0] if sys.argv else "")
        self._task = enter_task(resolver) if (resolver := resolver_of_cluster(cluster_resolver, client)) else None
        self._owned_client = client is None
        address, wait_s = (self._task.coordinator, _START_S) if self._task else (None, _RETRY_S)
        self._client = client or shoal.connect(address, retry_for_s=wait_s)
        try:
            found = (group, replica, resolver) if group else _line(mesh, cluster_resolver, self._task, replica)
            line, own, self.cluster_resolver = found
            number = _checked_replica(own, replicas)
            super().__init__(
                stages,
                device=device,
                micro_batches=micro_batches,
                schedule=schedule,
                recompute=recompute,
                cut=cut,
                memory_limit=memory_limit,
                carry_residuals=carry_residuals,
                coordinator=None if line else self._client.address,
                group_name=f"{self._job}-replica-{number}",
                group=line,
            )
        except BaseException:
            if self._owned_client:
                self._client.close()
            raise
        joins = self._consistency.joins_gradients
        self.mesh, self._replica, self.rank = mesh, number, number * stages + self.stage
        self._world.name_ranks({it: mesh.described(number * stages + it) for it in range(stages)})
        self.first_replica = number if joins else 0
        self._updates = self._servers = ServerStage(self._open_session, joins=joins, in_step=self.num_replicas_in_sync)
        atexit.unregister(self.close)
        atexit.register(self._close_at_exit)

    @property
    def session(self) -> shoal.Session | None:
        """The session of this process, in the job of its stage. None before training, or without variables."""
        return self._servers.session

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are joined: with `Synchronous` all, otherwise 1."""
        return self.mesh.length("replica") if self._consistency.joins_gradients else 1

    @property
    def reduced_replicas(self) -> int:
        return 1

    @property
    def input_pipeline_id(self) -> int:
        return self._replica

    def create_variable(self, name: str, initial: np.ndarray, *, trainable: bool = True) -> DistributedVariable:
        if self._servers.is_opened:
            raise errors.WrongContext(
                f"variable {name} is made after training has begun; make all variables before the first step"
            )
        values = self._world.broadcast(np.array(initial, order="C"))
        return ServerStageVariable(self, name, values, trainable=trainable, ranks=self._ranks, servers=self._servers)

    def create_split_variable(
        self, name: str, initial: np.ndarray, *, trainable: bool = True, place: SplitPlace
    ) -> DistributedVariable:
        return SplitVariable(self, name, initial, trainable=trainable, place=place)

    def adopt_optimizer(self, optimizer: optim.Optimizer) -> None:
        self._servers.adopt(optimizer)

    def stages_of(self, model: Any, x: Any, optimizer: optim.Optimizer | None = None) -> PipelinedModel | None:
        found = super().stages_of(model, x, optimizer)
        if found is not None:
            if optimizer is not None:
                self._servers.optimizer.check_adopted(optimizer)
                self._servers.open(stage_variables(model.weights))
            self._servers.pull()
        return found

    def iterations(self, optimizer: optim.Optimizer) -> int:
        self._servers.optimizer.check_adopted(optimizer)
        return self._servers.steps

    def set_learning_rate(self, optimizer: optim.Optimizer, learning_rate: float | optim.Schedule) -> None:
        self._servers.optimizer.check_adopted(optimizer)
        self._servers.set_learning_rate(learning_rate)

    def optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, np.ndarray]:
        raise self._state_is_on_servers(optimizer)

    def restore_optimizer(self, optimizer: optim.Optimizer, iterations: int, state: dict[str, np.ndarray]) -> None:
        del iterations, state
        raise self._state_is_on_servers(optimizer)

    def merge_statistics(self, variables: Sequence[DistributedVariable]) -> None:
        del variables  # the servers have joined them

    def close(self, error: str = "") -> None:
        """Ends the session, and so this process's part of the job. At the end of the process this happens by itself.

        Read variables before: afterwards, no process can get those of the other stages.
        """
        atexit.unregister(self._close_at_exit)
        try:
            self._servers.close(error)
        finally:
            if self._task:
                self._task.close(self._client, *map(self._job_of, range(self.mesh.length("stage"))))
            if self._owned_client:
                self._client.close()
            super().close(error)

    def _close_at_exit(self) -> None:
        try:
            self.close(failure_at_exit())
        except errors.ShoalError as error:  # the job's status says how it ended
            _log.warning("could not end the session", job=self._job_of(self.stage), reason=error.message)

    def _job_of(self, stage: int) -> str:
        return f"{self._job}-stage-{stage}"

    def _open_session(self, optimizer: optim.Optimizer, variables: Mapping[str, Variable]) -> shoal.Session:
        options = {"optimizer": optimizer, "consistency": self._consistency, **self._options}
        name = self._job_of(self.stage)
        # A replica that starts again has the same member id, and its next incarnation.
        worker = f"{name}-replica-{self._replica}"
        opened = self._client.session(
            name, variables=variables, worker=worker, workers=self.mesh.length("replica"), **options
        )
        if self.stage == 0:
            opened.report_ranks(lambda: self._world.timings().ranks)  # for all stages of this replica
        return opened

    def _state_is_on_servers(self, optimizer: optim.Optimizer) -> errors.WrongContext:
        self._servers.optimizer.check_adopted(optimizer)
        return errors.WrongContext(
            "the servers have the state of the optimizer; save it with strategy.session.checkpoint() in each stage, "
            f"and continue with {self.restores_by}"
        )


def _check_cut(cut: Sequence[str | int] | None, stages: int, replicas: int, *, restores: bool) -> None:
    if cut is not None or stages == 1 or (replicas == 1 and not restores):
        return
    why = "the checkpoint is of a cut, and costs that are measured now may give another one"
    if replicas > 1:
        why = f"each of {replicas} replicas would measure the costs itself, and the cuts could differ"
    raise errors.BadRequest(
        f"there is no cut, but {why}; give cut: the first layer of each stage but the first, or the number of layers "
        "of each stage"
    )


def _line(
    mesh: RankMesh, resolver: ClusterResolver | None, task: TrainingTask | None, replica: int | None
) -> tuple[Group | None, int | None, ClusterResolver | None]:
    """Connects this process with the other stages of its replica, if their addresses are known.

    Args:
        mesh: the processes by "replica" and "stage".
        resolver: lists them, unless `TF_CONFIG` does.
        task: the part of this process in a cluster that the tasks form.
        replica: number of the replica, if nothing lists them.

    Returns:
        The group, the number of the replica, and what lists them. Without addresses, the group is None.
    """
    listed = resolver or TFConfigClusterResolver()
    tasks = ranked_tasks(listed)
    if tasks is None:
        return None, replica, resolver
    mesh.check_ranks(len(tasks.addresses))
    place = open_hybrid_group(listed, mesh.length("stage"), coordinator=task is not None)
    return place.group, place.number, listed


def _checked_replica(replica: int | None, replicas: int) -> int:
    """Returns the number of this process's replica. Raises BadRequest if it is not known."""
    number = 0 if replica is None and replicas == 1 else replica
    if not isinstance(number, Integral) or not 0 <= number < replicas:
        raise errors.BadRequest(
            f"replica is {number!r:.200}; give the number of this process's replica, from 0 to {replicas - 1}, or list "
            "all processes in TF_CONFIG"
        )
    return int(number)


__all__ = ["ParameterServerPipelineStrategy"]
