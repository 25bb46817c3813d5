"""Checkpoints from files of other frameworks: values of a safetensors file, with the state of an optimizer."""

import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format

from shoal import errors
from shoal._checkpoint.catalogue import Catalogue, path_of
from shoal._checkpoint.manifest import FileEntry, Manifest
from shoal._checkpoint.safetensors_files import SafetensorsFile
from shoal._checkpoint.slices import VALUE, SavedVariables, tensor_name
from shoal._checkpoint.tensor_files import TensorHeader, write_tensors
from shoal._checkpoint.tensors import encode_header
from shoal._numerics import storage_dtype
from shoal.optim import Optimizer, OptimizerState, checked_state
from shoal.variables import Variable, variable_from_array

_FORMAT = "shoal-optimizer-state"
_UPDATES = "updates"
# Digits of the largest number of updates: int() of a longer text is slow, or an error.
_MOST_DIGITS = 16


def imported(
    catalogue: Catalogue, job: str, source: SafetensorsFile, optimizer: Optimizer | None, state: OptimizerState | None
) -> Manifest:
    """Writes a checkpoint with the tensors of a file as values, and publishes it.

    Args:
        catalogue: the checkpoints of a storage.
        job: job name of the checkpoint.
        source: the file.
        optimizer: the optimizer of the state; None if there is no state.
        state: slots by name and variable, and the number of updates.

    Raises:
        InvalidOptimizer: the state does not fit the optimizer or the file. Nothing is written.
        StorageFailed: the checkpoint cannot be written.
        JobExists: see `Checkpoints.import_file`.
    """
    number, variables = catalogue.next_number(job), source.variables()
    kept = checked_state(state, optimizer, _given(variables)) if state and optimizer else OptimizerState()
    folder = path_of(job, number)
    tensors: list[TensorHeader] = [
        (tensor_name(VALUE, 0, name), storage_dtype(variable.dtype), variable.shape)
        for name, variable in variables.items()
    ]
    values = write_tensors(catalogue.folder, (*folder, "shard-00000.safetensors"), tensors, source.data(), {"job": job})
    manifest = Manifest(
        job=job,
        number=number,
        created_at=time.time(),
        step=0,
        version=kept.updates,
        spec={"optimizer": json_format.MessageToDict(optimizer.to_proto())} if optimizer else {},
        variables=tuple(json_format.MessageToDict(it.to_proto(name)) for name, it in variables.items()),
        files=(values, *_slots_file(catalogue, folder, job, kept)),
        writer=version("shoal"),
    )
    catalogue.publish(manifest)
    _check_kept(catalogue, manifest)
    return manifest


def _check_kept(catalogue: Catalogue, manifest: Manifest) -> None:
    """Checks that an import still exists: a running job of its name may have removed it as incomplete.

    Raises:
        JobExists: the job has removed or overwritten its files. A manifest without files is then removed, too.
    """
    job, number = manifest.job, manifest.number
    try:
        if catalogue.manifest(job, number) == manifest:
            with SavedVariables(catalogue.folder, manifest):
                return
    except errors.UnknownCheckpoint:
        pass
    except errors.CorruptCheckpoint:
        catalogue.remove(job, number)
    raise errors.JobExists(
        f"{job}/{number} was not imported: the running job {job} takes checkpoints and has removed its files; "
        "choose another name, or wait until the job has ended",
        job=job,
    )


def _given(variables: dict[str, Variable]) -> dict[str, Variable]:
    """Returns variables with given values, as those of an import are, in the same shapes and dtypes."""
    return {
        name: variable_from_array(np.broadcast_to(np.zeros((), it.dtype), it.shape)) for name, it in variables.items()
    }


def _slots_file(catalogue: Catalogue, folder: tuple[str, str], job: str, state: OptimizerState) -> list[FileEntry]:
    if not state.slots:
        return []
    arrays = {tensor_name(slot, 0, name): it for slot, of in state.slots.items() for name, it in of.items()}
    headers: list[TensorHeader] = [(name, it.dtype, it.shape) for name, it in arrays.items()]
    path = (*folder, "shard-00001.safetensors")
    return [write_tensors(catalogue.folder, path, headers, _data(arrays.values()), {"job": job})]


def saved_state(saved: SavedVariables, updates: int) -> OptimizerState:
    """Returns the slots of a checkpoint, with the number of updates.

    Raises:
        CorruptCheckpoint: a file is damaged.
    """
    slots = {slot: saved.arrays(slot) for slot in saved.slots}
    return OptimizerState(slots, updates)


def state_pieces(state: OptimizerState) -> Iterator[Any]:
    """Yields the bytes of a safetensors file with a state: its tensors are named SLOT/VARIABLE."""
    arrays = {f"{slot}/{name}": it for slot, of in state.slots.items() for name, it in sorted(of.items())}
    metadata = {"format": _FORMAT, _UPDATES: str(state.updates)}
    yield encode_header([(name, it.dtype, it.shape) for name, it in arrays.items()], metadata)
    yield from _data(arrays.values())


def read_state(path: Path) -> OptimizerState:
    """Returns the state in a file of `state_pieces`.

    Raises:
        StorageFailed: the file cannot be read.
        CorruptCheckpoint: it is not a safetensors file, or is damaged; or it has no state of an optimizer.
    """
    with SafetensorsFile(path) as source:
        count, arrays = source.metadata.get(_UPDATES, ""), source.arrays()
    named = all("/" in name for name in arrays)
    counts = count.isascii() and count.isdecimal() and len(count) <= _MOST_DIGITS
    if not (named and source.metadata.get("format") == _FORMAT and counts):
        raise errors.CorruptCheckpoint(
            f"{path} has no state of an optimizer; give a file of Checkpoints.export_state", file=str(path)
        )
    slots: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        slot, _, variable = name.partition("/")
        slots.setdefault(slot, {})[variable] = array
    return OptimizerState(slots, int(count))


def _data(arrays: Any) -> Iterator[memoryview]:
    return (np.ascontiguousarray(it).reshape(-1).view(np.uint8).data for it in arrays)


__all__ = ["imported", "read_state", "saved_state", "state_pieces"]
