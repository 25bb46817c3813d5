"""The learning rate of a running job, as its user sets it."""

from shoal import _tracing
from shoal._rpc import CoordinatorClient
from shoal.optim import ConstantLR, Schedule
from shoal.v1 import job_pb2


class LearningRateControl:
    """The part of a job's handle that sets the learning rate.

    Args:
        coordinator: client of the coordinator.
        name: name of the job.
    """

    def __init__(self, coordinator: CoordinatorClient, name: str) -> None:
        self._coordinator, self.name = coordinator, name

    def set_learning_rate(self, learning_rate: float | Schedule) -> None:
        """Sets the learning rate of a live job, instead of the schedule of its optimizer.

        Each server uses the rate from its next update on, shortly after this call. The factors of variable groups still
        apply. The rate stays if servers are lost or the coordinator restarts. Checkpoints keep it: a job that continues
        from one with the same optimizer goes on with this rate.

        Args:
            learning_rate: a constant >= 0, or a schedule, whose versions count from the beginning of the job.

        Raises:
            InvalidOptimizer: the rate is not finite, or is below 0.
            UnknownJob: there is no such job, or it was dropped.
            JobEnded: the job has ended.
        """
        set_learning_rate(self._coordinator, self.name, learning_rate)


def set_learning_rate(coordinator: CoordinatorClient, job: str, learning_rate: float | Schedule) -> None:
    """Sets the learning rate of a live job; see `LearningRateControl.set_learning_rate`.

    Args:
        coordinator: client of the coordinator.
        job: name of the job.
        learning_rate: a constant >= 0, or a schedule.

    Raises:
        InvalidOptimizer, UnknownJob, JobEnded: see `LearningRateControl.set_learning_rate`.
    """
    schedule = learning_rate if isinstance(learning_rate, Schedule) else ConstantLR(learning_rate)
    request = job_pb2.SetLearningRateRequest(job=job, learning_rate=schedule.to_proto())
    with _tracing.root("set learning rate", job=job):
        coordinator.call(coordinator.jobs.SetLearningRate, request)


__all__ = ["LearningRateControl", "set_learning_rate"]
