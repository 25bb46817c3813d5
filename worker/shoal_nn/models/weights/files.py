"""Files of arrays by name: safetensors, .npz, HDF5 of Keras, and state dicts of PyTorch."""

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from shoal import errors
from shoal._checkpoint import SafetensorsFile
from shoal._system import docs_url, load
from shoal_nn.models.weights import state_dicts

# What damaged archives, arrays and texts raise.
_DAMAGE = (
    ValueError,
    KeyError,
    OverflowError,
    RuntimeError,
    NotImplementedError,
    OSError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    MemoryError,
)


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of a file by the names in the file. The first bytes show the format.

    Args:
        path: the file. In a file of Keras, a name is that of the layer, a slash, and that of the weight:
            "Conv1/kernel".

    Raises:
        InvalidData: the file does not exist, is damaged, or has another format.
        ImportError: it is an HDF5 file, and h5py is not installed.
    """
    where = Path(path)
    try:
        with where.open("rb") as file:
            return _read(where, file)
    except errors.CorruptCheckpoint as error:
        raise errors.InvalidData(str(error)) from None
    except FileNotFoundError:
        raise errors.InvalidData(
            f"there is no file of weights at {where.absolute()}; download it from its publisher and save it there, or "
            f"give the path where it is (addresses: {docs_url('how-to/models#published-weights')})"
        ) from None
    except _DAMAGE as error:
        reason = " ".join(str(error).split())
        raise errors.InvalidData(
            f"{where} cannot be read: {reason:.300}; it may be damaged: compare it with its source, or download it "
            "again"
        ) from None


def _read(path: Path, file: IO[bytes]) -> dict[str, np.ndarray]:
    begin = file.read(8)
    file.seek(0)
    if begin.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(file) as archive:
            if state_dicts.is_zip_of_tensors(archive):
                return state_dicts.from_zip(archive)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    if begin.startswith(b"\x80"):
        return state_dicts.from_stream(file)
    if begin == b"\x89HDF\r\n\x1a\n":
        return _from_hdf5(path)
    with SafetensorsFile(path) as tensors:
        return tensors.arrays()


def _from_hdf5(path: Path) -> dict[str, np.ndarray]:
    """Reads weights of Keras: the older format, which is published, and that of `save_weights` in Keras 3."""
    h5py = load("h5py", f"the file {path}", extra="hdf5")
    found: dict[str, np.ndarray] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            parent = item.parent
            weight = name.rpartition("/")[2].partition(":")[0]
            if parent.name.endswith("/vars"):  # of Keras 3: layers/conv2d_1/vars/0
                found[f"{parent.attrs.get('name', parent.parent.name)}/{weight}"] = item[()]
            else:  # conv1/conv1/kernel:0, in model_weights if a whole model was saved
                layer = name.removeprefix("model_weights/").partition("/")[0]
                found[f"{layer}/{weight}"] = item[()]

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return found


__all__ = ["read_arrays"]
