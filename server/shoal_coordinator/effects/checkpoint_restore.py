"""The way back from a checkpoint to shards. How one is made is for `cutting` and `publishing`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import structlog
from google.protobuf import json_format

from shoal import errors
from shoal._checkpoint import Catalogue, Manifest
from shoal.checkpoint_policy import CheckpointChoice
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import state_pb2
from shoal_coordinator.effects.server_calls import ServerCalls
from shoal_coordinator.messages import CreateShards, RestoredCheckpoint, servers_of

_log = structlog.get_logger(__name__)

# Reading many GB takes a while.
_RESTORE_TIMEOUT_S = 600.0


def restore(
    effect: CreateShards, create: Callable[[], None], calls: ServerCalls, catalogue: Catalogue
) -> RestoredCheckpoint:
    """Creates a job's shards and fills them with the newest of its sources that can be read.

    Args:
        effect: what to do; it has sources.
        create: creates them on all servers, with initial values.
        calls: the way to servers.
        catalogue: of the cluster's checkpoints.

    Raises:
        CorruptCheckpoint, UnknownCheckpoint: none can be read; the message says why of each.
        IncompatibleCheckpoint: the first that can be read is of other variables.
        StorageFailed: the storage cannot be read for now, by the coordinator or by a server; some shards may be filled.
        ShoalError: what servers answer.
    """
    passed_by: list[str] = []
    for choice in _candidates(effect.sources, catalogue, passed_by):
        try:
            return _restored(effect, choice, create, calls, catalogue, passed_by)
        except (errors.CorruptCheckpoint, errors.UnknownCheckpoint) as error:
            _log.warning("checkpoint passed by", job=effect.job.name, checkpoint=str(choice), reason=error.message)
            passed_by.append(f"{choice}: {error.message}")
            # What was read in part is neither one thing nor the other.
            for server in servers_of(effect.placement):
                calls.call(server, "DropShards", pb.DropShardsRequest(job=effect.job.name))
    why = "; ".join(passed_by) or "there is none"
    raise errors.CorruptCheckpoint(f"no checkpoint to go on from: {why}", job=effect.job.name)


def _candidates(
    sources: Iterable[CheckpointChoice], catalogue: Catalogue, passed_by: list[str]
) -> Iterator[CheckpointChoice]:
    for source in sources:
        if source.number:
            yield source
            continue
        numbers = [number for number in catalogue.numbers(source.job) if _may_be(source, number, catalogue)]
        if not numbers:
            which = "checkpoint that was taken at its best evaluation" if source.best else "whole checkpoint"
            passed_by.append(f"{source.job}: it has no {which} in {catalogue.folder.url}")
        for number in reversed(numbers):
            yield CheckpointChoice(source.job, number, source.partial)


def _may_be(source: CheckpointChoice, number: int, catalogue: Catalogue) -> bool:
    """Whether a checkpoint is one of those that are asked for, or cannot be read, which is then told."""
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
    passed_by: list[str],
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
    with calls.at_once(servers_of(effect.placement)) as servers:
        servers.call("Restore", request, timeout_s=_RESTORE_TIMEOUT_S)
    goes_on = not choice.partial
    return RestoredCheckpoint(
        choice,
        step,
        variables=frozenset(str(variable.get("name", "")) for variable in manifest.variables),
        data=_parsed(manifest.data, state_pb2.LedgerRecord(), manifest) if manifest.data and goes_on else None,
        progress_totals=_parsed(manifest.progress if goes_on else {}, state_pb2.TallyRecord(), manifest),
        seed=int(manifest.spec.get("seed", 0)) if manifest.spec else None,
        skipped=tuple(passed_by),
    )


def _check_optimizer(effect: CreateShards, choice: CheckpointChoice, manifest: Manifest) -> None:
    saved = manifest.spec.get("optimizer", {}).get("name", "")
    if saved and saved != effect.spec.optimizer.name and not choice.partial:
        raise errors.IncompatibleCheckpoint(
            f"{choice} was trained with {saved}, and {effect.job.name} asks for {effect.spec.optimizer.name}, whose "
            "slots are others: ask for the same, or for a partial restore, which takes values alone"
        )


def _parsed(record: Any, message: Any, manifest: Manifest) -> Any:
    try:
        return json_format.ParseDict(record, message)
    except json_format.ParseError as error:
        raise errors.CorruptCheckpoint(
            f"the manifest of {manifest.job}/{manifest.number} says what no job's records do: {error}"
        ) from None
