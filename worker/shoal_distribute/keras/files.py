"""Files of arrays by name with a JSON description: zip archives of .npy files, without pickle."""

import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal import errors

_DESCRIPTION = "description.json"


def write_arrays(path: str | Path, arrays: Mapping[str, np.ndarray], description: Mapping[str, Any]) -> None:
    """Writes a file. It replaces an earlier one at once, when it is complete.

    Args:
        path: the file.
        arrays: arrays by name.
        description: what JSON can hold.

    Raises:
        StorageFailed: the file cannot be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}-", delete=False) as file:
            try:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                    archive.writestr(_DESCRIPTION, json.dumps(description))
                    for name, array in arrays.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                            np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(target)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise errors.StorageFailed(f"{target} cannot be written: {error}") from error


def read_arrays(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the arrays and the description of a file.

    Args:
        path: the file.

    Raises:
        UnknownCheckpoint: there is no such file.
        CorruptCheckpoint: the file is of another kind, or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = {}
            for name in archive.namelist():
                if name.endswith(".npy"):
                    with archive.open(name) as entry:
                        arrays[name.removesuffix(".npy")] = np.lib.format.read_array(entry, allow_pickle=False)
            return arrays, json.loads(archive.read(_DESCRIPTION))
    except FileNotFoundError:
        raise errors.UnknownCheckpoint(f"there is no file {path}; give one that save or save_weights wrote") from None
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
        raise errors.CorruptCheckpoint(f"{path} is no file of a model, or is damaged: {error}") from error


__all__ = ["read_arrays", "write_arrays"]
