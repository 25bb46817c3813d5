"""Options and arguments that several commands share."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import errors
from shoal._job.settings import parse as settings
from shoal._role import flags
from shoal._role.flags import RetryFor as RetryOption
from shoal._rpc import CoordinatorClient
from shoal._security import AccessRole, Credentials
from shoal.callbacks import TensorBoard
from shoal.client import DEFAULT_ADDRESS, Client
from shoal.optim._text import parse as optimizer

CoordinatorOption = Annotated[
    str, typer.Option("--coordinator", "-c", envvar="SHOAL_COORDINATOR", help="host:port of the coordinator.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Prints one JSON object per line. Errors are JSON too, on standard error.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Also shows the rows that the table leaves out by default.")]
TensorBoardOption = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        metavar="DIR",
        help="Folder for TensorBoard event files, written while the command waits. Default: none.",
    ),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")]

# Opens the client of a command, within the block in which errors become messages.
Connect = Callable[[], Client]
# The same for a command that calls an RPC for which `Client` has no method.
ConnectCoordinator = Callable[[], AbstractContextManager[CoordinatorClient]]


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a client to a typer command, before its last option, --json.

    Args:
        command: a function whose parameter `connect` is a function that opens the client, of the type `Connect` or
            `ConnectCoordinator`.
    """
    parameters_of_command = inspect.signature(command, eval_str=True).parameters
    opener = _open_coordinator if parameters_of_command["connect"].annotation == ConnectCoordinator else _open_client
    own = [it for it in parameters_of_command.values() if it.name != "connect"]
    added = list(inspect.signature(_open_client, eval_str=True).parameters.values())
    parameters = [it.replace(kind=inspect.Parameter.KEYWORD_ONLY) for it in (*own[:-1], *added, own[-1])]

    @functools.wraps(command)
    def run(*given: Any, **values: Any) -> None:
        of_client = {it.name: values.pop(it.name) for it in added}
        with _no_warnings() if values["as_json"] else nullcontext():
            command(*given, connect=lambda: opener(**of_client), **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # typer reads both
    run.__annotations__ = {it.name: it.annotation for it in parameters}
    return run


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Drops the warnings of the client in the block, because machines expect one JSON object on each line."""
    log = logging.getLogger("shoal")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _open_client(
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    retry_for: RetryOption = 20.0,
    tls_ca: flags.TlsCa = "",
    tls_cert: flags.TlsCertificate = "",
    tls_key: flags.TlsKey = "",
) -> Client:
    return Client(coordinator, retry_for_s=retry_for, credentials=Credentials.find(tls_ca, tls_cert, tls_key))


@contextmanager
def _open_coordinator(
    coordinator: str, retry_for: float, tls_ca: str, tls_cert: str, tls_key: str
) -> Iterator[CoordinatorClient]:
    found = Credentials.find(tls_ca, tls_cert, tls_key).for_coordinator(coordinator, AccessRole.ADMIN)
    with closing(CoordinatorClient(coordinator, retry_for_s=retry_for, credentials=found)) as client:
        yield client


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
    "AllOption",
    "Connect",
    "ConnectCoordinator",
    "CoordinatorOption",
    "JobArgument",
    "JsonOption",
    "RetryOption",
    "TensorBoardOption",
    "connected",
    "optimizer",
    "settings",
    "tensorboard",
]
