"""Live output for a job until it ends: a progress bar for people, JSON events for machines."""

from collections import deque
from collections.abc import Collection, Iterable

import typer

from shoal import errors
from shoal._cli.output import INTERRUPTED, Output
from shoal._display import ProgressBar, counted, first_line, format_metrics, records
from shoal.callbacks import Callback
from shoal.client import JobHandle
from shoal.events import Event, LogLine
from shoal.status import Evaluation, JobResult

# Log lines that are compared with the reason of a failure. A traceback is shorter.
_SHOWN_LINES = 500


def follow(
    job: JobHandle, out: Output, callbacks: Iterable[Callback] = (), timeout_s: float | None = None
) -> JobResult:
    """Shows the events of a job until it ends: with a progress bar on a terminal, else as lines.

    Ctrl-C ends the command, not the job.

    Args:
        job: the job to follow.
        out: the command's output.
        callbacks: called with each event before it is shown.
        timeout_s: time limit in seconds; None means no limit.

    Returns:
        The result of the job.

    Raises:
        JobFailed: the job failed.
        Cancelled: the job was cancelled.
        DeadlineExceeded: the job has not ended in time.
    """

    def record(event: Event) -> None:
        out.record(records.event(event))

    try:
        if out.as_json:
            return job.wait(timeout_s, [*callbacks, record])
        shown_lines: deque[str] = deque(maxlen=_SHOWN_LINES)

        def note(event: Event) -> None:
            if isinstance(event, LogLine):
                shown_lines.extend(event.text.splitlines())

        try:
            with ProgressBar(job.status().job, console=out.errors) as bar:
                return job.wait(timeout_s, [*callbacks, bar, note])
        except errors.JobFailed as error:
            raise errors.JobFailed(without_shown_lines(error.message, shown_lines), **error.details) from None
    except KeyboardInterrupt:
        out.errors.print(f"{job.name} continues to run; `shoal cancel {job.name}` cancels it")
        raise typer.Exit(INTERRUPTED) from None


def without_shown_lines(message: str, shown_lines: Collection[str]) -> str:
    """Returns the message of a failure without what the job's log lines have already said.

    Args:
        message: the message, whose first line may end with the first line of an error, and whose other lines are its
            traceback.
        shown_lines: the lines that the user has seen.
    """
    first, *trace = message.splitlines()
    said = max((line for line in shown_lines if line and first.endswith(line)), key=len, default="")
    if not said or any(line not in shown_lines for line in trace):
        return message
    return f"{first.removesuffix(said).rstrip(': ')}, as the lines above say"


def summary(result: JobResult, metric: str = "") -> str:
    """Formats the result of a job: one line, plus one each for the reason and the evaluations."""
    done = result.progress
    trained = " without a step"
    if done.steps:
        earlier = f" in all, {done.steps - done.earlier_steps:,} of them in this job" if done.earlier_steps else ""
        trained = (
            f": {counted(done.steps, 'step')}{earlier}, {done.samples_per_s:,.0f} samples/s, "
            f"loss {done.loss:.4g}, staleness p50 {done.staleness_p50:g} max {done.staleness_max}"
            + (f", {done.rejected} rejected" if done.rejected else "")
            + (f", {done.dropped} dropped" if done.dropped else "")
        )
    lines = [f"{result.job} succeeded in {result.seconds:.1f} s{trained}"]
    if result.reason:
        lines.append(first_line(result.reason))
    return "\n".join([*lines, *evaluations(result.evaluation, result.best, metric)])


def evaluations(latest: Evaluation | None, best: Evaluation | None, metric: str = "") -> list[str]:
    """Formats the latest and the best evaluation, one line each, or one line if they are the same."""
    one = latest and best and latest.number == best.number
    shown = [("latest and best", latest)] if one else [("latest", latest), ("best", best)]
    return [f"{which} evaluation: step {it.step:,}, {format_metrics(it.values, metric)}" for which, it in shown if it]


__all__ = ["evaluations", "follow", "summary", "without_shown_lines"]
