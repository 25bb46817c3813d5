"""MultiWorkerMirroredStrategy: replicas in several processes, which join their gradients without a server."""

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry

from shoal import _tracing, errors, optim
from shoal.program import Array
from shoal_distribute.collectives import (
    Buckets,
    CommunicationOptions,
    Group,
    NcclSums,
    ReduceOp,
    open_nccl,
)
from shoal_distribute.cross_device_ops import CrossDeviceOps
from shoal_distribute.elastic_group import ElasticGroup
from shoal_distribute.group_arrays import sums_of
from shoal_distribute.rank_metrics import RankMetrics
from shoal_distribute.replica_context import ReplicaContext
from shoal_distribute.resolver import ClusterResolver, TFConfigClusterResolver
from shoal_distribute.strategies.mirrored import MirroredStrategy
from shoal_distribute.strategies.process_join import join_processes
from shoal_distribute.strategies.server_tasks import script_name
from shoal_distribute.strategies.shared_state import SharedState, check_digests, digest
from shoal_distribute.task_group import open_group
from shoal_distribute.values import DistributedVariable
from shoal_worker.arrays import on_host

_UNTRAINED = -1  # the progress of a process that has nothing that others could use
# Variables with their gradients.
_Gradients = list[tuple[DistributedVariable, Array]]


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """Several processes, each with one or more devices. All replicas have a copy of all variables.

    The replicas of a process first add up their gradients among themselves, then the processes add up the sums, in the
    order of their ranks. In `fit` and by `Optimizer.minimize`, they can do so while the backward pass computes the next
    gradients. All processes run the same script: they must make the same variables, and call `run`, `reduce` and
    `gather` the same number of times. New variables get the initial values of the first process.

        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": ["host-a:7090", "host-b:7090"]}, "task": {"type": "worker", "index": 0}}
        )
        strategy = MultiWorkerMirroredStrategy()

    If a process ends, the others get `RankLost` with its number. Then restart all processes from a checkpoint.

    With `workers`, the group is *elastic*: the coordinator of a cluster brings the processes together, without any
    address in the script. If a process is lost, `fit` and `elastic` go on with the others, and a process that starts
    later takes the state of one that trains. The script makes all variables and optimizers before training.

        strategy = MultiWorkerMirroredStrategy(workers=4)      # with the cluster of SHOAL_COORDINATOR

    Args:
        cluster_resolver: describes the processes. None means the environment variable `TF_CONFIG`; without it, and
            without a coordinator, this process trains alone.
        communication_options: what carries the gradients between the processes; see `CommunicationOptions`.
        devices: names of this process's devices, as for `MirroredStrategy`.
        cross_device_ops: how the replicas of one process add up their gradients, as for `MirroredStrategy`.
        group: a group of processes that is open already, instead of a resolver.
        overlap: whether the processes reduce gradients during the backward pass. None means yes, unless all are on one
            host and compute on CPUs: there, both would take the same cores.
        workers: number of processes of an elastic group, at the beginning and at most.
        min_workers: the fewest processes with which an elastic group goes on, the same for all its processes.
        coordinator: host:port of the coordinator of an elastic group; None means that of `SHOAL_COORDINATOR`, or of
            `shoal up`.
        group_name: name of the elastic group, the same for all its processes; by default the name of the script.

    Attributes:
        rank: number of this process.

    Raises:
        BadRequest: `TF_CONFIG` is invalid; or a coordinator is given, as an argument or by `SHOAL_COORDINATOR`, but
            neither `workers` nor anything else that describes the processes.
        DeviceUnavailable: there is no such device, or the options ask for NCCL and the processes cannot have it.
        RankLost: another process did not come.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        group: Group | None = None,
        overlap: bool | None = None,
        workers: int | None = None,
        min_workers: int = 1,
        coordinator: str | None = None,
        group_name: str = "",
    ) -> None:
        super().__init__(devices, cross_device_ops)
        self.keeps_split_variables = False  # its processes add up whole gradients
        _tracing.start("client")
        described = cluster_resolver or group or os.environ.get("TF_CONFIG")
        if workers is None and (coordinator or (os.environ.get("SHOAL_COORDINATOR") and not described)):
            raise errors.BadRequest("there is a coordinator, but no number of processes; give workers=N")
        self._overlap, self._options = overlap, communication_options or CommunicationOptions()
        self._sums: Buckets | NcclSums | None = None
        self._made: list[weakref.ref[DistributedVariable]] = []
        self._state = SharedState(self._variables, self._states, lambda copy, array: self._places[copy].put(array))
        self._progress = _UNTRAINED
        self._elastic: ElasticGroup | None = None
        self._adopted: list[optim.Optimizer] = []  # all processes must have the same, so garbage collection takes none
        self._met = self._shared = False  # of an elastic group: whether it is connected, and has one state
        if workers is None:
            self.cluster_resolver = None if group else cluster_resolver or TFConfigClusterResolver()
            self._enter(open_group(self.cluster_resolver) if self.cluster_resolver else group)
        else:
            name = group_name or script_name(sys.argv[0] if sys.argv else "")
            self.may_grow = True
            self._elastic = ElasticGroup(coordinator, name, ranks=workers, min_ranks=min_workers)
            self._meet()
        # A rank that ends without a word fails the others, also in a last call that needs nothing more from it.
        atexit.register(self.close)

    @property
    def num_replicas_in_sync(self) -> int:
        return self._replicas

    @property
    def input_pipelines(self) -> int:
        return self._processes

    @property
    def input_pipeline_id(self) -> int:
        return self.rank

    @property
    def progress(self) -> int:
        """How far training is, in units of the training loop. In an elastic group, all processes get that of one.

        A process has it after `share_state`, which `run`, `elastic` and `fit` call.
        """
        return max(0, self._progress)

    @progress.setter
    def progress(self, value: int) -> None:
        self._progress = value

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None, options: Any = None) -> Any:
        self.share_state()
        with _tracing.root("run", rank=self.rank, ranks=self._processes):
            return super().run(fn, args, kwargs, options)

    experimental_run_v2 = run

    def elastic(self, step: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that takes a step, and raises `progress` by 1. In an elastic group, it survives failures.

            while strategy.progress < STEPS:
                loss = strategy.elastic(take_step, strategy.progress)      # take_step calls strategy.run

        If a process is lost, the others form the next generation, take the state of one of them, and repeat the step,
        unless that state includes the step already. So the function divides its batch each time. A step counts as taken
        as soon as it has applied an optimizer. If a process is lost later in the function, the rest of it is not
        repeated.

        Args:
            step: the function.
            *args: its arguments.

        Returns:
            What the function returned. None if the step is in the state already: a process was lost after the step was
            taken, or this process has just taken the state of another one.

        Raises:
            RankLost: a process was lost, and the group is not elastic.
        """
        began = self.progress
        self.share_state()  # if that changes the progress, the arguments may be those of another step
        while self.progress == began:
            updates = self._updates()
            try:
                result = step(*args)
            except errors.RankLost as error:
                if self._updates() != updates:
                    self.progress = began + 1  # before the processes compare how far they are
                if not self.recover(error):
                    raise
            else:
                self.progress = began + 1
                return result
        return None

    def share_state(self) -> None:
        while self._elastic and not self._shared:
            self._meet()
            assert self._group
            try:
                self._progress = max(0, self._state.take(self._group, self._root, self._progress))
                self.evaluations = int(self._group.all_gather(np.array(self.evaluations, np.int64)).max())
                self._shared = True
            except errors.RankLost as error:
                self._lose(error)

    def recover(self, error: errors.ShoalError) -> bool:
        if not isinstance(error, errors.RankLost):
            return False
        if self._elastic is None:
            error.add_note("start all processes again, from a checkpoint, or use an elastic group (workers=N)")
            return False
        self._lose(error)
        self.share_state()
        return True

    def register_metrics(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Adds this process's metrics, `shoal_rank_*`, to a registry of `prometheus_client`, which the script serves.

        Args:
            registry: the registry. The default is that of `prometheus_client.start_http_server`.
        """
        registry.register(
            RankMetrics(
                lambda: self._times,
                self.timings,
                lambda: self._group.sent_bytes if self._group else 0,
            )
        )

    def create_variable(self, name: str, initial: np.ndarray, *, trainable: bool = True) -> DistributedVariable:
        values = np.array(initial, order="C")
        if self._group and (self._elastic is None or self._shared):
            self._group.broadcast(values)
        made = super().create_variable(name, values, trainable=trainable)
        self._made.append(weakref.ref(made))
        return made

    def adopt_optimizer(self, optimizer: optim.Optimizer) -> None:
        self._states.of(optimizer)  # so that it can take the state of another process
        if self._elastic:
            self._adopted.append(optimizer)

    def join(self, replica: ReplicaContext, op: ReduceOp, arrays: list[Array]) -> list[Array]:
        if self._group is None:
            return super().join(replica, op, arrays)
        sums = super().join(replica, ReduceOp.SUM, arrays)
        nccl = self._nccl
        if replica.local_replica == 0 and self._sums:
            self._sums.pause()  # a layer may join sums in the backward pass, while gradients are reduced
        if nccl and nccl.in_step:
            nccl = None  # its step has the gradients
        return join_processes(self._group, replica, op, sums, self._replicas, nccl)

    def _collected(
        self, replica: ReplicaContext, gradients: Iterator[tuple[DistributedVariable, Array]]
    ) -> tuple[list[DistributedVariable], list[Array]]:
        if self._sums is None:
            return super()._collected(replica, gradients)
        variables: list[DistributedVariable] = []
        try:
            if not self._overlaps:
                gradients = iter(list(gradients))
            for part in _parts(gradients, self._options.pack_bytes if self.local_replicas > 1 else 0):
                variables += [variable for variable, _ in part]
                sums = super().join(replica, ReduceOp.SUM, [gradient for _, gradient in part])
                if replica.local_replica == 0:
                    for (variable, _), array in zip(part, sums, strict=True):
                        self._sums.add(variable.name, array if self._nccl else on_host(array))
            joined = list(self._sums.finish().values()) if replica.local_replica == 0 else []
        except BaseException:
            if replica.local_replica == 0:
                self._sums.abandon()
            raise
        if replica.local_replica == 0 and self._group:
            self._group.times.steps += 1
        return variables, [replica.device.put(it) for it in replica.exchange("the sums of all processes", joined)[0]]

    def of_ranks(self, number: int) -> list[int]:
        if self._group is None or self._elastic:
            return [number]
        return [int(it) for it in self._group.all_gather(np.array(number, np.int64))]

    def check_variables(self, variables: Sequence[DistributedVariable]) -> None:
        if self._group and self._elastic is None:
            check_digests(self.of_ranks(digest(variables)))

    def merge_statistics(self, variables: Sequence[DistributedVariable]) -> None:
        """Sets variables that are not trainable to the mean of all replicas of all processes. All processes call it.

        Args:
            variables: the variables.
        """
        if self._group is None:
            return
        kept = [it for it in variables if not it.trainable and it.dtype.kind == "f"]
        shares = [it.numpy() * it.dtype.type(self.local_replicas / self._replicas) for it in kept]
        for variable, mean in zip(kept, sums_of(self._group, shares), strict=True):
            variable.assign(mean)

    def close(self, error: str = "") -> None:
        atexit.unregister(self.close)
        if self._elastic:
            self._elastic.close()
        self._close_sums()
        super().close(error)

    def _enter(self, group: Group | None, root: int = 0) -> None:
        """Makes the processes of a group those of this strategy."""
        self._group, self._root = group, root
        counts = [self.local_replicas]
        if group:
            counts = [int(it) for it in group.all_gather(np.array(self.local_replicas, np.int64))]
        self.rank = group.rank if group else 0
        self.first_replica, self._replicas = sum(counts[: self.rank]), sum(counts)
        self._processes = len(counts)
        self._sums = self._sums_of(group) if group else None
        idle_cpu = any(it.is_gpu for it in self.devices) or not (group and group.shares_memory)
        self._overlaps = idle_cpu if self._overlap is None else self._overlap

    def _sums_of(self, group: Group) -> Buckets | NcclSums:
        lead = self.devices[0]
        lead.activate()
        found = open_nccl(group, self._options, lead.xp if lead.is_gpu else None, lead.index)
        return found or Buckets(group, nbytes=self._options.pack_bytes)

    @property
    def _nccl(self) -> NcclSums | None:
        return self._sums if isinstance(self._sums, NcclSums) else None

    def _close_sums(self) -> None:
        if self._group:
            self._group.close()
        if self._sums:
            self._sums.close()

    def _meet(self) -> None:
        """Waits for the next generation of an elastic group."""
        while self._elastic and not self._met:
            try:
                self._enter(*self._elastic.form(self._progress))
                self._met = True
            except errors.RankLost as error:
                self._lose(error)

    def _lose(self, error: errors.ShoalError) -> None:
        """Ends this process's part in a generation."""
        self._met = self._shared = False
        if self._elastic:
            self._elastic.lose(error)
        self._close_sums()

    def _updates(self) -> int:
        """Returns how often optimizers have been applied."""
        return sum(self._states.of(it).version for it in self._states.optimizers)

    def _variables(self) -> list[DistributedVariable]:
        found = [made() for made in self._made]
        return [it for it in found if it is not None]


def _parts(gradients: Iterator[tuple[DistributedVariable, Array]], nbytes: int) -> Iterator[_Gradients]:
    """Yields the gradients a few at a time, each time when they have so many bytes, and at least one."""
    part: _Gradients = []
    for each in gradients:
        part.append(each)
        if sum(gradient.nbytes for _, gradient in part) >= nbytes:
            yield part
            part = []
    if part:
        yield part


__all__ = ["MultiWorkerMirroredStrategy"]
