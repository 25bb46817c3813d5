"""Commands on checkpoints, which need a folder and no cluster: checkpoints ls, show, verify and rm; export, import."""

import time
from pathlib import Path
from typing import Annotated

import typer

from shoal import errors
from shoal._cli import options
from shoal._cli.output import Output, Row
from shoal.checkpoints import Checkpoint, Checkpoints

app = typer.Typer(no_args_is_help=True, help="Looks at the checkpoints in a folder.")

FolderOption = Annotated[
    str,
    typer.Option(
        "--checkpoints", envvar="SHOAL_CHECKPOINTS", help="The folder or URL of checkpoints.", show_default=False
    ),
]
NameArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="JOB for its newest checkpoint, or JOB/NUMBER.")
]


@app.command()
def ls(
    folder: FolderOption,
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="Only those of this job.")] = "",
    as_json: options.JsonOption = False,
) -> None:
    """Lists checkpoints that are whole, newest first, and says of damaged ones what is wrong."""
    with Output(as_json) as out:
        found = [*Checkpoints(folder).list(job)]
        rows = [_row(it) for it in found if isinstance(it, Checkpoint)]
        notes = [it.message for it in found if isinstance(it, errors.ShoalError)]
        out.rows("", ["checkpoint", "step", "version", "bytes", "variables", "made"], rows, notes=notes)


@app.command()
def show(name: NameArgument, folder: FolderOption, as_json: options.JsonOption = False) -> None:
    """Shows a checkpoint and its variables."""
    with Output(as_json) as out:
        found = Checkpoints(folder).show(name)
        if as_json:
            out.record(_record(found))
            return
        rows: list[tuple[list[str], Row]] = [
            ([variable, str(list(shape)), dtype], {}) for variable, (shape, dtype) in found.variables.items()
        ]
        out.rows(_sentence(found), ["variable", "shape", "dtype"], rows)


@app.command()
def verify(name: NameArgument, folder: FolderOption, as_json: options.JsonOption = False) -> None:
    """Reads all of a checkpoint and compares it with its checksums."""
    with Output(as_json) as out:
        found = Checkpoints(folder).verify(name)
        out.say(f"{found} is whole: {found.nbytes:,} bytes are as they were written", _record(found))


@app.command()
def rm(name: NameArgument, folder: FolderOption, as_json: options.JsonOption = False) -> None:
    """Removes a checkpoint, which is named with its number."""
    with Output(as_json) as out:
        Checkpoints(folder).remove(name)
        out.say(f"{name} is removed", {"checkpoint": name, "removed": True})


def export(
    name: NameArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="Written whole or not at all.")],
    folder: FolderOption,
    as_json: options.JsonOption = False,
) -> None:
    """Writes a checkpoint's variables to one safetensors file, which PyTorch, JAX and others read."""
    with Output(as_json) as out:
        found = Checkpoints(folder).export(name, file)
        out.say(f"{file}: {len(found.variables)} variables of {found}", {**_record(found), "file": str(file)})


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="Of any framework.")],
    job: Annotated[str, typer.Argument(metavar="JOB", help="The name that the checkpoint is to be found by.")],
    folder: FolderOption,
    as_json: options.JsonOption = False,
) -> None:
    """Makes a checkpoint of a safetensors file."""
    with Output(as_json) as out:
        found = Checkpoints(folder).import_file(file, job)
        out.say(f"{found} is made of {file}: {len(found.variables)} variables", _record(found))


def _row(found: Checkpoint) -> tuple[list[str], Row]:
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.created_at))
    figures = [f"{found.step:,}", f"{found.version:,}", f"{found.nbytes:,}", f"{len(found.variables):,}", made]
    return [str(found), *figures], _record(found)


def _record(found: Checkpoint) -> Row:
    return {
        "job": found.job,
        "number": found.number,
        "created_at": found.created_at,
        "step": found.step,
        "version": found.version,
        "bytes": found.nbytes,
        "variables": {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in found.variables.items()},
    }


def _sentence(found: Checkpoint) -> str:
    return f"{found}: step {found.step:,}, {found.version:,} updates, {found.nbytes:,} bytes"


__all__ = ["app", "export", "import_"]
