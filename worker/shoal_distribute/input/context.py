"""Contexts of input functions: which process or replica they are for, and how many replicas there are."""

from dataclasses import dataclass

from shoal import errors
from shoal._system import check_count


@dataclass(frozen=True)
class InputContext:
    """What a function that makes a data set knows of the strategy, as `tf.distribute.InputContext`.

        def make(context):
            size = context.get_per_replica_batch_size(256)
            return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(size)

        dataset = strategy.distribute_datasets_from_function(make)

    Attributes:
        num_input_pipelines: number of processes, each of which reads a data set.
        input_pipeline_id: number of this process, from 0.
        num_replicas_in_sync: number of replicas of all processes.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of samples of each replica.

        Args:
            global_batch_size: number of samples of all replicas in a step.

        Raises:
            BadRequest: the number of replicas does not divide it.
        """
        size, rest = divmod(check_count("global_batch_size", global_batch_size, 1), self.num_replicas_in_sync)
        if rest:
            raise errors.BadRequest(
                f"a global batch of {global_batch_size} samples cannot be divided evenly between "
                f"{self.num_replicas_in_sync} replicas; give a multiple of {self.num_replicas_in_sync}"
            )
        return size


@dataclass(frozen=True)
class ValueContext:
    """What a function that makes a replica's value knows, as `tf.distribute.experimental.ValueContext`.

    Attributes:
        replica_id_in_sync_group: number of the replica among those of all processes.
        num_replicas_in_sync: number of replicas of all processes.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


__all__ = ["InputContext", "ValueContext"]
