"""MultiWorkerPipelineStrategy: a model in stages, each in a process of its own, with replicas of the whole."""

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry

from shoal import _tracing, errors, optim
from shoal.program import Array
from shoal_distribute.collectives import Group, ReduceOp
from shoal_distribute.devices import logical_devices
from shoal_distribute.elastic_group import ElasticGroup
from shoal_distribute.group_arrays import sums_of
from shoal_distribute.keras.layers.base import as_tensor
from shoal_distribute.keras.layers.core_layer import CoreLayer
from shoal_distribute.keras.models.model import Model
from shoal_distribute.pipeline.model_stages import PipelinedModel, check_samples
from shoal_distribute.pipeline.processes.runner import RankStage
from shoal_distribute.pipeline.processes.variables import RankVariable
from shoal_distribute.pipeline.staged import StagedStrategy, settings_of
from shoal_distribute.rank_metrics import RankMetrics
from shoal_distribute.replica_context import ReplicaContext, current_replica
from shoal_distribute.resolver import ClusterResolver, TFConfigClusterResolver
from shoal_distribute.strategies import join_processes, script_name
from shoal_distribute.task_group import open_group
from shoal_distribute.tensor_parallel import DeviceMesh, PartGroup, RankMesh, SplitPlace
from shoal_distribute.values import DistributedVariable
from shoal_worker.arrays import on_host


class MultiWorkerPipelineStrategy(StagedStrategy):
    """One model, cut into stages in several processes. Replicas of the pipeline add up their gradients.

    Each process computes one stage of one replica. All run the same script. A batch is divided between the replicas.
    Each process reads the samples of its replica itself: the first stage computes with the inputs, and the last one
    with the labels. New variables get the initial values of the first process.

        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": ["host-a:7090", "host-b:7090"]}, "task": {"type": "worker", "index": 0}}
        )
        strategy = MultiWorkerPipelineStrategy(stages=2)
        with strategy.scope():
            model = make_model()
            model.compile("adam", "mse")
        model.fit(x, y, batch_size=64)

    Without TF_CONFIG, the coordinator of a cluster brings the processes together, without any address in the script.

    With `split`, several processes compute a stage together. Each has a part of the layers that get the mesh of the
    strategy, and computes all other layers of the stage as the others do, with the same bits:

        strategy = MultiWorkerPipelineStrategy(stages=2, replicas=2, split=2)  # 8 processes
        with strategy.scope():
            wide = keras.layers.ColumnParallelDense(4096, "gelu", mesh=strategy.mesh, gather_output=False)
            narrow = keras.layers.RowParallelDense(1024, mesh=strategy.mesh, input_is_parallel=True)

    `mesh` says what each rank computes: the part varies fastest, then the stage, then the replica.

    If a process ends, the step ends in the others: they get `RankLost`, which names it. Start all processes again, from
    a checkpoint. All processes take and read checkpoints, and the first one writes the files.

    Args:
        stages: number of stages.
        replicas: number of replicas of the pipeline.
        cluster_resolver: describes the processes. None means the environment variable `TF_CONFIG`.
        device: the device of this process, such as "/gpu:1". None means the first GPU, or the CPU if there is none.
        micro_batches: see `PipelineStrategy`: of the part of a batch that a replica gets.
        schedule: see `PipelineStrategy`.
        recompute: see `PipelineStrategy`.
        cut: see `PipelineStrategy`. The first process measures the costs.
        memory_limit: see `PipelineStrategy`.
        carry_residuals: see `PipelineStrategy`.
        coordinator: host:port of the coordinator that brings the processes together; None means that of
            `SHOAL_COORDINATOR`, if there is no `TF_CONFIG`.
        group_name: name of the group at the coordinator, the same for all its processes; by default the name of the
            script.
        group: a group of processes that is open already, instead of a resolver.
        split: number of processes that compute a stage together, each with a part of its split layers.

    Attributes:
        mesh: the ranks by "replica", "stage" and "model". Split layers take it.
        rank: number of this process.
        stage: the stage of this process.

    Raises:
        BadRequest: an argument or `TF_CONFIG` is invalid, or the number of processes is not stages * replicas *
            split.
        DeviceUnavailable: there is no such device.
        RankLost: another process did not come.
        RanksDisagree: another process has other stages, replicas or split.
    """

    _after_loss = "start all processes again, from a checkpoint"

    def __init__(
        self,
        stages: int,
        replicas: int = 1,
        cluster_resolver: ClusterResolver | None = None,
        *,
        device: str | None = None,
        micro_batches: int = 8,
        schedule: str = "1f1b",
        recompute: bool = False,
        cut: Sequence[str | int] | None = None,
        memory_limit: int | Sequence[int] | None = None,
        carry_residuals: bool = True,
        coordinator: str | None = None,
        group_name: str = "",
        group: Group | None = None,
        split: int = 1,
    ) -> None:
        self.mesh = RankMesh(stages, replicas, split)
        chosen = logical_devices(None if device is None else [device])[0]
        settings = settings_of((chosen,) * stages, micro_batches, schedule, recompute, memory_limit)
        _tracing.start("client")
        self._elastic: ElasticGroup | None = None
        is_described = cluster_resolver or group or os.environ.get("TF_CONFIG")
        if coordinator or (os.environ.get("SHOAL_COORDINATOR") and not is_described):
            name, ranks = group_name or script_name(sys.argv[0] if sys.argv else ""), self.mesh.size
            self._elastic = ElasticGroup(coordinator, name, ranks=ranks, min_ranks=ranks)
            group, _ = self._elastic.form(-1)
        if group is None:
            self.cluster_resolver = cluster_resolver or TFConfigClusterResolver()
            group = _opened(self.cluster_resolver, self.mesh)
        self._world = group
        try:
            self._ranks = RankStage(self._world, self.mesh, chosen)
        except BaseException:
            self._world.close()
            if self._elastic:
                self._elastic.close()
            raise
        self.rank, self.stage, self.first_replica = self._world.rank, self._ranks.stage, self._ranks.replica
        super().__init__(self._ranks, settings, cut, carry_residuals)
        self._group = self._ranks.peers  # `gather` joins what the replicas have
        # A rank that ends without a word fails the others, also in a last call that needs nothing more from it.
        atexit.register(self.close)

    @property
    def num_replicas_in_sync(self) -> int:
        return self.mesh.length("replica")

    @property
    def input_pipelines(self) -> int:
        return self.mesh.length("replica")

    @property
    def input_pipeline_id(self) -> int:
        return self.first_replica

    @property
    def reads_in_order(self) -> bool:
        return True

    @property
    def has_results(self) -> bool:
        return False  # the processes of the last stages have them

    @property
    def writes_files(self) -> bool:
        return self.rank == 0

    def check_batch(self, samples: int) -> None:
        check_samples(samples // self.input_pipelines, self._settings.micro_batches)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None, options: Any = None) -> Any:
        with self._ends_together(), _tracing.root("run", rank=self.rank, ranks=self.mesh.size):
            return super().run(fn, args, kwargs, options)

    experimental_run_v2 = run

    def stages_of(self, model: Any, x: Any, optimizer: optim.Optimizer | None = None) -> PipelinedModel | None:
        if current_replica() is not None:
            self._ranks.check_inputs([as_tensor(it).array for it in model.listed_inputs(x)])
        found = super().stages_of(model, x, optimizer)
        self._world.times.steps += found is not None and optimizer is not None
        return found

    def register_metrics(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Adds this process's metrics, `shoal_rank_*`, to a registry of `prometheus_client`, which the script serves.

        Args:
            registry: the registry. The default is that of `prometheus_client.start_http_server`.
        """
        world = self._world
        registry.register(RankMetrics(lambda: world.times, world.timings, lambda: world.sent_bytes))

    def create_variable(self, name: str, initial: np.ndarray, *, trainable: bool = True) -> DistributedVariable:
        values = self._world.broadcast(np.array(initial, order="C"))
        return RankVariable(self, name, values, trainable=trainable, ranks=self._ranks)

    def create_split_variable(
        self, name: str, initial: np.ndarray, *, trainable: bool = True, place: SplitPlace
    ) -> DistributedVariable:
        values = self._world.broadcast(np.array(initial, order="C"))
        return RankVariable(self, name, values, trainable=trainable, ranks=self._ranks, split=place)

    def part_group(self, mesh: DeviceMesh, axis: str) -> PartGroup:
        if not any(isinstance(it, int) for it in mesh.devices):
            return super().part_group(mesh, axis)
        rank = self._world.rank
        if rank not in mesh.devices or mesh.group_of(rank, axis) != self.mesh.split_group(rank):
            raise errors.BadRequest(
                "the mesh of a split layer has other ranks along its axis than the mesh of the strategy; give "
                "mesh=strategy.mesh, with the axis 'model'"
            )
        return self._ranks.parts

    def of_ranks(self, number: int) -> list[int]:
        return [int(it) for it in self._world.all_gather(np.array(number, np.int64))]

    def merge_statistics(self, variables: Sequence[DistributedVariable]) -> None:
        """Sets variables that are not trainable to the mean of all replicas. All processes call it.

        Args:
            variables: the variables.
        """
        peers, replicas = self._ranks.peers, self.num_replicas_in_sync
        kept = [it for it in variables if isinstance(it, RankVariable) and it.is_here]
        kept = [it for it in kept if replicas > 1 and not it.trainable and it.dtype.kind == "f"]
        shares = [on_host(it.values[0]) * it.dtype.type(1 / replicas) for it in kept]
        for variable, mean in zip(kept, sums_of(peers, shares) if kept else [], strict=True):
            variable.assign(mean)

    def join(self, replica: ReplicaContext, op: ReduceOp, arrays: list[Array]) -> list[Array]:
        return join_processes(self._ranks.peers, replica, op, arrays, self.reduced_replicas)

    def close(self, error: str = "") -> None:
        atexit.unregister(self.close)
        if self._elastic:
            self._elastic.close()
        super().close(error)

    def _pipelined(self, model: Model, x: Any) -> PipelinedModel:
        layers = [it for it in model.all_layers() if isinstance(it, CoreLayer)]
        for layer, seed in zip(layers, self._ranks.share_seeds([it.drawn_seed for it in layers]), strict=True):
            layer.drawn_seed = seed
        return super()._pipelined(model, x)

    def _across(self, array: np.ndarray) -> np.ndarray:
        return self._ranks.of_last(array)

    def _apply(
        self,
        replica: ReplicaContext,
        optimizer: optim.Optimizer,
        variables: list[DistributedVariable],
        arrays: list[Array],
    ) -> None:
        del replica, optimizer, variables, arrays
        raise errors.WrongContext(
            "a MultiWorkerPipelineStrategy applies the gradients of steps in stages only: those of fit and "
            "train_on_batch, with samples for each replica; give larger batches, or use a PipelineStrategy for a loop "
            "of your own"
        )

    @contextmanager
    def _ends_together(self) -> Iterator[None]:
        """Ends the step of all ranks if that of this one fails: they would wait for it."""
        try:
            yield
        except errors.RankLost as error:
            error.add_note(self._after_loss)
            if self._elastic:
                self._elastic.lose(error)
            raise
        except BaseException as error:
            if not self._has_failed():  # otherwise another rank has raised the error
                place = f"raised in rank {self.rank}, which computes {self.mesh.described(self.rank)}"
                error.add_note(place)
                self._world.fail(_told(error, place))
            raise

    def _has_failed(self) -> bool:
        try:
            self._world.check()
        except errors.ShoalError:
            return True
        return False


def _told(error: BaseException, place: str) -> errors.ShoalError:
    """Returns an error for the other ranks."""
    if isinstance(error, errors.ShoalError):
        return type(error)(f"{error.message} ({place})", **error.details)
    return errors.InternalError(f"{type(error).__name__}: {error} ({place})")


def _opened(resolver: ClusterResolver, mesh: RankMesh) -> Group:
    group = open_group(resolver)
    if group is None:
        raise errors.BadRequest(
            f"this process is alone, but {mesh.shown()} need {mesh.size}; set TF_CONFIG, give a coordinator, or use "
            "PipelineStrategy for stages in one process"
        )
    return group


__all__ = ["MultiWorkerPipelineStrategy"]
