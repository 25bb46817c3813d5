"""Options and arguments that several commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from shoal import errors
from shoal._job.settings import parse as settings
from shoal._role.flags import RetryFor as RetryOption
from shoal.callbacks import TensorBoard
from shoal.client import DEFAULT_ADDRESS
from shoal.optim._text import parse as optimizer

CoordinatorOption = Annotated[
    str, typer.Option("--coordinator", "-c", envvar="SHOAL_COORDINATOR", help="host:port of the coordinator.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Prints one JSON object per line. Errors are JSON too, on standard error.")
]
TensorBoardOption = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        metavar="DIR",
        help="Folder for TensorBoard event files, written while the command waits. Default: none.",
    ),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")]


@contextmanager
def tensorboard(folder: Path | None, *, waiting: bool = True) -> Iterator[list[TensorBoard]]:
    """Yields a list with the callback for `--tensorboard DIR`, and closes its files at the end of the block.

    Args:
        folder: the value of the option, or None. If it is None, the list is empty.
        waiting: whether the command waits for the job.

    Raises:
        BadRequest: tensorboardX is not installed, or the command does not wait for the job.
        StorageFailed: the folder cannot be written.
    """
    if folder and not waiting:
        raise errors.BadRequest(
            "--tensorboard writes only while the command follows the job: add --follow, or give it to `shoal wait`"
        )
    try:
        board = TensorBoard(folder) if folder else None
    except ImportError as error:
        raise errors.BadRequest(str(error)) from None
    if board is None:
        yield []
        return
    with board:
        yield [board]


__all__ = [
    "DEFAULT_ADDRESS",
    "CoordinatorOption",
    "JobArgument",
    "JsonOption",
    "RetryOption",
    "TensorBoardOption",
    "optimizer",
    "settings",
    "tensorboard",
]
