"""Tests of what a session reports, and when."""

from collections.abc import Iterator
from typing import cast

from shoal._rpc import HeartbeatPace
from shoal._session.reports import REPORT_EVERY_S, Reports
from shoal._training import StepClock
from shoal._training.participant import Participant, Report
from shoal._wire import ReportAck
from shoal._wire.limits import LOG_LINES


class BusySession:
    """A participant whose session pushes another step while each report is sent."""

    job = "job"

    def __init__(self) -> None:
        self.sent: list[Report] = []
        self.reports: Reports | None = None

    def report(self, report: Report, _pace: HeartbeatPace, *, retry_for_s: float | None) -> ReportAck:
        assert self.reports
        assert len(self.sent) < 10, "the reports do not end"
        self.sent.append(report)
        self.reports.outbox.add_metrics(Report(step=report.step + 1, accepted=1))
        return ReportAck.CONTINUE


def busy() -> tuple[BusySession, Reports]:
    session = BusySession()
    times: Iterator[float] = iter(range(0, 1_000))
    pace = HeartbeatPace(clock=lambda: 0.0, jitter=lambda: 0.0)
    session.reports = Reports(
        cast(Participant, session), pace, StepClock(), lambda _error: None, lambda: next(times) * REPORT_EVERY_S
    )
    return session, session.reports


def test_steps_taken_while_a_report_is_sent_are_in_the_next_one() -> None:
    session, reports = busy()
    reports.outbox.add_metrics(Report(step=1, accepted=1))
    reports.send()
    assert [report.step for report in session.sent] == [1]
    reports.flush()
    assert [report.step for report in session.sent] == [1, 2]


def test_all_lines_are_sent_in_one_call() -> None:
    session, reports = busy()
    reports.outbox.add_lines(str(number) for number in range(2 * LOG_LINES + 1))
    reports.send()
    assert [len(report.log) for report in session.sent] == [LOG_LINES, LOG_LINES, 1]
