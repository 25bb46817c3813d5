"""Partitioners by their names and arguments in `tf.distribute.experimental.partitioners`."""

from shoal.partitioners import FixedShards, MaxSize, MinSize, Partitioner

_BYTES_PER_STRING = 16  # TensorFlow's default; no variable here has strings


class FixedShardsPartitioner(FixedShards):
    """`shoal.partitioners.FixedShards` with TensorFlow's argument.

    Args:
        num_shards: number of slices, > 0.

    Raises:
        InvalidVariable: it is not an integer above 0.
    """

    def __init__(self, num_shards: int) -> None:
        super().__init__(num_shards)


class MinSizePartitioner(MinSize):
    """`shoal.partitioners.MinSize` with TensorFlow's arguments.

    Args:
        min_shard_bytes: smallest size of a slice, > 0.
        max_shards: largest number of slices, > 0.
        bytes_per_string: ignored: variables have no strings.

    Raises:
        InvalidVariable: an argument is not an integer above 0.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = _BYTES_PER_STRING
    ) -> None:
        del bytes_per_string
        super().__init__(min_shard_bytes, max_slices=max_shards)


class MaxSizePartitioner(MaxSize):
    """`shoal.partitioners.MaxSize` with TensorFlow's arguments.

    Args:
        max_shard_bytes: largest size of a slice, > 0.
        max_shards: largest number of slices, > 0. None means no limit.
        bytes_per_string: ignored: variables have no strings.

    Raises:
        InvalidVariable: an argument is not an integer above 0.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = _BYTES_PER_STRING
    ) -> None:
        del bytes_per_string
        super().__init__(max_shard_bytes, max_shards)


__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
