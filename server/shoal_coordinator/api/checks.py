"""Checks of requests before the machine gets them: versions, short texts, submissions, evaluations and reports.

They apply to requests only. Stored records are not checked, so the records of an earlier version still load.
"""

import math
from importlib.metadata import version
from itertools import pairwise

from shoal import errors
from shoal._job.checks import check_not_standard_library
from shoal._wire import NAMES, check_address, check_text, is_name, limits, without_controls
from shoal.job import Job
from shoal.v1 import coordinator_pb2 as members_pb
from shoal.v1 import job_pb2 as pb

# Limit of the patterns of one job's optimizer.
DECAY_PATTERNS = 1_000


def check_registration(request: members_pb.RegisterRequest) -> None:
    """Checks that a member runs the coordinator's version, and that its texts are short and addresses are addresses.

    Before 1.0, messages of other versions may differ.

    Raises:
        WrongVersion: The member runs another version.
        BadRequest: A text is too long, has control characters, or is no address.
    """
    ours = version("shoal")
    if request.version and request.version != ours:
        raise errors.WrongVersion(
            f"{request.member:.63} runs Shoal {request.version:.63}, but this coordinator runs {ours}: install the "
            "same version on all members of a cluster (docs/how-to/upgrades.md)",
            member=request.member[:63],
            version=request.version[:63],
            coordinator=ours,
        )
    owner = f"of {request.member!r:.80}"
    check_text(f"device {owner}", request.device)
    check_text(f"process {owner}", request.process)
    if request.address:
        check_address(f"address {owner}", request.address)
    if request.metrics_address:
        check_address(f"metrics_address {owner}", request.metrics_address)


def check_submission(spec: Job, token: str) -> None:
    """Checks what the specification itself does not check: texts, the number of patterns, and the program's module.

    Raises:
        BadRequest: A text is too long, or has control characters.
        InvalidJob: The optimizer has too many patterns.
        ProgramNotAllowed: The program is in Python's standard library.
    """
    owner = f"of job {spec.name}"
    check_text(f"token {owner}", token)
    check_text(f"program {owner}", spec.program)
    check_text(f"metric of evaluation {owner}", spec.evaluation.metric if spec.evaluation else "")
    patterns = spec.optimizer.decay_exclude
    if len(patterns) > DECAY_PATTERNS:
        raise errors.InvalidJob(
            f"decay_exclude {owner} has {len(patterns)} patterns; the limit DECAY_PATTERNS is {DECAY_PATTERNS}",
            limit="DECAY_PATTERNS",
        )
    for pattern in patterns:
        check_text(f"a pattern of decay_exclude {owner}", pattern)
    check_not_standard_library(spec.program)


def check_step(what: str, step: int) -> None:
    """Checks a worker's step.

    Args:
        what: what has the step, as the error names it.
        step: the step.

    Raises:
        BadRequest: the step is not below the limit.
    """
    if step >= limits.MAX_STEP:
        raise errors.BadRequest(
            f"{what} has step {step}; the limit MAX_STEP is {limits.MAX_STEP}", step=step, limit="MAX_STEP"
        )


def check_evaluation(request: pb.ReportEvaluationRequest) -> None:
    """Checks the step of an evaluation, and the number and the names of its values.

    Raises:
        BadRequest: The step is too large, there are too many values, or a name is not valid.
    """
    what, values = f"the evaluation of {request.worker} on job {request.job}", request.result.values
    check_step(what, request.result.step)
    if len(values) > limits.METRICS:
        raise errors.BadRequest(f"{what} has {len(values)} values; at most {limits.METRICS}")
    for name in values:
        if not is_name(name):
            raise errors.BadRequest(f"{what} has a value named {name!r:.80}; a name must be {NAMES}")
        check_text("the name of a value", name)


def check_report(request: pb.ReportRequest) -> None:
    """Raises BadRequest if a report exceeds a limit."""
    lines = [len(line.encode()) for line in request.log]
    # Timings are in ascending order, so the last one has the largest step.
    for step in (request.step, *(timing.step for timing in request.timings[-1:])):
        check_step(f"the report of {request.worker} on job {request.job}", step)
    problems = {
        f"a count that is not below the limit MAX_STEP, {limits.MAX_STEP}": (
            max(request.accepted, request.rejected, request.dropped, request.samples, *request.staleness.values())
            >= limits.MAX_STEP
        ),
        f"{len(lines)} log lines; at most {limits.LOG_LINES}": len(lines) > limits.LOG_LINES,
        f"a log line of more than {limits.LOG_LINE_BYTES} bytes": max(lines, default=0) > limits.LOG_LINE_BYTES,
        f"{sum(lines)} bytes of log lines; at most {limits.LOG_BYTES}": sum(lines) > limits.LOG_BYTES,
        f"{len(request.values)} values; at most {limits.METRICS}": len(request.values) > limits.METRICS,
        f"a value whose name has more than {limits.METRIC_NAME_BYTES} bytes": (
            any(len(name.encode()) > limits.METRIC_NAME_BYTES for name in request.values)
        ),
        "a value whose name has control characters": any(name != without_controls(name) for name in request.values),
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


__all__ = [
    "DECAY_PATTERNS",
    "check_evaluation",
    "check_registration",
    "check_report",
    "check_step",
    "check_submission",
]
