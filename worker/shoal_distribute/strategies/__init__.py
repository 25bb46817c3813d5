"""Strategies: where the replicas and the variables of a model are, and how gradients are joined."""

from shoal_distribute.strategies.base import Strategy
from shoal_distribute.strategies.central_storage import CentralStorageStrategy
from shoal_distribute.strategies.current import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from shoal_distribute.strategies.hybrid_group import open_hybrid_group
from shoal_distribute.strategies.local_state import OptimizerStates
from shoal_distribute.strategies.mirrored import DefaultStrategy, MirroredStrategy, OneDeviceStrategy
from shoal_distribute.strategies.multi_worker import MultiWorkerMirroredStrategy
from shoal_distribute.strategies.optimizer_calls import JobOptimizer
from shoal_distribute.strategies.parameter_server import ParameterServerStrategy
from shoal_distribute.strategies.process_join import join_processes
from shoal_distribute.strategies.server_tasks import TrainingTask, enter_task, resolver_of_cluster, script_name
from shoal_distribute.strategies.server_variable import job_variable

__all__ = [
    "CentralStorageStrategy",
    "DefaultStrategy",
    "JobOptimizer",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "OptimizerStates",
    "ParameterServerStrategy",
    "Strategy",
    "TrainingTask",
    "enter_task",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "job_variable",
    "join_processes",
    "open_hybrid_group",
    "resolver_of_cluster",
    "script_name",
]
