"""Restore of shards from a checkpoint. `checkpoint_cut` and `checkpoint_commit` make checkpoints."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import structlog
from google.protobuf import json_format
from google.protobuf.message import Message

from shoal import errors, optim
from shoal._checkpoint import Catalogue, Manifest, restore_problem
from shoal._numerics import storage_dtype
from shoal._wire import with_ellipsis
from shoal.checkpoint_policy import CheckpointChoice
from shoal.v1 import job_pb2, state_pb2, tensor_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable, from_protos
from shoal_coordinator.effects.server_calls import ServerCalls
from shoal_coordinator.messages import CreateShards, RestoredCheckpoint, servers_of

M = TypeVar("M", bound=Message)
_log = structlog.get_logger(__name__)

# Reading many GB takes minutes.
_RESTORE_TIMEOUT_S = 600.0
# The most characters of an argument of an optimizer in a note. Groups and schedules can be long.
_MAX_SHOWN = 120


def restore(
    effect: CreateShards, create: Callable[[], None], calls: ServerCalls, catalogue: Catalogue
) -> RestoredCheckpoint:
    """Creates a job's shards and fills them with the newest readable checkpoint among its sources.

    Args:
        effect: The shards to create; it has sources.
        create: Creates the shards on all servers, with initial values.
        calls: The calls to servers.
        catalogue: The cluster's checkpoints.

    Returns:
        The checkpoint that was restored, with its ledger and progress.

    Raises:
        CorruptCheckpoint, UnknownCheckpoint: No checkpoint can be read; the message gives the reason for each.
        IncompatibleCheckpoint: The first readable checkpoint has other variables, or is of another optimizer.
        StorageFailed: The coordinator or a server cannot read the storage now. Some shards may be filled.
        ShoalError: A server has returned another error.
    """
    skipped: list[str] = []
    for choice in _candidates(effect.sources, catalogue, skipped):
        try:
            return _restored(effect, choice, create, calls, catalogue, skipped)
        except (errors.CorruptCheckpoint, errors.UnknownCheckpoint) as error:
            _log.warning("checkpoint skipped", job=effect.job.name, checkpoint=str(choice), reason=error.message)
            skipped.append(f"{choice}: {error.message}")
            # A partly restored shard is useless for the next checkpoint.
            _drop(effect, calls)
    why = "; ".join(skipped) or "none exists"
    raise errors.CorruptCheckpoint(f"no checkpoint can be restored: {why}", job=effect.job.name)


def _drop(effect: CreateShards, calls: ServerCalls) -> None:
    request = pb.DropShardsRequest(job=effect.job.name)
    calls.call_all(servers_of(effect.placement), "DropShards", lambda _: request)


def _candidates(
    sources: Iterable[CheckpointChoice], catalogue: Catalogue, skipped: list[str]
) -> Iterator[CheckpointChoice]:
    for source in sources:
        if source.number:
            yield source
            continue
        numbers = [number for number in catalogue.numbers(source.job) if _may_be(source, number, catalogue)]
        if not numbers:
            which = "checkpoint of its best evaluation" if source.best else "complete checkpoint"
            skipped.append(f"{source.job}: it has no {which} in {catalogue.folder.url}")
        for number in reversed(numbers):
            yield CheckpointChoice(source.job, number, source.partial)


def _may_be(source: CheckpointChoice, number: int, catalogue: Catalogue) -> bool:
    """Returns whether a checkpoint matches a source, or cannot be read, in which case the restore reports it."""
    if not source.best:
        return True
    found = catalogue.found(source.job, number)
    return isinstance(found, errors.ShoalError) or bool(found.evaluation)


def _restored(
    effect: CreateShards,
    choice: CheckpointChoice,
    create: Callable[[], None],
    calls: ServerCalls,
    catalogue: Catalogue,
    skipped: list[str],
) -> RestoredCheckpoint:
    manifest = catalogue.manifest(choice.job, choice.number)
    _check_optimizer(effect, choice, manifest)
    create()
    step, updates = (0, 0) if choice.partial else (manifest.step, manifest.version)
    request = pb.RestoreRequest(
        job=effect.job.name,
        generation=effect.placement.generation,
        from_job=choice.job,
        number=choice.number,
        version=updates,
        step=step,
        partial=choice.partial,
    )
    servers = servers_of(effect.placement)
    calls.call_all(servers, "Restore", lambda _: request, timeout_s=_RESTORE_TIMEOUT_S, retry_for_s=0.0)
    continues = not choice.partial
    return RestoredCheckpoint(
        choice,
        step,
        variables=frozenset(str(variable.get("name", "")) for variable in manifest.variables),
        data=_parsed(manifest.data, state_pb2.LedgerRecord(), manifest) if manifest.data and continues else None,
        progress_totals=_parsed(manifest.progress if continues else {}, state_pb2.ProgressRecord(), manifest),
        seed=_spec(manifest).seed if manifest.spec else None,
        skipped=tuple(skipped),
        learning_rate=_learning_rate(effect, manifest) if continues else None,
        plateau=_plateau(effect, manifest) if continues else None,
        optimizer_changes=_optimizer_changes(effect, manifest) if continues else (),
    )


def _learning_rate(effect: CreateShards, manifest: Manifest) -> optim.Schedule | None:
    """Returns the learning rate that a user has set, if the job has the optimizer of the checkpoint's job."""
    spec = _spec(manifest)
    if not spec.HasField("learning_rate_set") or spec.optimizer != effect.spec.optimizer.to_proto():
        return None
    try:
        return optim.Schedule.from_proto(spec.learning_rate_set)
    except errors.InvalidOptimizer as error:
        raise errors.CorruptCheckpoint(
            f"the manifest of {manifest.job}/{manifest.number} has an invalid learning rate: {error.message}"
        ) from None


def _plateau(effect: CreateShards, manifest: Manifest) -> optim.PlateauState | None:
    """Returns the state of the reduction of the learning rate, under the same condition as the rate."""
    spec = _spec(manifest)
    if not spec.HasField("plateau_state") or spec.optimizer != effect.spec.optimizer.to_proto():
        return None
    return optim.PlateauState.from_proto(spec.plateau_state)


def _optimizer_changes(effect: CreateShards, manifest: Manifest) -> tuple[str, ...]:
    """Returns the arguments of the optimizer that differ from those of the checkpoint's job, with both values."""
    spec, own = _spec(manifest), effect.spec.optimizer
    try:
        saved = optim.from_proto(spec.optimizer)
    except errors.InvalidOptimizer:  # there is none, as in an imported checkpoint, or a later version wrote it
        return ()
    values = {it.name: (getattr(own, it.name), getattr(saved, it.name)) for it in dataclasses.fields(own)}
    changes = [
        f"{name} is {with_ellipsis(repr(new), _MAX_SHOWN)}, and was {with_ellipsis(repr(old), _MAX_SHOWN)}"
        for name, (new, old) in values.items()
        if new != old
    ]
    if changes and spec.HasField("learning_rate_set"):
        changes.append("the learning rate that was set at run time is not kept")
    return tuple(changes)


def _check_optimizer(effect: CreateShards, choice: CheckpointChoice, manifest: Manifest) -> None:
    saved = _spec(manifest).optimizer.name
    if not saved or saved == effect.spec.optimizer.name or choice.partial:
        return
    # The servers would compare the variables only after this, and the user would learn one difference at a time.
    messages = [_parsed(variable, tensor_pb2.Variable(), manifest) for variable in manifest.variables]
    variables = from_protos(messages)
    optimizer = (
        f"{choice} was trained with {saved}, but {effect.job.name} uses {effect.spec.optimizer.name}, which has other "
        "slots"
    )
    why = restore_problem(_stored(effect.placement.variables), _stored(variables), partial=False, optimizer=optimizer)
    raise errors.IncompatibleCheckpoint(why, job=effect.job.name)


def _spec(manifest: Manifest) -> job_pb2.JobSpec:
    return _parsed(manifest.spec, job_pb2.JobSpec(), manifest, ignore_unknown_fields=True)


def _stored(variables: Mapping[str, Variable]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {name: (it.shape, storage_dtype(it.dtype)) for name, it in variables.items()}


def _parsed(record: Any, message: M, manifest: Manifest, *, ignore_unknown_fields: bool = False) -> M:
    """Returns the message that a record of a manifest is.

    Args:
        record: the record, a JSON object.
        message: an empty message.
        manifest: the manifest, for the error.
        ignore_unknown_fields: whether a later version may have written it.

    Raises:
        CorruptCheckpoint: the record is no such message.
    """
    try:
        return json_format.ParseDict(record, message, ignore_unknown_fields=ignore_unknown_fields)
    except json_format.ParseError as error:
        raise errors.CorruptCheckpoint(
            f"the manifest of {manifest.job}/{manifest.number} has a record that cannot be parsed: {error}"
        ) from None
