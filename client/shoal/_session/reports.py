"""Reports of a session: its metrics, timings and log lines on their way to the coordinator.

The calls of the user's loop only add to them. Another thread sends them, because the coordinator may not answer.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from shoal import errors
from shoal._rpc import HeartbeatPace
from shoal._system.logs import Log
from shoal._training import Outbox, Pipeline, Report, StepClock
from shoal._training.participant import Participant
from shoal._wire import ReportAck
from shoal.status import RankTimes

_log = Log(__name__)

REPORT_EVERY_S = 0.5  # least time between two reports; the coordinator may ask for more


class Reports:
    """Collects what a session reports, and sends it periodically.

    Args:
        participant: the session's part in its job.
        pace: pace of the heartbeats; a report counts as one.
        steps: timings of the steps.
        lose: called with the error that ends the session.
        clock: returns seconds from any origin.

    Attributes:
        outbox: what has not been sent. Any thread may add to it.
        over: whether the job has ended for this session.
        ranks: returns the times of the ranks of the hybrid group that shares this session; () without one.
    """

    def __init__(
        self,
        participant: Participant,
        pace: HeartbeatPace,
        steps: StepClock,
        lose: Callable[[errors.ShoalError], object],
        clock: Callable[[], float],
    ) -> None:
        self._participant, self._pace, self._steps, self._lose, self._clock = participant, pace, steps, lose, clock
        # Held while reports are sent, one after the other; guards _sent_at and over, and taking from `steps`.
        self._sending = threading.Lock()
        self._sent_at = clock()
        self.outbox = Outbox()
        self.over = False
        self.ranks: Callable[[], tuple[RankTimes, ...]] = tuple

    @contextmanager
    def counting_rejected(self, parameters: Pipeline) -> Iterator[None]:
        """Counts a push of the block that is refused for NaN or Inf."""
        try:
            yield
        except errors.NonFiniteGradient:
            self.outbox.add_metrics(Report(step=parameters.step, rejected=1))
            raise

    def flush(self) -> None:
        """Sends the unsent reports if it is time, unless another thread sends them."""
        due = self._clock() - self._sent_at >= REPORT_EVERY_S and self._pace.report_due_s <= 0
        if due and not self.over and not self._sending.locked():
            self.send()

    def send(self) -> None:
        """Sends the unsent reports. Does not raise, because the steps have been taken."""
        with self._sending, suppress(errors.Unreachable):  # training continues, and the next report has all
            self._send_all(retry_for_s=0.0)

    def send_last(self) -> None:
        """Sends all reports before the session finishes, because its counts end with it.

        Sends the counts of all earlier reports once more: a coordinator that was restarted may have lost the latest.

        Raises:
            Unreachable: the coordinator did not answer for as long as other calls are repeated.
        """
        self.outbox.add_metrics(Report())
        with self._sending:
            self._send_all(retry_for_s=None)

    def _send_all(self, retry_for_s: float | None) -> None:
        self._sent_at = self._clock()
        if timings := self._steps.take():
            self.outbox.add_metrics(Report(timings=timings, ranks=self.ranks()))
        # Metrics go once a call, since a fast loop adds to them during each report; lines go as long as there are any.
        more = True
        while more and (report := self.outbox.take()):
            more = self.outbox.lines_waiting > 0
            try:
                done = self._participant.report(report, self._pace, retry_for_s=retry_for_s) is ReportAck.DONE
                if done and (end := self._participant.ended()):
                    self._lose(end)
                self.over = done  # last, because the next call of the loop raises the end that is known by then
            except errors.Unreachable as error:
                _log.debug("could not report", job=self._participant.job, reason=error.message)
                self.outbox.put_back(report)
                raise
            except (errors.Fenced, errors.UnknownJob) as error:  # the next call raises it
                self._lose(error)
                return
            except errors.ShoalError as error:  # a retry would be refused, too
                _log.warning("a report was refused", job=self._participant.job, reason=error.message)


__all__ = ["REPORT_EVERY_S", "Reports"]
