"""Checkpoints as files: storages, manifests, tensors, and any part of a variable again.

`shoal.checkpoints` is what users see of it; servers and the coordinator import this package. How a consistent cut is
made is in `shoal_server.checkpoints` and `shoal_coordinator.effects`.
"""

from shoal._checkpoint.catalogue import Catalogue, path_of, superfluous
from shoal._checkpoint.local_storage import LocalFolder
from shoal._checkpoint.manifest import FileEntry, Manifest
from shoal._checkpoint.safetensors_files import ForeignFile, rows
from shoal._checkpoint.slices import VALUE, Rows, SavedVariables, mismatches, tensor_name
from shoal._checkpoint.storage import Folder, no_folder, probe
from shoal._checkpoint.storage_urls import open_folder, open_shared
from shoal._checkpoint.tensor_files import Named, write_tensors
from shoal._checkpoint.tensors import encode_header

__all__ = [
    "VALUE",
    "Catalogue",
    "FileEntry",
    "Folder",
    "ForeignFile",
    "LocalFolder",
    "Manifest",
    "Named",
    "Rows",
    "SavedVariables",
    "encode_header",
    "mismatches",
    "no_folder",
    "open_folder",
    "open_shared",
    "path_of",
    "probe",
    "rows",
    "superfluous",
    "tensor_name",
    "write_tensors",
]
