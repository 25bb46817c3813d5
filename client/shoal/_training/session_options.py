"""Options of `Client.session`: their signature, and the error for an option that sessions do not have."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypedDict

from shoal import consistency as modes
from shoal import optim
from shoal._job.names import check_names
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.job import Job, WireDtype


class SessionOptions(TypedDict, total=False):
    """The fields of `Job` that `Client.session` accepts. None has the same effect as leaving the field out."""

    optimizer: optim.Optimizer | None
    consistency: modes.Consistency | None
    workers: int | None
    shards: int | None
    replicas: int | None
    min_replicas: int | None
    seed: int | None
    wire_dtype: WireDtype | None
    overlap: bool | None
    epochs: int | None
    batch_size: int | None
    range_size: int | None
    checkpoints: CheckpointPolicy | None
    restore: str | None
    partial_restore: bool | None


def spelled_out(session: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature with each option by name, since `help` and notebooks do not expand `**options`."""
    given = inspect.signature(session)
    named = [it for it in given.parameters.values() if it.kind is not it.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in SessionOptions.__annotations__.items()
    ]
    return given.replace(parameters=[*named, *options])


def check_options(given: Iterable[str]) -> None:
    """Checks the names of a session's options.

    Raises:
        TypeError: sessions have no option of this name. The message names the nearest one, or all of them.
    """
    of_jobs = {it.name for it in dataclasses.fields(Job)}.difference(SessionOptions.__annotations__)
    for name in of_jobs.intersection(given):
        known = ", ".join(SessionOptions.__annotations__)
        raise TypeError(
            f"Client.session() got an unexpected keyword argument {name!r}; sessions do not take the field {name} of "
            f"Job, because your own loop reads the data and decides when it ends. Their options are {known}"
        )
    check_names("Client.session", given, SessionOptions.__annotations__, optim.Optimizer.__dataclass_fields__)


__all__ = ["SessionOptions", "check_options", "spelled_out"]
