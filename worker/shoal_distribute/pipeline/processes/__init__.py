"""Pipelines whose stages are in several processes. Schedules, stages and steps are those of one process."""

from shoal_distribute.pipeline.processes.server_strategy import ParameterServerPipelineStrategy
from shoal_distribute.pipeline.processes.strategy import MultiWorkerPipelineStrategy

__all__ = ["MultiWorkerPipelineStrategy", "ParameterServerPipelineStrategy"]
