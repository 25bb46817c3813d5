"""A session's access to its job as a whole: who is in it, its log, its checkpoints, and its learning rate."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from shoal._rpc import CoordinatorClient
from shoal._session.checkpoint_calls import take_checkpoint
from shoal._session.inputs import lines_of
from shoal._session.learning_rate import set_learning_rate
from shoal._session.reports import Reports
from shoal._session.step_times import StepTimes
from shoal._training import PushResult
from shoal._training.participant import Participant
from shoal.optim import Schedule
from shoal.status import JobMember, RankTimes, SavedCheckpoint


class JobAccess:
    """The part of a session that concerns its job as a whole.

    Attributes:
        job: name of the job.
    """

    job: str
    _coordinator: CoordinatorClient
    _participant: Participant
    _times: StepTimes
    _reports: Reports

    def _alive(self) -> AbstractContextManager[None]:
        """Checks that the session may be used, and converts the errors of the block."""
        raise NotImplementedError

    def _settle(self) -> PushResult | None:
        """Waits for the push in progress."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """The rank of this session within the worker group, from 0."""
        return self._participant.rank

    @property
    def workers(self) -> int:
        """The number of sessions that the job wants."""
        return self._participant.spec.workers

    @property
    def members(self) -> tuple[JobMember, ...]:
        """The current or last session of each rank: whether it is there, has finished or has left, and why it left.

        Asks the coordinator. `[it.worker for it in session.members if it.state == "present"]` are those in the job now.
        The step of each is that of its last report, so it may be a few steps behind.
        """
        with self._alive():
            return self._participant.status().members

    def set_learning_rate(self, learning_rate: float | Schedule) -> None:
        """Sets the learning rate of the job, for the later updates of all sessions; see `JobHandle.set_learning_rate`.

        Args:
            learning_rate: a constant >= 0, or a schedule, whose versions count from the beginning of the job.

        Raises:
            InvalidOptimizer: the rate is not finite, or is below 0.
            Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: see `Session.pull`.
        """
        with self._alive():
            set_learning_rate(self._coordinator, self.job, learning_rate)

    def report_ranks(self, ranks: Callable[[], tuple[RankTimes, ...]]) -> None:
        """Adds the times of the ranks that share this session to its reports, for `shoal timings`.

        Args:
            ranks: returns the times of the ranks of a hybrid group over the last minute, by rank. Another thread calls
                it.

        Raises:
            Fenced, UnknownJob, JobFailed, Cancelled: see `Session.pull`.
        """
        with self._alive():
            self._reports.ranks = ranks

    def log(self, text: str) -> None:
        """Adds lines to the job's log. The next report sends them. A line of more than 8 KiB is split.

        Raises:
            BadRequest: the text is not a string.
            Fenced, UnknownJob, JobFailed, Cancelled: see `Session.pull`.
        """
        lines = lines_of(text)
        with self._alive():
            self._reports.outbox.add_lines(lines)

    def checkpoint(self, timeout_s: float | None = None) -> SavedCheckpoint:
        """Takes a checkpoint after this session's last push, and returns it when it is complete.

        In synchronous mode, a push counts only when its step closes, so a push to the open step is not in the
        checkpoint. Call `barrier` first to wait until the step is closed.

        Args:
            timeout_s: how long to wait, in seconds. None means no limit. The checkpoint continues after a timeout.

        Raises:
            StorageFailed, DeadlineExceeded: see `JobHandle.checkpoint`.
            NonFiniteGradient, Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: see `Session.push`.
        """
        with self._alive():
            with self._times.timed("push"):
                self._settle()
            return take_checkpoint(self._coordinator, self.job, timeout_s)


__all__ = ["JobAccess"]
