"""Pipelines: models cut into stages on several devices, through which batches flow in micro-batches."""

from shoal_distribute.pipeline.processes import MultiWorkerPipelineStrategy, ParameterServerPipelineStrategy
from shoal_distribute.pipeline.strategy import PipelineStrategy
from shoal_distribute.pipeline.timings import PipelineTimings, StageTimings

__all__ = [
    "MultiWorkerPipelineStrategy",
    "ParameterServerPipelineStrategy",
    "PipelineStrategy",
    "PipelineTimings",
    "StageTimings",
]
