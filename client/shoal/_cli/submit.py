"""The command `submit`."""

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from shoal._cli import options
from shoal._cli.job_options import with_job_options
from shoal._cli.job_watch import follow as follow_job
from shoal._cli.job_watch import summary
from shoal._cli.output import INTERRUPTED, Output
from shoal._display import records
from shoal.callbacks import Callback
from shoal.client import Client, JobHandle
from shoal.job import Job


@with_job_options
def submit(
    job: Callable[[], Job],
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Shows progress until the job ends, and exits as `shoal wait` does. Ctrl-C leaves the job running.",
        ),
    ] = False,
    tensorboard: options.TensorBoardOption = None,
    coordinator: options.CoordinatorOption = options.DEFAULT_ADDRESS,
    retry_for: options.RetryOption = 20.0,
    as_json: options.JsonOption = False,
) -> None:
    """Submits a job.

    With --json, the command prints the job. With --json and --follow, it then prints the job's events and its result.
    """
    with (
        Output(as_json) as out,
        options.tensorboard(tensorboard, waiting=follow) as callbacks,
        Client(coordinator, retry_for_s=retry_for) as client,
    ):
        wanted = job()
        handle = client.submit(wanted)
        if out.as_json:
            out.record(records.job(handle.status()))
        elif not follow:
            out.message(f"submitted {handle.name}; watch it with `shoal logs --follow {handle.name}`", {})
        if follow:
            _follow(handle, out, wanted, callbacks)


def _follow(handle: JobHandle, out: Output, job: Job, callbacks: Iterable[Callback]) -> None:
    try:
        result = follow_job(handle, out, callbacks)
    except KeyboardInterrupt:
        out.errors.print(f"{handle.name} continues to run; `shoal cancel {handle.name}` cancels it")
        raise typer.Exit(INTERRUPTED) from None
    metric = job.evaluation.metric if job.evaluation else ""
    out.message(summary(result, metric), records.result(result))


__all__ = ["submit"]
