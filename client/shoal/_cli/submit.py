"""The command `submit`."""

from collections.abc import Callable
from typing import Annotated

import typer

from shoal._cli import options
from shoal._cli.job_options import with_job_options
from shoal._cli.job_watch import follow as follow_job
from shoal._cli.job_watch import summary
from shoal._cli.output import Output
from shoal._display import records
from shoal.job import Job


@with_job_options
@options.connected
def submit(
    job: Callable[[], Job],
    connect: options.Connect,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Shows progress until the job ends, and exits as `shoal wait` does. Ctrl-C leaves the job running.",
        ),
    ] = False,
    tensorboard: options.TensorBoardOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Submits a job. Returns at once, unless --follow is given.

    With --json, the command prints the job. With --json and --follow, it then prints the job's events and its result.
    """
    with (
        Output(as_json) as out,
        options.tensorboard(tensorboard, waiting=follow) as callbacks,
        connect() as client,
    ):
        wanted = job()
        handle = client.submit(wanted)
        if out.as_json:
            out.record(records.job(handle.status()))
        elif not follow:
            out.message(f"submitted {handle.name}; watch it with `shoal wait --follow {handle.name}`", {})
        if follow:
            result = follow_job(handle, out, callbacks)
            metric = wanted.evaluation.metric if wanted.evaluation else ""
            out.message(summary(result, metric), records.result(result))


__all__ = ["submit"]
