"""Watching a job until it ends: a live bar for people, its events for machines."""

from collections.abc import Iterable

from shoal._cli.output import Output
from shoal._display import ProgressBar, figures, first_line, records
from shoal.callbacks import Callback
from shoal.client import JobHandle
from shoal.events import Event
from shoal.status import Evaluation, JobResult


def follow(job: JobHandle, out: Output, callbacks: Iterable[Callback] = ()) -> JobResult:
    """Shows what happens to a job until it ends: on a terminal with a bar, elsewhere its states and log lines.

    Args:
        job: which.
        out: where to.
        callbacks: called with each event before it is shown.

    Raises:
        JobFailed, Cancelled: it ended without success.
    """

    def record(event: Event) -> None:
        out.record(records.event(event))

    if out.as_json:
        return job.wait(callbacks=[*callbacks, record])
    with ProgressBar(job.status().job, console=out.errors) as bar:
        return job.wait(callbacks=[*callbacks, bar])


def summary(result: JobResult, metric: str = "") -> str:
    """A job's end in a line; one more each for what else is to be said of it, and what evaluations found."""
    done = result.progress
    trained = " without a step"
    if done.steps:
        trained = (
            f": {done.steps:,} steps, {done.samples_per_s:,.0f} samples/s, "
            f"loss {done.loss:.4g}, staleness p50 {done.staleness_p50:g} max {done.staleness_max}"
            + (f", {done.rejected} rejected" if done.rejected else "")
            + (f", {done.dropped} dropped" if done.dropped else "")
        )
    lines = [f"{result.job} succeeded in {result.seconds:.1f} s{trained}"]
    if result.reason:
        lines.append(first_line(result.reason))
    return "\n".join([*lines, *evaluations(result.evaluation, result.best, metric)])


def evaluations(latest: Evaluation | None, best: Evaluation | None, metric: str = "") -> list[str]:
    """What the latest evaluation found, and the best, a line each; one where the latest is the best."""
    one = latest and best and latest.number == best.number
    told = [("latest and best", latest)] if one else [("latest", latest), ("best", best)]
    return [f"{which} evaluation: step {it.step:,}, {figures(it.values, metric)}" for which, it in told if it]


__all__ = ["evaluations", "follow", "summary"]
