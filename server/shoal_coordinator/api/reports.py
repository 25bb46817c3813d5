"""Decoding and checks of workers' reports.

The coordinator of a large cluster gets hundreds of reports a second. So each field of a request is read once, and the
checks read the decoded values.
"""

import math
from collections.abc import Iterable, Sequence

from shoal import errors
from shoal._limits import Limit, catalogue
from shoal._wire import limits, without_controls
from shoal.status import RankTimes, StepTiming
from shoal.v1 import job_pb2 as pb
from shoal_coordinator.api import checks
from shoal_coordinator.messages import events


def report_of(request: pb.ReportRequest) -> events.WorkerReported:
    """Returns the report in a request, after checks of its sizes and values.

    Raises:
        LimitExceeded: It exceeds a limit.
        BadRequest: A value is out of range.
    """
    who = f"the report of {request.worker} on job {request.job}"
    _check_size(who, len(request.timings), catalogue.TIMINGS, "timings")
    _check_size(who, len(request.ranks), catalogue.GROUP_RANKS, "ranks")
    report = events.WorkerReported(
        job=request.job,
        worker=request.worker,
        incarnation=request.incarnation,
        step=request.step,
        accepted=request.accepted,
        rejected=request.rejected,
        dropped=request.dropped,
        samples=request.samples,
        values=dict(request.values),
        staleness=dict(request.staleness),
        log=tuple(request.log),
        assignment=request.assignment,
        timings=tuple(map(StepTiming.from_proto, request.timings)),
        ranks=tuple(map(RankTimes.from_proto, request.ranks)) if request.ranks else (),
    )
    _check_counts(who, report)
    _check_log(who, report.log)
    _check_values(who, report.values)
    _check_timings(who, report.timings)
    for times in request.ranks:
        checks.check_rank_times(who, times)
    return report


def _check_size(who: str, size: int, limit: Limit, what: str) -> None:
    if size > limit.default:
        raise limit.refusal(f"{who} has {size} {what}")


def _check_counts(who: str, report: events.WorkerReported) -> None:
    # Timings are in ascending order, so the last one has the largest step.
    for step in (report.step, report.timings[-1].step if report.timings else 0):
        checks.check_step(who, step)
    most = max(report.accepted, report.rejected, report.dropped, report.samples)
    if report.staleness:
        most = max(most, *report.staleness.values())
        if (staleness := max(report.staleness)) >= limits.STALENESS_BUCKETS:
            raise catalogue.STALENESS_BUCKETS.refusal(f"{who} has a staleness of {staleness}")
    if most >= limits.MAX_STEP:
        raise catalogue.MAX_STEP.refusal(f"{who} has a count of {most}")


def _check_log(who: str, log: Sequence[str]) -> None:
    if not log:
        return
    lines = [len(line.encode()) for line in log]
    _check_size(who, len(lines), catalogue.LOG_LINES, "log lines")
    _check_size(who, max(lines), catalogue.LOG_LINE_BYTES, "bytes in a log line")
    _check_size(who, sum(lines), catalogue.LOG_BYTES, "bytes of log lines")


def _check_values(who: str, names: Iterable[str]) -> None:
    names = [*names]
    _check_size(who, len(names), catalogue.METRICS, "values")
    for name in names:
        _check_size(who, len(name.encode()), catalogue.METRIC_NAME_BYTES, "bytes in the name of a value")
        if name != without_controls(name):
            raise errors.BadRequest(f"{who} has a value whose name has control characters")


def _check_timings(who: str, timings: Iterable[StepTiming]) -> None:
    before = -1
    for it in timings:
        if it.step <= before:
            raise errors.BadRequest(f"{who} has timings that are not in ascending order of steps")
        before = it.step
        waited = (it.began, it.pull, it.read, it.compute, it.push, it.wait, it.evaluate)
        if not (min(waited) >= 0 and math.isfinite(sum(waited))):  # a sum with NaN or Inf is NaN or Inf
            raise errors.BadRequest(f"{who} has a timing that is not finite or is below 0")


__all__ = ["report_of"]
