"""Checkpoint files: storage, manifests, tensor files, and reads of any part of a variable.

`shoal.checkpoints` is the public interface. Servers and the coordinator import this package. `shoal_server.checkpoints`
and `shoal_coordinator.effects` take the consistent cut.
"""

from shoal._checkpoint.catalogue import Catalogue, expired_numbers, path_of
from shoal._checkpoint.imports import imported, read_state, saved_state, state_pieces
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import FileEntry, Manifest
from shoal._checkpoint.safetensors_files import SafetensorsFile, rows, value_pieces, write_pieces
from shoal._checkpoint.slices import VALUE, Rows, SavedVariables, restore_problem, tensor_name
from shoal._checkpoint.storage import CheckpointStorage, StorageFile, no_storage_message, probe
from shoal._checkpoint.storage_urls import check_folder, open_shared_storage, open_storage
from shoal._checkpoint.tensor_files import TensorHeader, write_tensors
from shoal._checkpoint.tensors import encode_header

__all__ = [
    "VALUE",
    "Catalogue",
    "CheckpointStorage",
    "FileEntry",
    "LocalStorage",
    "Manifest",
    "Rows",
    "SafetensorsFile",
    "SavedVariables",
    "StorageFile",
    "TensorHeader",
    "check_folder",
    "encode_header",
    "expired_numbers",
    "imported",
    "no_storage_message",
    "open_shared_storage",
    "open_storage",
    "path_of",
    "probe",
    "read_state",
    "restore_problem",
    "rows",
    "saved_state",
    "state_pieces",
    "tensor_name",
    "value_pieces",
    "write_pieces",
    "write_tensors",
]
