"""Lazy input pipelines.

`sources` and `stages` have what users call, `elements` what flows through them, and `sharding` the shares of processes.

`shoal.data` exports what users need. `shoal_distribute.input` imports the rest from here.
"""

from shoal.data._pipeline.options import AutoShardPolicy, DistributeOptions, Options
from shoal.data._pipeline.sharding import shard
from shoal.data._pipeline.sources import from_arrays, from_generator, pipeline
from shoal.data._pipeline.splitting import mapped, split_batch
from shoal.data._pipeline.stages import AUTOTUNE, DataPipeline

__all__ = [
    "AUTOTUNE",
    "AutoShardPolicy",
    "DataPipeline",
    "DistributeOptions",
    "Options",
    "from_arrays",
    "from_generator",
    "mapped",
    "pipeline",
    "shard",
    "split_batch",
]
