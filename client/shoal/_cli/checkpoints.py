"""Commands on checkpoints, which need a folder and no cluster: checkpoints ls, show, verify and rm; export, import."""

import time
from pathlib import Path
from typing import Annotated

import typer

from shoal import errors
from shoal._cli import options
from shoal._cli.output import Output, Row
from shoal._display import figures, records
from shoal.checkpoints import Checkpoint, Checkpoints

app = typer.Typer(no_args_is_help=True, help="Looks at the checkpoints in a folder.")

FolderOption = Annotated[
    str,
    typer.Option(
        "--checkpoints", envvar="SHOAL_CHECKPOINTS", help="The folder or URL of checkpoints.", show_default=False
    ),
]
# What has no manifest.
_TORN = "has no manifest: it is being written, or its writer died; `shoal checkpoints rm` takes what is left of it"
_COLUMNS = ["checkpoint", "step", "version", "bytes", "variables", "made", "best evaluation"]
NameArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="JOB for its newest checkpoint, JOB/NUMBER, or JOB/best.")
]


@app.command()
def ls(
    folder: FolderOption,
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="Only those of this job.")] = "",
    as_json: options.JsonOption = False,
) -> None:
    """Lists checkpoints that are whole, newest first, and says of damaged and torn ones what is wrong."""
    with Output(as_json) as out:
        checkpoints = Checkpoints(folder)
        found, torn = [*checkpoints.list(job)], [*checkpoints.incomplete(job)]
        if job and not found and not torn:
            raise errors.UnknownCheckpoint(
                f"there is no checkpoint of {job} in {checkpoints.url}; `shoal checkpoints ls` lists all",
                checkpoint=job,
            )
        if as_json:
            for it in found:
                out.record(
                    records.stored_checkpoint(it) if isinstance(it, Checkpoint) else records.damaged_checkpoint(it)
                )
            for name in torn:
                out.record(records.damaged_checkpoint(errors.UnknownCheckpoint(f"{name} {_TORN}", checkpoint=name)))
            return
        rows = [_row(it) for it in found if isinstance(it, Checkpoint)]
        notes = [it.message for it in found if isinstance(it, errors.ShoalError)]
        if torn:
            notes.append(f"{', '.join(torn)}: {_TORN}")
        if not rows:
            notes.append(f"there is no whole checkpoint in {checkpoints.url}")
        out.rows("", _COLUMNS, rows, optional=["version", "variables"], notes=notes)


@app.command()
def show(name: NameArgument, folder: FolderOption, as_json: options.JsonOption = False) -> None:
    """Shows a checkpoint and its variables."""
    with Output(as_json) as out:
        found = Checkpoints(folder).show(name)
        if as_json:
            out.record(records.stored_checkpoint(found))
            return
        _tell_passed_by(found, out)
        rows: list[tuple[list[str], Row]] = [
            ([variable, str(list(shape)), dtype], {}) for variable, (shape, dtype) in found.variables.items()
        ]
        out.rows(_sentence(found), ["variable", "shape", "dtype"], rows)


@app.command()
def verify(name: NameArgument, folder: FolderOption, as_json: options.JsonOption = False) -> None:
    """Reads all of a checkpoint and compares it with its checksums."""
    with Output(as_json) as out:
        found = Checkpoints(folder).verify(name)
        _tell_passed_by(found, out)
        out.say(f"{found} is whole: {found.nbytes:,} bytes are as they were written", records.stored_checkpoint(found))


@app.command()
def rm(
    name: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="JOB/NUMBER; with --all JOB.")],
    folder: FolderOption,
    whole_job: Annotated[bool, typer.Option("--all", help="All checkpoints of the job.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Removes a checkpoint, be it whole, damaged or torn; with --all, all of a job."""
    with Output(as_json) as out:
        checkpoints = Checkpoints(folder)
        if whole_job:
            removed = checkpoints.remove_all(name)
        else:
            checkpoints.remove(name)
            removed = (name,)
        for it in removed:
            out.say(f"{it} is removed", {"checkpoint": it, "removed": True})


def export(
    name: NameArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="Written whole or not at all.")],
    folder: FolderOption,
    as_json: options.JsonOption = False,
) -> None:
    """Writes a checkpoint's variables to one safetensors file, which PyTorch, JAX and others read."""
    with Output(as_json) as out:
        found = Checkpoints(folder).export(name, file)
        _tell_passed_by(found, out)
        out.say(
            f"{file}: {len(found.variables)} variables of {found}",
            {**records.stored_checkpoint(found), "file": str(file)},
        )


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="Of any framework.")],
    job: Annotated[str, typer.Argument(metavar="JOB", help="The name that the checkpoint is to be found by.")],
    folder: FolderOption,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="NAME", help="Leave this tensor out; repeatable.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Makes a checkpoint of a safetensors file."""
    with Output(as_json) as out:
        found = Checkpoints(folder).import_file(file, job, skip=skip or [])
        out.say(f"{found} is made of {file}: {len(found.variables)} variables", records.stored_checkpoint(found))


def _row(found: Checkpoint) -> tuple[list[str], Row]:
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.created_at))
    counts = [f"{found.step:,}", f"{found.version:,}", f"{found.nbytes:,}", f"{len(found.variables):,}"]
    return [str(found), *counts, made, _best(found) or "-"], records.stored_checkpoint(found)


def _tell_passed_by(found: Checkpoint, out: Output) -> None:
    if not out.as_json:  # whose record has it
        for problem in found.passed_by:
            out.errors.print(f"passed by {problem}", soft_wrap=True)


def _sentence(found: Checkpoint) -> str:
    best = f", best evaluation so far: {_best(found)}" if found.evaluation else ""
    return f"{found}: step {found.step:,}, {found.version:,} updates, {found.nbytes:,} bytes{best}"


def _best(found: Checkpoint) -> str:
    """What was found at the evaluation that it was taken at; and at which step, if that is not its own."""
    best = found.evaluation
    if best is None:
        return ""
    return figures(best.values) + (f" (evaluated at step {best.step:,})" if best.step != found.step else "")


__all__ = ["app", "export", "import_"]
