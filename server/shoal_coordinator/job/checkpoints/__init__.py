"""Decisions about one job's checkpoints and evaluations, which depend on each other. Pure: no clock, no I/O.

Only `job` may import this package.
"""

from shoal_coordinator.job.checkpoints.coordinator import CheckpointCoordinator
from shoal_coordinator.job.checkpoints.schedule import NO_STORAGE, CheckpointSchedule

__all__ = ["NO_STORAGE", "CheckpointCoordinator", "CheckpointSchedule"]
