"""Distribution strategies by the names of tf.distribute, over NumPy and CuPy, and the collectives below them."""

from shoal_distribute import coordinator, experimental, keras, nn, train
from shoal_distribute.collectives import Group, ReduceOp
from shoal_distribute.coordinator import ClusterCoordinator, RemoteValue
from shoal_distribute.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from shoal_distribute.group_session import GroupSession
from shoal_distribute.input import DistributedDataset, DistributedIterator, InputContext
from shoal_distribute.keras.checkpoints import Checkpoint, CheckpointManager
from shoal_distribute.keras.tape import GradientTape, compute_average_loss, function, scale_regularization_loss
from shoal_distribute.pipeline import MultiWorkerPipelineStrategy, ParameterServerPipelineStrategy, PipelineStrategy
from shoal_distribute.replica_context import ReplicaContext
from shoal_distribute.resolver import ClusterSpec, SimpleClusterResolver, TFConfigClusterResolver
from shoal_distribute.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    Strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from shoal_distribute.task_group import open_group
from shoal_distribute.tensor_parallel import DeviceMesh, RankMesh
from shoal_distribute.values import DistributedVariable, PerReplica

__all__ = [
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointManager",
    "ClusterCoordinator",
    "ClusterSpec",
    "CrossDeviceOps",
    "DeviceMesh",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedVariable",
    "GradientTape",
    "Group",
    "GroupSession",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "MultiWorkerPipelineStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerPipelineStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "PipelineStrategy",
    "RankMesh",
    "ReduceOp",
    "ReductionToOneDevice",
    "RemoteValue",
    "ReplicaContext",
    "RingAllReduce",
    "SimpleClusterResolver",
    "Strategy",
    "TFConfigClusterResolver",
    "compute_average_loss",
    "coordinator",
    "experimental",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "keras",
    "nn",
    "open_group",
    "scale_regularization_loss",
    "train",
]
