"""The commands `python -m shoal.slurm prepare|task|workers`: a run without submitit, for scripts of sbatch."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shoal._cli.job_options import with_job_options
from shoal._cli.output import Output
from shoal.job import Job
from shoal.slurm._run_folder import RunFolder, RunPlan
from shoal.slurm._signals import UNFINISHED
from shoal.slurm._submission import program_folders
from shoal.slurm._task import Unfinished, place_here, run_helper, run_task

app = typer.Typer(no_args_is_help=True, help="Tasks of a Shoal run in an allocation of Slurm.", add_completion=False)

_RunPath = Annotated[Path, typer.Option("--folder", help="Folder of the run, on a file system that all nodes share.")]


@app.command()
@with_job_options
def prepare(
    job: Callable[[], Job],
    folder: _RunPath,
    servers: Annotated[int, typer.Option(min=1, help="Number of servers.")] = 1,
    path: Annotated[
        list[Path] | None,
        typer.Option(help="Folder to import programs from. Repeatable. Default: the working directory."),
    ] = None,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds for which tasks wait for each other.")] = 300.0,
    save_timeout: Annotated[float, typer.Option(min=1, help="Seconds that servers may take to save the job.")] = 60.0,
    device: Annotated[
        str, typer.Option(help="Device of each worker. Default: tasks take the GPUs that they see in turn.")
    ] = "",
) -> None:
    """Writes the job to the folder of the run, with new certificates if it has none. Give the job a --name."""
    with Output(as_json=False):
        wanted = job()
        plan = RunPlan(
            job=wanted,
            servers=servers,
            workers=wanted.workers,
            path=program_folders(path or "."),
            flags={"worker": ["--device", device]} if device else {},
            start_timeout_s=start_timeout,
            save_timeout_s=save_timeout,
        )
        RunFolder(folder).prepare(plan)


@app.command()
def task(folder: _RunPath) -> None:
    """Runs the role of this task, as srun starts it. The exit status is 75 if the allocation ends before the job."""
    with Output(as_json=False):
        try:
            run_task(RunFolder(folder), place_here())
        except Unfinished:
            raise SystemExit(UNFINISHED) from None


@app.command()
def workers(folder: _RunPath) -> None:
    """Runs one more worker for a run that goes on in another allocation. The job needs a larger --max-workers."""
    with Output(as_json=False):
        run_helper(RunFolder(folder), place_here())


__all__ = ["app"]
