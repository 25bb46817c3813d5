"""What several commands take on their command lines, and how its text is read."""

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
    str, typer.Option("--coordinator", "-c", envvar="SHOAL_COORDINATOR", help="The coordinator's host:port.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="For machines: one JSON object a line; errors on standard error too.")
]
TensorBoardOption = Annotated[
    Path | None,
    typer.Option("--tensorboard", metavar="DIR", help="Write figures there while waiting, for TensorBoard to show."),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")]


@contextmanager
def tensorboard(folder: Path | None, *, waiting: bool = True) -> Iterator[list[TensorBoard]]:
    """The callback that `--tensorboard DIR` asks for, if it does, with its files until the end of the `with`.

    Raises:
        BadRequest: what it needs is not installed, or nobody is `waiting` for the job.
        StorageFailed: it cannot write there.
    """
    if folder and not waiting:
        raise errors.BadRequest("--tensorboard writes while the job is followed: add --follow, or `shoal wait` with it")
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
