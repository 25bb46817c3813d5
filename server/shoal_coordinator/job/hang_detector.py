"""Detection of hung workers of one job, which make no step while others wait for them. Pure: no clock, no I/O."""

from shoal.consistency import Asynchronous
from shoal.job import Job
from shoal_coordinator.job.checkpoints import CheckpointCoordinator
from shoal_coordinator.job.owners import Owners

# The default of `Job.step_timeout_s`: so many times the longest recent step, but at least so many seconds. A program
# may compile, or read a slow file system, for minutes; restarting it then would be worse than waiting.
_STEPS_LONG, _STEP_TIMEOUT_S = 20, 600.0


class HangDetector:
    """The hang detector of one job.

    Args:
        spec: the job.
        owners: owners of the job's state. The worker group is told to treat the time of an evaluation as no stall; the
            others are only read.
        checkpoint_coordinator: checkpoint coordinator of the job, for reading.
    """

    def __init__(self, spec: Job, owners: Owners, checkpoint_coordinator: CheckpointCoordinator) -> None:
        self._spec, self._checkpoint_coordinator = spec, checkpoint_coordinator
        self._lifecycle, self._accounting = owners.lifecycle, owners.accounting
        self._worker_group = owners.worker_group

    def hung_workers(self, now: float, interval_s: float = 0.0) -> tuple[list[str], str]:
        """Returns the hung workers, and the reason. Reports of steps arrive up to `interval_s` seconds late."""
        group = self._worker_group
        if self._spec.is_session or isinstance(self._spec.consistency, Asynchronous) or not self._lifecycle.running:
            return [], ""
        if self._checkpoint_coordinator.has_evaluator:  # it may take any time, and others may wait for it
            group.restart_watch(now)
            return [], ""
        stalled_s, limit_s = group.stalled_s(now) - interval_s, float(self._spec.step_timeout_s)
        if stalled_s < (limit_s or _STEP_TIMEOUT_S):
            return [], ""
        limit_s = limit_s or max(_STEP_TIMEOUT_S, _STEPS_LONG * self._accounting.steps.longest_s)
        if stalled_s < limit_s:
            return [], ""
        why = f"it has made no step for {stalled_s:.0f} s while others wait for it (step_timeout_s: {limit_s:.0f} s)"
        return group.lagging(now - limit_s), why
