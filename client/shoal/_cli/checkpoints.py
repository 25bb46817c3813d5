"""Commands on stored checkpoints: `checkpoints ls`, `show`, `verify` and `rm`; `export` and `import`.

They read the checkpoint storage and need no cluster.
"""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from shoal import errors
from shoal._checkpoint import check_folder
from shoal._cli import options
from shoal._cli.files import STDOUT, check_writable
from shoal._cli.output import Output, Row
from shoal._display import counted, format_metrics, records
from shoal._system.terminal import printable
from shoal.checkpoints import Checkpoint, Checkpoints

app = typer.Typer(no_args_is_help=True, help="Lists, checks and removes checkpoints in checkpoint storage.")

FolderOption = Annotated[
    str,
    typer.Option(
        "--checkpoints",
        envvar="SHOAL_CHECKPOINTS",
        help="Folder or URL of the checkpoint storage, such as ./checkpoints or s3://bucket/prefix.",
        show_default=False,
    ),
]
_INCOMPLETE = "has no manifest: it is being written, or its writer died; `shoal checkpoints rm` removes its files"
_COLUMNS = ["checkpoint", "step", "updates", "bytes", "variables", "made", "best evaluation"]
NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT", help="Name of a checkpoint: JOB for the newest of the job, JOB/NUMBER, or JOB/best."
    ),
]


@app.command()
def ls(
    folder: FolderOption,
    job: Annotated[
        str, typer.Argument(metavar="[JOB]", help="Job whose checkpoints are listed. Default: all jobs.")
    ] = "",
    as_json: options.JsonOption = False,
) -> None:
    """Lists complete checkpoints, newest first, and reports damaged and incomplete ones."""
    with Output(as_json) as out:
        checkpoints = _opened(folder)
        found, incomplete = [*checkpoints.list(job)], [*checkpoints.incomplete(job)]
        if job and not found and not incomplete:
            raise errors.UnknownCheckpoint(
                f"{checkpoints.url} has no checkpoint of {job}; `shoal checkpoints ls` lists all",
                checkpoint=job,
            )
        if as_json:
            for it in found:
                out.record(
                    records.stored_checkpoint(it) if isinstance(it, Checkpoint) else records.damaged_checkpoint(it)
                )
            for name in incomplete:
                missing = errors.UnknownCheckpoint(f"{name} {_INCOMPLETE}", checkpoint=name)
                out.record(records.damaged_checkpoint(missing))
            return
        rows = [_row(it) for it in found if isinstance(it, Checkpoint)]
        notes = [it.message for it in found if isinstance(it, errors.ShoalError)]
        if incomplete:
            notes.append(f"{', '.join(incomplete)}: {_INCOMPLETE}")
        if not rows:
            notes.append(f"{checkpoints.url} has no complete checkpoint")
        out.rows("", _COLUMNS, rows, optional=["updates", "variables"], notes=notes)


@app.command()
def show(name: NameArgument, folder: FolderOption, as_json: options.JsonOption = False) -> None:
    """Shows a checkpoint and the shapes and dtypes of its variables."""
    with Output(as_json) as out:
        found = _opened(folder).show(name)
        if as_json:
            out.record(records.stored_checkpoint(found))
            return
        _print_skipped(found, out)
        rows: list[tuple[list[str], Row]] = [
            ([variable, str(list(shape)), dtype], {}) for variable, (shape, dtype) in found.variables.items()
        ]
        out.rows(_sentence(found), ["variable", "shape", "dtype"], rows)


@app.command()
def verify(name: NameArgument, folder: FolderOption, as_json: options.JsonOption = False) -> None:
    """Reads all files of a checkpoint and compares them with their checksums."""
    with Output(as_json) as out:
        found = _opened(folder).verify(name)
        _print_skipped(found, out)
        out.message(
            f"{found} is complete: {counted(found.nbytes, 'byte')} read, and the checksums match",
            records.stored_checkpoint(found),
        )


@app.command()
def rm(
    name: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="JOB/NUMBER, or JOB with --all.")],
    folder: FolderOption,
    whole_job: Annotated[bool, typer.Option("--all", help="Removes all checkpoints of the job.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Removes a checkpoint, even if it is damaged or incomplete. With --all, removes all checkpoints of a job."""
    with Output(as_json) as out:
        checkpoints = _opened(folder)
        if whole_job:
            removed = checkpoints.remove_all(name)
        else:
            checkpoints.remove(name)
            removed = (name,)
        for it in removed:
            out.message(f"{it} is removed", {"checkpoint": it, "removed": True})


def export(
    name: NameArgument,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.safetensors", help="File to write; it is replaced atomically. - means standard output."
        ),
    ],
    folder: FolderOption,
    as_json: options.JsonOption = False,
) -> None:
    """Writes the variables of a checkpoint to a safetensors file, which PyTorch, JAX and others read."""
    with Output(as_json) as out:
        check_writable(file)
        found = _opened(folder).export(name, sys.stdout.buffer if file == STDOUT else file)
        _print_skipped(found, out)
        out.message(
            f"{file}: {counted(len(found.variables), 'variable')} of {found}",
            {**records.stored_checkpoint(found), "file": str(file)},
            beside=file == STDOUT,
        )


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="File to read, written by any framework.")],
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the job under which the checkpoint is stored.")],
    folder: FolderOption,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="NAME", help="Tensor to leave out. Repeatable. Default: none.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Creates a checkpoint from a safetensors file."""
    with Output(as_json) as out:
        found = Checkpoints(folder).import_file(file, job, skip=skip or [])
        out.message(
            f"imported {file} as {found}: {counted(len(found.variables), 'variable')}", records.stored_checkpoint(found)
        )


def _opened(url: str) -> Checkpoints:
    """Returns the checkpoints of a storage. A local folder must exist."""
    if not url.strip():  # it would be the working directory
        raise errors.BadRequest("--checkpoints is empty; name the folder or URL of the cluster's checkpoint storage")
    checkpoints = Checkpoints(url)
    check_folder(checkpoints.url, "with --checkpoints or SHOAL_CHECKPOINTS")
    return checkpoints


def _row(found: Checkpoint) -> tuple[list[str], Row]:
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.created_at))
    counts = [f"{found.step:,}", f"{found.version:,}", f"{found.nbytes:,}", f"{len(found.variables):,}"]
    return [str(found), *counts, made, _best(found) or "-"], records.stored_checkpoint(found)


def _print_skipped(found: Checkpoint, out: Output) -> None:
    if not out.as_json:  # the JSON record lists them
        for problem in found.skipped:
            out.errors.print(printable(f"skipped {problem}"), soft_wrap=True)


def _sentence(found: Checkpoint) -> str:
    best = f", best evaluation so far: {_best(found)}" if found.evaluation else ""
    return f"{found}: step {found.step:,}, {counted(found.version, 'update')}, {counted(found.nbytes, 'byte')}{best}"


def _best(found: Checkpoint) -> str:
    """Formats the evaluation that the checkpoint was taken at, with its step if that differs from the checkpoint's."""
    best = found.evaluation
    if best is None:
        return ""
    return format_metrics(best.values) + (f" (evaluated at step {best.step:,})" if best.step != found.step else "")


__all__ = ["app", "export", "import_"]
