"""The header of a tensor file in the safetensors format.

A file in this format (https://huggingface.co/docs/safetensors) has three parts: the header's length in 8 bytes,
little-endian; the header, a JSON object with one field for each tensor; and the bytes of the tensors without gaps. The
safetensors library copies tensors before it writes them, and reads local files only. Shoal therefore has this module: a
server writes arenas of many GB without a copy, and reads parts of a file from any storage. Tests check that the library
reads the files of this module, and that this module reads the files of the library.
"""

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from shoal import errors
from shoal._limits import catalogue

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_SHOWN = 1_000  # characters
_ALIGNMENT = 64  # of the first tensor, so that a mapped file can be used without a copy
_METADATA = "__metadata__"
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    # Only in files of other frameworks; variables do not have these dtypes.
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file: bytes [start, stop) of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a file.

    Attributes:
        tensors: tensors by name, in the order of their bytes.
        metadata: texts by name, for people.
        nbytes: size of the whole file.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    nbytes: int = 0


def encode_header(
    tensors: Iterable[tuple[str, np.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Encodes the header of a file, with the length before it.

    Args:
        tensors: name, dtype and shape of each tensor, in the order of their bytes.
        metadata: texts by name, for people.

    Raises:
        ValueError: a name is duplicate, or the header is larger than the format allows.
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        if name in entries or name == _METADATA:
            raise ValueError(f"tensor {name!r} is twice in one file")
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes exceeds the limit of {MAX_HEADER_BYTES}; use more shards")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(beginning: bytes, nbytes: int, where: str) -> int:
    """Returns the size of the header in bytes, including the length before it.

    Args:
        beginning: the first `LENGTH_BYTES` bytes of the file.
        nbytes: size of the whole file.
        where: the file's name, for messages.

    Raises:
        CorruptCheckpoint: the header is larger than the file, or than the format allows.
    """
    size = int.from_bytes(beginning, "little")
    if len(beginning) != LENGTH_BYTES or size > min(MAX_HEADER_BYTES, nbytes - LENGTH_BYTES):
        raise damaged(where, f"its header has {size} bytes, but the file has {nbytes}")
    return LENGTH_BYTES + size


def decode_header(header: bytes, nbytes: int, where: str) -> Contents:
    """Decodes a header.

    Args:
        header: the header, including the length before it.
        nbytes: size of the whole file.
        where: the file's name, for messages.

    Returns:
        The contents of the file.

    Raises:
        CorruptCheckpoint: the header is invalid, or the tensors do not fill the file exactly.
    """
    try:
        entries = json.loads(header[LENGTH_BYTES:].decode(), object_pairs_hook=_once)
        metadata = {name: _text(text) for name, text in entries.pop(_METADATA, {}).items()}
        tensors = {name: _tensor(entry, len(header)) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(where, f"its header cannot be read: {error}") from None
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = len(header)
    for name, tensor in tensors.items():
        if tensor.start != end:
            raise damaged(where, f"tensor {name!r} begins at byte {tensor.start}, not {end}")
        end = tensor.stop
    if end != nbytes:
        raise damaged(where, f"its tensors end at byte {end} of {nbytes}")
    return Contents(tensors, metadata, nbytes)


def entry_of(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> str:
    """Returns a tensor's entry in a manifest: its dtype, its shape and its name, as in "F32 40,30 value/0/kernel".

    Args:
        name: name of the tensor.
        dtype: its dtype.
        shape: its shape.
    """
    return f"{_NAMES[dtype]} {','.join(map(str, shape))} {name}"


def decode_entry(entry: str, where: str) -> tuple[str, np.dtype, tuple[int, ...]]:
    """Returns the name, the dtype and the shape in a manifest's entry.

    Raises:
        CorruptCheckpoint: the entry is invalid.
    """
    try:
        dtype, shape, name = entry.split(" ", 2)
        return name, _DTYPES[dtype], tuple(map(_size, shape.split(","))) if shape else ()
    except (ValueError, KeyError, AttributeError) as error:
        raise damaged(where, f"its entry {reprlib.repr(entry)} for a tensor cannot be read: {error}") from None


def _tensor(entry: Mapping[str, Any], data: int) -> Tensor:
    if (rank := len(entry["shape"])) > catalogue.TENSOR_RANK.default:  # before the shape is copied or shown
        raise ValueError(f"a tensor has {rank} dimensions; the limit TENSOR_RANK is {catalogue.TENSOR_RANK.default}")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"{reprlib.repr(entry)} has invalid numbers")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"the size of {reprlib.repr(entry)} does not match its shape")
    return Tensor(dtype, shape, data + start, data + stop)


def _size(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{reprlib.repr(text)} is not a size")
    return int(text)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"metadata {reprlib.repr(value)} is not a text")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name is duplicate")
    return entries


def damaged(where: str, what: str) -> errors.CorruptCheckpoint:
    """Returns the error for a damaged file. It cuts a long text, because a name may fill a header."""
    shown = what if len(what) <= _MAX_SHOWN else f"{what[:_MAX_SHOWN]}..."
    return errors.CorruptCheckpoint(f"{where} is damaged: {shown}", file=where)


__all__ = [
    "LENGTH_BYTES",
    "Contents",
    "Tensor",
    "damaged",
    "decode_entry",
    "decode_header",
    "encode_header",
    "entry_of",
    "header_bytes",
]
