"""Commands on jobs that are there: jobs, wait, logs, data, timings, cancel, drop, pull."""

import sys
import time
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import typer

from shoal import errors
from shoal._cli import options
from shoal._cli.job_watch import evaluations, summary
from shoal._cli.output import Output, Row
from shoal._display import duration, first_line, records
from shoal._system import atomic_write
from shoal._wire.limits import KEPT_TIMINGS
from shoal.client import Client
from shoal.events import LogLine
from shoal.status import DataAccount, DataCount, JobStatus, StepTiming
from shoal.timings import PHASES

# Columns of `shoal jobs` that go where the screen is narrow, in this order.
_OPTIONAL = ["age", "stale", "left", "samples/s", "program", "loss", "workers"]
# The file that is standard output: in a container it is the way out.
_STDOUT = Path("-")


def jobs(
    coordinator: options.CoordinatorOption = options.DEFAULT_ADDRESS,
    retry_for: options.RetryOption = 20.0,
    as_json: options.JsonOption = False,
) -> None:
    """Lists all jobs, newest first, what those wait for that do, and what evaluations found.

    A narrow screen gets fewer columns; --json has everything.
    """
    columns = ["job", "state", "program", "mode", "workers", "steps", "samples/s", "loss", "stale", "left", "age"]
    with Output(as_json) as out, Client(coordinator, retry_for_s=retry_for) as client:
        now, found = time.time(), client.jobs()
        rows = [_job_row(status, now) for status in found]
        notes = [f"{status.name}: {note}" for status in found for note in _notes(status)]
        out.rows("", columns, rows, optional=_OPTIONAL, notes=notes)


def wait(
    job: options.JobArgument,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds; by default as long as it takes.")] = None,
    tensorboard: options.TensorBoardOption = None,
    coordinator: options.CoordinatorOption = options.DEFAULT_ADDRESS,
    retry_for: options.RetryOption = 20.0,
    as_json: options.JsonOption = False,
) -> None:
    """Waits for a job's end, and ends as it does."""
    with Output(as_json) as out, Client(coordinator, retry_for_s=retry_for) as client:
        with options.tensorboard(tensorboard) as callbacks:
            result = client.job(job).wait(timeout, callbacks)
        out.say(summary(result), records.result(result))


def logs(
    job: options.JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the job has ended.")] = False,
    coordinator: options.CoordinatorOption = options.DEFAULT_ADDRESS,
    retry_for: options.RetryOption = 20.0,
    as_json: options.JsonOption = False,
) -> None:
    """Prints the lines that a job's programs wrote."""
    with Output(as_json) as out, Client(coordinator, retry_for_s=retry_for) as client:
        for event in client.job(job).events(follow=follow):
            if isinstance(event, LogLine):
                out.say(str(event), records.event(event))


def checkpoint(
    job: options.JobArgument,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds; by default as long as it takes.")] = None,
    coordinator: options.CoordinatorOption = options.DEFAULT_ADDRESS,
    retry_for: options.RetryOption = 20.0,
    as_json: options.JsonOption = False,
) -> None:
    """Takes a checkpoint while training goes on, and waits until it is whole."""
    with Output(as_json) as out, Client(coordinator, retry_for_s=retry_for) as client:
        saved = client.job(job).checkpoint(timeout)
        out.say(
            f"{job}/{saved.number}: step {saved.step:,}, {saved.nbytes:,} bytes",
            {"job": job, **records.checkpoint(saved)},
        )


def data(
    job: options.JobArgument,
    coordinator: options.CoordinatorOption = options.DEFAULT_ADDRESS,
    retry_for: options.RetryOption = 20.0,
    as_json: options.JsonOption = False,
) -> None:
    """Shows the account of a job's data: which samples are done, who holds which, and which still wait."""
    columns = ["epoch", "done", "leased", "loose", "untouched", "held by"]
    with Output(as_json) as out, Client(coordinator, retry_for_s=retry_for) as client:
        account = client.job(job).data()
        if as_json:
            out.record(records.data(job, account))
            return
        epochs: list[tuple[list[str], Row]] = [
            ([str(epoch), *_counts(count), _holders(account, epoch)], {})
            for epoch, count in account.in_progress.items()
        ]
        total: tuple[list[str], Row] = (["all", *_counts(account.total), ""], {})
        out.rows(_data_title(job, account), columns, [*epochs, total])


def timings(
    job: options.JobArgument,
    coordinator: options.CoordinatorOption = options.DEFAULT_ADDRESS,
    retry_for: options.RetryOption = 20.0,
    as_json: options.JsonOption = False,
) -> None:
    """Shows where the time of a job's latest steps went, in milliseconds, and who is slower than the others.

    Medians of each worker; "own" is all but pull and wait, "slowest" the share of steps in which that was the longest.
    """
    columns = ["worker", "step", *PHASES, "own", "slowest"]
    with Output(as_json) as out, Client(coordinator, retry_for_s=retry_for) as client:
        found = client.timings(job, last=KEPT_TIMINGS)
        if as_json:
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


def cancel(
    job: options.JobArgument,
    coordinator: options.CoordinatorOption = options.DEFAULT_ADDRESS,
    retry_for: options.RetryOption = 20.0,
    as_json: options.JsonOption = False,
) -> None:
    """Ends a job; one that has ended stays as it is."""
    with Output(as_json) as out, Client(coordinator, retry_for_s=retry_for) as client:
        status = client.cancel(job)
        out.say(f"{job} is {status.state.value}", records.job(status))


def drop(
    job: options.JobArgument,
    coordinator: options.CoordinatorOption = options.DEFAULT_ADDRESS,
    retry_for: options.RetryOption = 20.0,
    as_json: options.JsonOption = False,
) -> None:
    """Frees an ended job's variables and forgets it."""
    with Output(as_json) as out, Client(coordinator, retry_for_s=retry_for) as client:
        client.drop(job)
        out.say(f"{job} is dropped", {"name": job, "dropped": True})


def pull(
    job: options.JobArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE.npz", help="Written whole or not at all; -: standard output.")],
    coordinator: options.CoordinatorOption = options.DEFAULT_ADDRESS,
    retry_for: options.RetryOption = 20.0,
    as_json: options.JsonOption = False,
) -> None:
    """Saves a job's variables as they are now, for `numpy.load`.

    bfloat16 is saved as float32, which holds it exactly.
    """
    with Output(as_json) as out, Client(coordinator, retry_for_s=retry_for) as client:
        if obstacle := _obstacle(file):  # before much is pulled for nothing
            raise _cannot_write(file, obstacle)
        variables = client.pull(job)
        _save(file, variables)
        size = sum(array.nbytes for array in variables.values())
        out.say(
            f"{file}: {len(variables)} variables, {size:,} bytes",
            {"name": job, "file": str(file), "variables": len(variables), "bytes": size},
            beside=file == _STDOUT,
        )


def _job_row(status: JobStatus, now: float) -> tuple[list[str], Row]:
    done = status.progress
    figures = [f"{done.samples_per_s:,.0f}", f"{done.loss:.4g}", f"{done.staleness_p50:g}/{done.staleness_max}"]
    cells = [
        status.name,
        status.state.value,
        status.job.program or "(sessions)",
        str(status.job.consistency),
        f"{len(status.workers)}/{status.job.workers}",
        f"{done.steps:,}",
        *(figures if done.steps else ["-"] * len(figures)),
        "-" if status.state.finished or done.seconds_left is None else duration(done.seconds_left),
        duration(now - status.submitted_at),
    ]
    return cells, records.job(status)


def _timing_cells(worker: str, typical: StepTiming, slowest: float | None) -> list[str]:
    phases = [f"{1e3 * getattr(typical, phase):.2f}" for phase in (*PHASES, "own")]
    return [worker, f"{typical.step:,}", *phases, "-" if slowest is None else f"{slowest:.0%}"]


def _notes(status: JobStatus) -> list[str]:
    failure = status.checkpoint_failure and f"the last checkpoint failed: {first_line(status.checkpoint_failure)}"
    metric = status.job.evaluation.metric if status.job.evaluation else ""
    return [*filter(None, (first_line(status.reason), failure)), *evaluations(status.evaluation, status.best, metric)]


def _data_title(job: str, account: DataAccount) -> str:
    if not account.samples:
        return f"{job} has no data, or no worker has loaded its program yet"
    return f"{job}: {account.samples:,} samples a pass · {account.epochs} epochs · epoch {account.epoch} now"


def _counts(count: DataCount) -> list[str]:
    return [f"{number:,}" for number in (count.done, count.leased, count.loose, count.untouched)]


def _holders(account: DataAccount, epoch: int) -> str:
    held = [held for held in account.held if held.epoch == epoch]
    return ", ".join(f"{part.worker} [{part.start:,}, {part.stop:,})" for part in held)


def _obstacle(file: Path) -> str:
    """Why nothing can be written there, as far as that is known before; empty: it is not."""
    if file == _STDOUT:
        return "standard output is a terminal" if sys.stdout.isatty() else ""
    if file.is_dir():
        return "it is a folder"
    return "" if file.parent.is_dir() else f"there is no folder {file.parent}"


def _cannot_write(file: Path, why: str) -> errors.ShoalError:
    return errors.BadRequest(f"cannot write {file}: {why}; name a file in a folder that you may write to", file=file)


def _save(file: Path, variables: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Writes an .npz. Not by `numpy.savez`, which takes names as keyword arguments and cannot write bfloat16."""
    opened: AbstractContextManager[Path | BinaryIO]
    opened = nullcontext(sys.stdout.buffer) if file == _STDOUT else atomic_write(file)
    try:
        with opened as unfinished, zipfile.ZipFile(unfinished, "x") as archive:
            for name, array in variables.items():
                known = array if array.dtype.isbuiltin == 1 else array.astype(np.float32)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, known, allow_pickle=False)
    except OSError as error:
        raise _cannot_write(file, error.strerror or str(error)) from None


__all__ = ["cancel", "checkpoint", "data", "drop", "jobs", "logs", "pull", "timings", "wait"]
