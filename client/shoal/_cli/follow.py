"""Watching a job until it ends: a live bar for people, its events for machines."""

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from shoal import status
from shoal._cli import records
from shoal._cli.output import Output
from shoal.client import JobHandle
from shoal.events import CheckpointEnded, Event, LogLine, MetricsReported, StateChanged
from shoal.job import Job
from shoal.status import JobResult


def follow(job: JobHandle, out: Output) -> JobResult:
    """Shows what happens to a job until it ends: on a terminal with a bar, elsewhere its states and log lines.

    Raises:
        JobFailed, Cancelled: it ended without success.
    """
    if out.as_json:
        for event in job.events():
            out.record(records.event(event))
    else:
        _show(job, out)
    return job.result()


def summary(result: JobResult) -> str:
    """A job's end in one line."""
    done = result.progress
    if not done.steps:
        return f"{result.job} succeeded in {result.seconds:.1f} s without a step"
    return (
        f"{result.job} succeeded in {result.seconds:.1f} s: {done.steps:,} steps, {done.samples_per_s:,.0f} samples/s, "
        f"loss {done.loss:.4g}, staleness p50 {done.staleness_p50:g} max {done.staleness_max}"
        + (f", {done.rejected} rejected" if done.rejected else "")
        + (f", {done.dropped} dropped" if done.dropped else "")
    )


def first_line(reason: str) -> str:
    """A reason without the traceback that may follow."""
    return reason.partition("\n")[0]


def checkpoint(event: CheckpointEnded) -> str:
    """What became of a checkpoint, in one line."""
    if event.saved is None:
        return f"checkpoint failed, training goes on: {first_line(event.failure)}"
    saved = event.saved
    return f"checkpoint {saved.number}: step {saved.step:,}, {saved.nbytes:,} bytes in {event.seconds:.1f} s"


def _show(job: JobHandle, out: Output) -> None:
    submitted = job.status().job
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeRemainingColumn(),
        console=out.errors,
        disable=not out.errors.is_terminal,
    )
    with bar:
        task = bar.add_task(f"{job.name} pending", total=None, figures="")
        for event in job.events():
            _update(bar, task, submitted, event)


def _update(bar: Progress, task: TaskID, job: Job, event: Event) -> None:
    match event:
        case StateChanged():
            bar.update(task, description=f"{job.name} {event.state.value}")
            why = "" if event.state.finished else first_line(event.reason)  # of its end, the command says more
            bar.console.print(Text(f"{job.name} {event.state.value}" + (f": {why}" if why else "")), soft_wrap=True)
        case CheckpointEnded():
            bar.console.print(Text(f"{job.name} {checkpoint(event)}"), soft_wrap=True)
        case LogLine():
            bar.console.print(Text(str(event)), soft_wrap=True)
        case MetricsReported():
            # What is known to end: the data if there is any, else the steps.
            now = event.progress
            completed, total = (
                (now.samples, now.total_samples) if now.total_samples else (now.steps, job.max_steps * job.workers)
            )
            bar.update(task, completed=completed, total=total or None, figures=_figures(now))


def _figures(now: status.Progress) -> str:
    """Loss, samples a second, staleness (median/largest): short, so that the line fits 80 columns."""
    return f"loss {now.loss:.3g} · {now.samples_per_s:,.0f}/s · stale {now.staleness_p50:g}/{now.staleness_max}"


__all__ = ["checkpoint", "first_line", "follow", "summary"]
