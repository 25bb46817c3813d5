"""Commands on submitted jobs.

They are `jobs`, `wait`, `logs`, `checkpoint`, `data`, `timings`, `set-learning-rate`, `cancel`, `drop` and `pull`.
"""

import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import typer

from shoal import errors
from shoal._cli import options
from shoal._cli.files import STDOUT, cannot_write, check_writable
from shoal._cli.groups import show_group, show_hybrid_groups
from shoal._cli.job_watch import evaluations, summary
from shoal._cli.job_watch import follow as follow_job
from shoal._cli.output import Output, Row
from shoal._display import counted, format_duration, records, short_reason
from shoal._system import atomic_write
from shoal._wire.limits import KEPT_TIMINGS
from shoal.events import LogLine
from shoal.status import DataAccount, DataCount, JobState, JobStatus, StepTiming, Timings
from shoal.timings import PHASES

# Columns that `shoal jobs` omits on a narrow screen, first to last.
_OPTIONAL = ["age", "stale", "eta", "samples/s", "program", "loss", "workers"]

# Ended jobs that `shoal jobs` shows without --all.
_ENDED_SHOWN = 5


@options.connected
def jobs(
    connect: options.Connect,
    everything: options.AllOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Lists jobs, newest first, with their state, what they wait for, their restarts, and their evaluations.

    "loss" is the mean over the steps of one worker's latest report: about half a second of training in a small cluster.
    `shoal metrics JOB` shows all metrics of each worker. "steps" counts the steps of all workers together.

    The table shows at most five ended jobs; --all and --json show all of them. A narrow screen shows fewer columns.
    --json prints all fields except the settings.
    """
    columns = ["job", "state", "program", "mode", "workers", "steps", "samples/s", "loss", "stale", "eta", "age"]
    with Output(as_json) as out, connect() as client:
        limited = not (everything or as_json)
        now, found = time.time(), client.jobs(ended=_ENDED_SHOWN + 1 if limited else None)  # one more tells of others
        shown = _recent(found) if limited else found
        rows = [_job_row(status, now) for status in shown]
        notes = [f"{status.name}: {note}" for status in shown for note in _notes(status)]
        if len(shown) < len(found):
            notes.append("older jobs that have ended are not shown; `shoal jobs --all` shows all jobs")
        out.rows("", columns, rows, optional=_OPTIONAL, notes=notes)


@options.connected
def wait(
    connect: options.Connect,
    job: options.JobArgument,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Shows the job's events from its start, as `shoal submit --follow` does."),
    ] = False,
    timeout: Annotated[float | None, typer.Option(min=0, help="Time limit in seconds. Default: none.")] = None,
    tensorboard: options.TensorBoardOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Waits until a job ends, and exits with an error if it failed or was cancelled."""
    with Output(as_json) as out, connect() as client:
        with options.tensorboard(tensorboard) as callbacks:
            handle = client.job(job)
            result = follow_job(handle, out, callbacks, timeout) if follow else handle.wait(timeout, callbacks)
        out.message(summary(result), records.result(result))


@options.connected
def logs(
    connect: options.Connect,
    job: options.JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Waits for further lines until the job ends.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Prints the log lines of a job's programs and sessions.

    `shoal wait --follow JOB` shows what happened to a job: its states, restarts, checkpoints and evaluations.
    """
    with Output(as_json) as out, connect() as client:
        lines = (event for event in client.job(job).events(follow=follow) if isinstance(event, LogLine))
        line = None
        for line in lines:
            out.message(str(line), records.event(line))
        if line is None and not as_json:
            note = f"{job} has no log lines; `shoal wait --follow {job}` shows the events of a job"
            out.message(note, {}, beside=True)


@options.connected
def checkpoint(
    connect: options.Connect,
    job: options.JobArgument,
    timeout: Annotated[float | None, typer.Option(min=0, help="Time limit in seconds. Default: none.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Takes a checkpoint during training, and waits until it is complete."""
    with Output(as_json) as out, connect() as client:
        saved = client.job(job).checkpoint(timeout)
        out.message(
            f"{job}/{saved.number}: step {saved.step:,}, {counted(saved.nbytes, 'byte')}",
            {"job": job, **records.checkpoint(saved)},
        )


@options.connected
def data(
    connect: options.Connect,
    job: options.JobArgument,
    as_json: options.JsonOption = False,
) -> None:
    """Shows how many samples of a job are done, leased, requeued and unleased, and which worker holds which range.

    Epochs count from 1 here. In --json they count from 0, as in Python.
    """
    columns = ["epoch", "done", "leased", "requeued", "unleased", "held by"]
    with Output(as_json) as out, connect() as client:
        account = client.job(job).data()
        if as_json:
            out.record(records.data(job, account))
            return
        epochs: list[tuple[list[str], Row]] = [
            ([f"{epoch + 1:,}", *_counts(count), _holders(account, epoch)], {})
            for epoch, count in account.in_progress.items()
        ]
        total: tuple[list[str], Row] = (["all", *_counts(account.total), ""], {})
        out.rows(_data_title(job, account), columns, [*epochs, total])


@options.connected
def timings(
    connect: options.Connect,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the job or the elastic group.")],
    group: Annotated[
        bool, typer.Option("--group", help="Takes NAME as the name of an elastic group, even if a job has it too.")
    ] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Shows the phases of a job's latest steps in milliseconds, and the slowest worker.

    The values are medians for each worker. "own" is the time without pull and wait. "slowest" is the share of steps in
    which the worker had the longest own time. If workers of the job form hybrid groups, a table for each group shows
    the times of its ranks.

    For an elastic group, it shows the seconds of each rank in the last minute by phase, and the rank that the others
    wait for. `shoal groups` lists these groups.
    """
    with Output(as_json) as out, connect() as client:
        if group:
            show_group(out, client.group(name))
            return
        try:
            found = client.timings(name, last=KEPT_TIMINGS)
        except errors.UnknownJob as unknown:
            try:
                status = client.group(name)
            except errors.UnknownGroup:
                raise unknown from None
            show_group(out, status)
            return
        _show_timings(out, name, found)


@options.connected
def set_learning_rate(
    connect: options.Connect,
    job: options.JobArgument,
    rate: Annotated[float, typer.Argument(metavar="RATE", help="The new rate: finite, 0 or more.")],
    as_json: options.JsonOption = False,
) -> None:
    """Sets the learning rate of a live job, instead of the schedule of its optimizer.

    Servers use it from their next update on. The factors of variable groups still apply. Checkpoints keep the rate.
    """
    with Output(as_json) as out, connect() as client:
        client.job(job).set_learning_rate(rate)
        out.message(f"{job} now has the learning rate {rate:g}", {"name": job, "learning_rate": rate})


@options.connected
def cancel(
    connect: options.Connect,
    job: options.JobArgument,
    as_json: options.JsonOption = False,
) -> None:
    """Cancels a job. This has no effect if the job has ended."""
    with Output(as_json) as out, connect() as client:
        status = client.cancel(job)
        out.message(f"{job} is {status.state.value}", records.job(status))


@options.connected
def drop(
    connect: options.Connect,
    job: options.JobArgument,
    as_json: options.JsonOption = False,
) -> None:
    """Removes an ended job and frees its variables."""
    with Output(as_json) as out, connect() as client:
        client.drop(job)
        out.message(f"{job} is dropped", {"name": job, "dropped": True})


@options.connected
def pull(
    connect: options.Connect,
    job: options.JobArgument,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.npz", help="File to write; it is replaced atomically. - means standard output."),
    ],
    as_json: options.JsonOption = False,
) -> None:
    """Saves the current values of a job's variables to a file for `numpy.load`.

    bfloat16 values are saved as float32, without loss.
    """
    with Output(as_json) as out, connect() as client:
        check_writable(file)
        try:
            variables = client.pull(job)
        except errors.UnknownJob as error:
            raise errors.UnknownJob(
                f"{error.message}. A coordinator without --store forgets all jobs when it restarts. "
                f"`shoal export {job} FILE` writes the values of its newest checkpoint, if it has one",
                **error.details,
            ) from None
        _save(file, variables)
        size = sum(array.nbytes for array in variables.values())
        out.message(
            f"{file}: {counted(len(variables), 'variable')}, {counted(size, 'byte')}",
            {"name": job, "file": str(file), "variables": len(variables), "bytes": size},
            beside=file == STDOUT,
        )


def _recent(found: Sequence[JobStatus]) -> list[JobStatus]:
    """Returns the jobs that have not ended and the newest of those that have, in the given order."""
    ended = [status for status in found if status.state.finished][_ENDED_SHOWN:]
    return [status for status in found if status not in ended]


def _job_row(status: JobStatus, now: float) -> tuple[list[str], Row]:
    done = status.progress
    metrics = [f"{done.samples_per_s:,.0f}", f"{done.loss:.4g}", f"{done.staleness_p50:g}/{done.staleness_max}"]
    cells = [
        status.name,
        status.state.value,
        status.job.program or "(sessions)",
        str(status.job.consistency),
        f"{len(status.workers)}/{status.job.workers}",
        f"{done.steps:,}",
        *(metrics if done.steps else ["-"] * len(metrics)),
        "-" if status.state.finished or done.seconds_left is None else format_duration(done.seconds_left),
        format_duration(now - status.submitted_at),
    ]
    return cells, records.listed_job(status)


def _show_timings(out: Output, job: str, found: Timings) -> None:
    columns = ["worker", "step", *PHASES, "own", "slowest"]
    if out.as_json:
        out.record(records.timings(job, found))
        return
    compared = found.compared()
    rows: list[tuple[list[str], Row]] = [
        (_timing_cells(worker, typical, compared.slowest.get(worker)), {})
        for worker, typical in compared.typical.items()
    ]
    verdict = str(compared.straggler or "no worker is noticeably slower than the others")
    title = f"{job}: {verdict}" if rows else f"{job} has no timings: its workers have not reported a step"
    out.rows(title, columns, rows, optional=["evaluate", "wait", "step", "read", "push"])
    show_hybrid_groups(out, found.groups.items())


def _timing_cells(worker: str, typical: StepTiming, slowest: float | None) -> list[str]:
    phases = [f"{1e3 * getattr(typical, phase):.2f}" for phase in (*PHASES, "own")]
    return [worker, f"{typical.step:,}", *phases, "-" if slowest is None else f"{slowest:.0%}"]


def _notes(status: JobStatus) -> list[str]:
    failure = status.checkpoint_failure and f"the last checkpoint failed: {short_reason(status.checkpoint_failure)}"
    metric = status.job.evaluation.metric if status.job.evaluation else ""
    waits = "; ".join(filter(None, (short_reason(status.reason), _continues_from(status))))
    facts = (waits, short_reason(status.restore_note), _began(status), _restarted(status), _copies(status), failure)
    return [
        *filter(None, facts),
        *evaluations(status.evaluation, status.best, metric),
    ]


def _copies(status: JobStatus) -> str:
    """Returns how many complete copies of its shards a job has; empty if it wants one, or if it is not placed."""
    if not status.copies:
        return ""
    often = f"; continued {status.failovers:,} times with backups" if status.failovers > 1 else ""
    often = "; continued once with backups" if status.failovers == 1 else often
    return f"copies {status.copies}/{status.job.replicas}{often}"


def _began(status: JobStatus) -> str:
    """Returns how many steps a job has from the checkpoint that it began with; empty if it has none."""
    steps = status.progress.earlier_steps
    return f"{steps:,} of its steps are those of the checkpoint that it began with" if steps else ""


def _continues_from(status: JobStatus) -> str:
    """Returns what a job that has lost its shards continues from, until it runs again; empty if that is not known."""
    newest = status.checkpoint
    if not (status.restarts and newest) or status.state.finished or status.state is JobState.RUNNING:
        return ""
    return f"continues from checkpoint {newest.number}, step {newest.step:,}"


def _restarted(status: JobStatus) -> str:
    """Returns how often a job has restarted, and what it continued from; empty if it has not restarted."""
    if not status.restarts:
        return ""
    often = "once" if status.restarts == 1 else f"{status.restarts:,} times"
    point, steps = status.restart_point, status.progress.lost_steps
    lost = f"; lost work, not counted: {counted(steps, 'step')}" if steps else ""
    if point is None:
        return f"restarted {often}{lost}"
    of_another = "" if point.job == status.name else f" of {point.job}"
    latest = "" if status.restarts == 1 else "last "
    return f"restarted {often}, {latest}continued from checkpoint {point.number}{of_another}, step {point.step:,}{lost}"


def _data_title(job: str, account: DataAccount) -> str:
    if not account.samples:
        return f"{job} has no data, or no worker has loaded its program yet"
    done = (
        f"{account.epochs_done:,} of {counted(account.epochs, 'epoch')} {'is' if account.epochs == 1 else 'are'} done"
    )
    now = f" · now in epoch {account.epoch + 1:,}" if account.epochs_done < account.epochs else ""
    return f"{job}: {counted(account.samples, 'sample')} per epoch · {done}{now}"


def _counts(count: DataCount) -> list[str]:
    return [f"{number:,}" for number in (count.done, count.leased, count.requeued, count.unleased)]


def _holders(account: DataAccount, epoch: int) -> str:
    held = [held for held in account.held if held.epoch == epoch]
    return ", ".join(f"{part.worker} [{part.start}, {part.stop})" for part in held)


def _save(file: Path, variables: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Writes an .npz file.

    `numpy.savez` takes names as keyword arguments and cannot write bfloat16.
    """
    opened: AbstractContextManager[Path | BinaryIO]
    opened = nullcontext(sys.stdout.buffer) if file == STDOUT else atomic_write(file)
    try:
        with opened as unfinished, zipfile.ZipFile(unfinished, "x") as archive:
            for name, array in variables.items():
                known = array if array.dtype.isbuiltin == 1 else array.astype(np.float32)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, known, allow_pickle=False)
    except OSError as error:
        raise cannot_write(file, error.strerror or str(error)) from None


__all__ = ["cancel", "checkpoint", "data", "drop", "jobs", "logs", "pull", "set_learning_rate", "timings", "wait"]
