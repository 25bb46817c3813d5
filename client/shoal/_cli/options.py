"""What several commands take on their command lines, and how its text is read."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import errors, optim
from shoal._role.flags import RetryFor as RetryOption
from shoal.callbacks import TensorBoard
from shoal.client import DEFAULT_ADDRESS

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

OPTIMIZER_HELP = (
    "NAME or NAME:KEY=VALUE,KEY=VALUE: adam:learning_rate=0.01,beta1=0.95. Names: "
    + ", ".join(sorted(optim.Optimizer.known))
    + ". Keys are the arguments in shoal.optim; schedule=NAME ("
    + ", ".join(sorted(optim.Schedule.known))
    + ") takes its keys in the same list: sgd:learning_rate=0.1,schedule=cosine,steps=1000,warmup_steps=50; "
    "patterns of decay_exclude are separated by |."
)


def settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Reads `--set KEY=VALUE` options: a value is JSON where it parses as such, else a string.

    Raises:
        InvalidJob: a pair has no `=` or no key.
    """
    found = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise errors.InvalidJob(f"--set {pair!r} is not KEY=VALUE, with an argument name of the factory as its key")
        found[key] = _value(text)
    return found


def optimizer(text: str) -> optim.Optimizer:
    """Reads an optimizer as people write it; `OPTIMIZER_HELP` has the syntax.

    Raises:
        InvalidOptimizer: a name or key is unknown, or a value is out of its range.
    """
    name, _, rest = text.partition(":")
    kind = _known(optim.Optimizer, name)
    values = _pairs(text, rest)
    schedule = _known(optim.Schedule, str(values.pop("schedule", "constant")))
    if "decay_exclude" in values:
        values["decay_exclude"] = tuple(str(values["decay_exclude"]).split("|"))
    rate = {key: values.pop(key) for key in _fields(schedule) if key in values}
    if unknown := values.keys() - _fields(kind):
        taken = [*_fields(kind), "schedule", *(key for key in _fields(schedule) if key != "learning_rate")]
        raise errors.InvalidOptimizer(
            f"{name}: unknown {', '.join(sorted(unknown))}; with this schedule it takes {', '.join(taken)}"
        )
    rate.setdefault("learning_rate", _fields(kind)["learning_rate"].default)
    missing = [key for key, field in _fields(schedule).items() if _required(field) and key not in rate]
    if missing:
        raise errors.InvalidOptimizer(f"{text}: schedule={schedule.name} needs {', '.join(missing)}")
    made: optim.Optimizer = kind(learning_rate=schedule(**rate), **values)
    return made


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


def _pairs(text: str, rest: str) -> dict[str, Any]:
    values = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise errors.InvalidOptimizer(f"{text}: {pair!r} is not KEY=VALUE")
        values[key.strip()] = _value(value)
    return values


def _known(kind: Any, name: str) -> Any:
    if name not in kind.known:
        raise errors.InvalidOptimizer(f"unknown {kind.kind} {name!r}; choose one of {', '.join(sorted(kind.known))}")
    return kind.known[name]


def _fields(kind: Any) -> dict[str, "dataclasses.Field[Any]"]:
    return {field.name: field for field in dataclasses.fields(kind)}


def _required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


__all__ = [
    "DEFAULT_ADDRESS",
    "OPTIMIZER_HELP",
    "CoordinatorOption",
    "JobArgument",
    "JsonOption",
    "RetryOption",
    "TensorBoardOption",
    "optimizer",
    "settings",
    "tensorboard",
]
