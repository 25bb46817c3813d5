"""Checks of requests before the machine gets them: versions, short texts, submissions and evaluations.

They apply to requests only. Stored records are not checked, so the records of an earlier version still load.
"""

import math
from importlib.metadata import version

from shoal import errors
from shoal._job.checks import check_importable
from shoal._limits import catalogue
from shoal._system import docs_url
from shoal._wire import NAMES, check_address, check_text, is_name, limits
from shoal.job import Job
from shoal.status import ServerLoad
from shoal.v1 import coordinator_pb2 as members_pb
from shoal.v1 import group_pb2
from shoal.v1 import job_pb2 as pb


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
            f"same version on all members of a cluster ({docs_url('how-to/upgrades')})",
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


def check_load(load: ServerLoad) -> None:
    """Checks the undelivered norms and broken replicas in a server's heartbeat: their number, ages and texts.

    Raises:
        LimitExceeded: They are too many, or a text is too long.
        BadRequest: A text has control characters, or an age is not a number of seconds.
    """
    if len(load.undelivered_norms) > catalogue.UNDELIVERED_NORMS.default:
        raise catalogue.UNDELIVERED_NORMS.refusal(f"a heartbeat has {len(load.undelivered_norms)} undelivered norms")
    for norm in load.undelivered_norms:
        if not 0 <= norm.seconds < math.inf:
            raise errors.BadRequest(f"an undelivered norm is {norm.seconds} s old; it must be finite and at least 0")
        for text in (norm.job, norm.server, norm.reason):
            check_text("a text of an undelivered norm", text)
    if len(load.broken_replicas) > catalogue.BROKEN_REPLICAS.default:
        raise catalogue.BROKEN_REPLICAS.refusal(f"a heartbeat has {len(load.broken_replicas)} broken replicas")
    for replica in load.broken_replicas:
        for text in (replica.job, replica.reason):
            check_text("a text of a broken replica", text)


def check_submission(spec: Job, token: str) -> None:
    """Checks what the specification itself does not check: texts, the number of patterns, and the program's module.

    Raises:
        BadRequest: A text has control characters.
        LimitExceeded: A text is too long, or the optimizer has too many patterns or groups.
        InvalidJob: The program's name is that of a file, or the program is in `__main__`.
        ProgramNotAllowed: The program is in Python's standard library.
    """
    owner = f"of job {spec.name}"
    check_text(f"token {owner}", token)
    check_text(f"program {owner}", spec.program)
    check_text(f"metric of evaluation {owner}", spec.evaluation.metric if spec.evaluation else "")
    patterns = spec.optimizer.decay_exclude
    if len(patterns) > catalogue.DECAY_PATTERNS.default:
        raise catalogue.DECAY_PATTERNS.refusal(f"decay_exclude {owner} has {len(patterns)} patterns")
    if len(spec.optimizer.groups) > catalogue.OPTIMIZER_GROUPS.default:
        raise catalogue.OPTIMIZER_GROUPS.refusal(f"the optimizer {owner} has {len(spec.optimizer.groups)} groups")
    for pattern in patterns:
        check_text(f"a pattern of decay_exclude {owner}", pattern)
    for group in spec.optimizer.groups:
        check_text(f"the pattern of a group of the optimizer {owner}", group.pattern)
    check_importable(spec.program)


def check_step(what: str, step: int) -> None:
    """Checks a worker's step.

    Args:
        what: what has the step, as the error names it.
        step: the step.

    Raises:
        BadRequest: the step is not below the limit.
    """
    if step >= limits.MAX_STEP:
        raise catalogue.MAX_STEP.refusal(f"{what} has step {step}", step=step)


def check_evaluation(request: pb.ReportEvaluationRequest) -> None:
    """Checks the step of an evaluation, and the number and the names of its values.

    Raises:
        BadRequest: The step is too large, or a name is not valid.
        LimitExceeded: There are too many values.
    """
    what, values = f"the evaluation of {request.worker} on job {request.job}", request.result.values
    check_step(what, request.result.step)
    if len(values) > limits.METRICS:
        raise catalogue.METRICS.refusal(f"{what} has {len(values)} values")
    for name in values:
        if not is_name(name):
            raise errors.BadRequest(f"{what} has a value named {name!r:.80}; a name must be {NAMES}")
        check_text("the name of a value", name)


def check_rank_times(who: str, times: group_pb2.RankTimes) -> None:
    """Checks the times of a rank.

    Args:
        who: What carries them.
        times: The times.

    Raises:
        BadRequest: A time is not finite or is below 0, or the stage is none of its pipeline.
        LimitExceeded: A count is too large.
    """
    stage = times.stage
    waited = (times.seconds, times.local_reduce, times.wait, times.transfer, stage.seconds, stage.wait)
    if not (min(waited) >= 0 and math.isfinite(sum(waited))):
        raise errors.BadRequest(f"{who} has a time of a rank that is not finite or is below 0")
    if (most := max(times.steps, times.calls, stage.micro_batches)) >= limits.MAX_STEP:
        raise catalogue.MAX_STEP.refusal(f"{who} has a count of {most}")
    if stage.stages > catalogue.GROUP_RANKS.default:
        raise catalogue.GROUP_RANKS.refusal(f"{who} has a pipeline of {stage.stages} stages")
    if times.HasField("stage") and not (stage.stage < stage.stages and stage.micro_batches):
        raise errors.BadRequest(
            f"{who} has stage {stage.stage} of {stage.stages} with {stage.micro_batches} micro-batches; stages count "
            "from 0, and a step has 1 or more micro-batches"
        )


__all__ = [
    "check_evaluation",
    "check_load",
    "check_rank_times",
    "check_registration",
    "check_step",
    "check_submission",
]
