"""Reports of a session: its metrics, timings and log lines on their way to the coordinator.

The calls of the user's loop only add to them. Another thread sends them, because the coordinator may not answer.
"""

import threading
from collections.abc import Callable

from shoal import errors
from shoal._rpc import HeartbeatPace
from shoal._system.logs import Log
from shoal._training import Outbox, Report, StepClock
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

    def flush(self) -> None:
        """Sends the unsent reports if it is time."""
        due = self._clock() - self._sent_at >= REPORT_EVERY_S and self._pace.report_due_s <= 0
        if due and not self.over:
            self.send()

    def send(self) -> None:
        """Sends the unsent reports. Does not raise, because the steps have been taken."""
        with self._sending:
            self._send_all()

    def _send_all(self) -> None:
        self._sent_at = self._clock()
        if timings := self._steps.take():
            self.outbox.add_metrics(Report(timings=timings, ranks=self.ranks()))
        # Metrics go once a call, since a fast loop adds to them during each report; lines go as long as there are any.
        more = True
        while more and (report := self.outbox.take()):
            more = self.outbox.lines_waiting > 0
            try:
                done = self._participant.report(report, self._pace) is ReportAck.DONE
                if done and (end := self._participant.ended()):
                    self._lose(end)
                self.over = done  # last, because the next call of the loop raises the end that is known by then
            except (errors.Unreachable, errors.DeadlineExceeded) as error:  # training continues
                _log.debug("could not report", job=self._participant.job, reason=error.message)
                self.outbox.put_back(report)
                return
            except (errors.Fenced, errors.UnknownJob) as error:  # the next call raises it
                self._lose(error)
                return
            except errors.ShoalError as error:  # a retry would be refused, too
                _log.warning("a report was refused", job=self._participant.job, reason=error.message)


__all__ = ["REPORT_EVERY_S", "Reports"]
