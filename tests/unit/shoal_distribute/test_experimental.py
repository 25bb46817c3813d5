"""Names of `tf.distribute.experimental`."""

import numpy as np

from shoal.partitioners import FixedShards, MaxSize, MinSize, from_proto
from shoal_distribute import ClusterCoordinator, experimental


def test_partitioners_have_the_arguments_of_tensorflow() -> None:
    found = experimental.partitioners
    pairs = [
        (found.FixedShardsPartitioner(num_shards=3), FixedShards(3)),
        (found.MinSizePartitioner(min_shard_bytes=64, max_shards=4), MinSize(64, max_slices=4)),
        (found.MinSizePartitioner(), MinSize(max_slices=1)),
        (found.MaxSizePartitioner(64, 5, bytes_per_string=8), MaxSize(64, 5)),
        (found.MaxSizePartitioner(max_shard_bytes=64), MaxSize(64)),
    ]
    for given, ours in pairs:
        assert isinstance(given, found.Partitioner)
        assert from_proto(given.to_proto()) == ours
        assert given.slices((10, 4), np.dtype(np.float32)) == ours.slices((10, 4), np.dtype(np.float32))


def test_earlier_names_of_the_communication_options() -> None:
    hints = experimental.CollectiveHints(bytes_per_pack=1 << 20, timeout_seconds=5)
    assert isinstance(hints, experimental.CommunicationOptions)
    assert experimental.CollectiveCommunication.NCCL is experimental.CommunicationImplementation.NCCL
    assert experimental.coordinator.ClusterCoordinator is ClusterCoordinator
