"""The commands `python -m shoal.slurm prepare|task|unfinished|workers|env`: a run without submitit, for sbatch."""

import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from shoal import errors
from shoal._cli.job_options import with_job_options
from shoal._cli.output import Output
from shoal._engines import ROLES
from shoal.job import Job
from shoal.slurm._requeue import refusal
from shoal.slurm._run_folder import Phase, RunFolder
from shoal.slurm._signals import UNFINISHED
from shoal.slurm._submission import make_plan
from shoal.slurm._task import Unfinished, place_here, run_helper, run_task

app = typer.Typer(no_args_is_help=True, help="Tasks of a Shoal run in an allocation of Slurm.", add_completion=False)

_RunPath = Annotated[Path, typer.Option("--folder", help="Folder of the run, on a file system that all nodes share.")]


@app.command()
@with_job_options
def prepare(
    job: Callable[[], Job],
    context: typer.Context,
    folder: _RunPath,
    servers: Annotated[int, typer.Option(min=1, help="Number of servers.")] = 1,
    path: Annotated[
        list[Path] | None,
        typer.Option(help="Folder to import programs from. Repeatable. Default: the working directory."),
    ] = None,
    allow_program: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Program that the job may name; see `shoal worker --help`. Repeatable."),
    ] = None,
    trainer_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Environment variable that programs get. Repeatable."),
    ] = None,
    checkpoints: Annotated[
        str,
        typer.Option(
            help="URL or shared folder for the checkpoints of this run. Default: a folder in that of the run."
        ),
    ] = "",
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds for which tasks wait for each other.")] = 300.0,
    save_timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds that servers may take to save the job. sbatch --signal needs 50 more."),
    ] = 60.0,
    device: Annotated[
        str, typer.Option(help="Device of each worker. Default: tasks take the GPUs that they see in turn.")
    ] = "",
    flag: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=OPTION",
            help=f"Further option of a role, such as server=--log-level=info. Repeatable. Roles: {', '.join(ROLES)}.",
        ),
    ] = None,
) -> None:
    """Writes the job to the folder of the run, with new certificates if it has none. Give the job a --name."""
    with Output(as_json=False):
        if not context.params.get("name"):
            raise errors.BadRequest("the job has no name; give it a --name, by which the next start finds it")
        wanted, flags = job(), parse_flags(flag or ())
        if device:
            flags.setdefault("worker", []).extend(("--device", device))
        counts = {"servers": servers, "workers": wanted.workers}
        programs = {"path": path or ".", "allow_programs": allow_program or (), "trainer_env": trainer_env or ()}
        times = {"start_timeout_s": start_timeout, "save_timeout_s": save_timeout}
        plan = make_plan(wanted, checkpoints=checkpoints, flags=flags, **counts, **programs, **times)
        files = RunFolder(folder)
        run = os.environ.get("SLURM_JOB_ID", "")
        files.refuse_second(run)
        files.prepare(plan, run)


@app.command()
def task(folder: _RunPath) -> None:
    """Runs the role of this task, as srun starts it. The exit status is 75 if the allocation ends before the job."""
    with Output(as_json=False):
        try:
            run_task(RunFolder(folder), place_here())
        except Unfinished:
            raise SystemExit(UNFINISHED) from None


@app.command()
def unfinished(
    folder: _RunPath,
    attempts: Annotated[
        int, typer.Option(min=1, help="Allocations in a row without a new checkpoint after which the run ends.")
    ] = 3,
) -> None:
    """Exits with the status 0 if this allocation ended before the job and should be requeued, else with 1."""
    with Output(as_json=False):
        job, restarts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
        if not job:
            raise errors.BadRequest("SLURM_JOB_ID is not set; run this command in a script of sbatch")
        if reason := refusal(RunFolder(folder), job, restarts, attempts):
            typer.echo(reason, err=True)
            raise SystemExit(1)


@app.command()
def env(folder: _RunPath) -> None:
    """Prints the environment variables with which `shoal` uses the run's cluster, as commands of a shell."""
    with Output(as_json=False):
        files = RunFolder(folder)
        files.plan()
        said = files.announced()
        if said is None or said.phase is Phase.ENDED or not said.address:
            raise errors.Unreachable(f"the coordinator of the run in {files.path} does not run; try again later")
        for name, value in {**files.tls("admin"), "SHOAL_COORDINATOR": said.address}.items():
            typer.echo(f"export {name}={shlex.quote(value)}")


@app.command()
def workers(folder: _RunPath) -> None:
    """Runs one more worker for a run that goes on in another allocation. The job needs a larger --max-workers."""
    with Output(as_json=False):
        run_helper(RunFolder(folder), place_here())


def parse_flags(given: Iterable[str]) -> dict[str, list[str]]:
    """Returns the further options by role.

    Args:
        given: ROLE=OPTION each.

    Raises:
        BadRequest: a text has another form.
    """
    flags: dict[str, list[str]] = {}
    for text in given:
        role, equals, option = text.partition("=")
        if role not in ROLES or not equals:
            raise errors.BadRequest(f"--flag {text!r} is not ROLE=OPTION; use one of the roles {', '.join(ROLES)}")
        flags.setdefault(role, []).append(option)
    return flags


__all__ = ["app", "parse_flags"]
