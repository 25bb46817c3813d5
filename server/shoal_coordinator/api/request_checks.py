"""Checks of the requests in which workers report: each bound of the contract, and the error that names it."""

import math
from itertools import pairwise

from shoal import errors
from shoal._wire import NAMES, is_name, limits
from shoal.v1 import job_pb2 as pb


def check_step(what: str, step: int) -> None:
    """Checks a worker's step.

    Args:
        what: what has the step, as the error names it.
        step: the step.

    Raises:
        BadRequest: the step is not below the limit.
    """
    if step >= limits.MAX_STEP:
        raise errors.BadRequest(f"{what} has step {step}; steps are below {limits.MAX_STEP}", step=step)


def check_evaluation(request: pb.ReportEvaluationRequest) -> None:
    """Raises BadRequest if the result of an evaluation exceeds a limit."""
    what, values = f"the evaluation of {request.worker} on job {request.job}", request.result.values
    check_step(what, request.result.step)
    if len(values) > limits.METRICS:
        raise errors.BadRequest(f"{what} has {len(values)} values; at most {limits.METRICS}")
    for name in values:
        if not is_name(name):
            raise errors.BadRequest(f"{what} has a value named {name!r:.80}; a name must be {NAMES}")


def check_report(request: pb.ReportRequest) -> None:
    """Raises BadRequest if a report exceeds a limit."""
    lines = [len(line.encode()) for line in request.log]
    # Timings are in ascending order, so the last one has the largest step.
    for step in (request.step, *(timing.step for timing in request.timings[-1:])):
        check_step(f"the report of {request.worker} on job {request.job}", step)
    problems = {
        f"{len(lines)} log lines; at most {limits.LOG_LINES}": len(lines) > limits.LOG_LINES,
        f"a log line of more than {limits.LOG_LINE_BYTES} bytes": max(lines, default=0) > limits.LOG_LINE_BYTES,
        f"{sum(lines)} bytes of log lines; at most {limits.LOG_BYTES}": sum(lines) > limits.LOG_BYTES,
        f"{len(request.values)} values; at most {limits.METRICS}": len(request.values) > limits.METRICS,
        f"a value whose name has more than {limits.METRIC_NAME_BYTES} bytes": (
            any(len(name.encode()) > limits.METRIC_NAME_BYTES for name in request.values)
        ),
        f"a staleness above {limits.STALENESS_BUCKETS - 1}": (
            max(request.staleness, default=0) >= limits.STALENESS_BUCKETS
        ),
        f"{len(request.timings)} timings; at most {limits.TIMINGS}": len(request.timings) > limits.TIMINGS,
        "timings that are not in ascending order of steps": (
            any(one.step >= following.step for one, following in pairwise(request.timings))
        ),
        "a timing that is not finite or is below 0": not all(map(_is_timing, request.timings)),
    }
    for problem, there in problems.items():
        if there:
            raise errors.BadRequest(f"the report of {request.worker} on job {request.job} has {problem}")


def _is_timing(timing: pb.StepTiming) -> bool:
    waited = (timing.began, timing.pull, timing.read, timing.compute, timing.push, timing.wait, timing.evaluate)
    return min(waited) >= 0 and math.isfinite(sum(waited))  # a sum with NaN or Inf is NaN or Inf


__all__ = ["check_evaluation", "check_report", "check_step"]
