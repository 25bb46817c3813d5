"""Options of a pipeline: how strategies divide it between processes."""

import enum
from dataclasses import dataclass, field


class AutoShardPolicy(enum.Enum):
    """How a strategy of several processes divides a data set between them, as in TensorFlow.

    AUTO: by files if the source has at least one for each process, otherwise like DATA.
    FILE: each process reads some of the files. It is an error if there are fewer files than processes.
    DATA: each process computes its own part of each batch. All processes must have the same order.
    OFF: each process reads all data.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2


@dataclass
class DistributeOptions:
    """The options that strategies read.

    Attributes:
        auto_shard_policy: how to divide the data between processes.
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO


@dataclass
class Options:
    """Options of a pipeline, as `tf.data.Options`.

        options = shoal.data.Options()
        options.experimental_distribute.auto_shard_policy = shoal.data.AutoShardPolicy.DATA
        dataset = dataset.with_options(options)

    Attributes:
        experimental_distribute: the options that strategies read.
    """

    experimental_distribute: DistributeOptions = field(default_factory=DistributeOptions)


__all__ = ["AutoShardPolicy", "DistributeOptions", "Options"]
