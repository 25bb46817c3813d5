"""Files of `torch.save`: state dicts, read without running what they contain.

Such a file describes its tensors in the instructions of Python's serialization format. This module interprets the
instructions that a state dict needs, about 30, and refuses all others. It imports nothing that a file names: the few
allowed names stand for functions of this module, which describe a tensor. So a file can give wrong numbers, and do
nothing else. `torch.load(weights_only=True)` works in the same way.
"""

import io
import os
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import ml_dtypes
import numpy as np

# The instructions of a model with 10,000 tensors have 1 MB.
_MOST_INSTRUCTIONS = 4 << 20
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_DTYPES = {
    "torch FloatStorage": np.dtype(np.float32),
    "torch DoubleStorage": np.dtype(np.float64),
    "torch HalfStorage": np.dtype(np.float16),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch LongStorage": np.dtype(np.int64),
    "torch IntStorage": np.dtype(np.int32),
    "torch ShortStorage": np.dtype(np.int16),
    "torch CharStorage": np.dtype(np.int8),
    "torch ByteStorage": np.dtype(np.uint8),
    "torch BoolStorage": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class _Name:
    """A name that a file refers to: "torch._utils _rebuild_tensor_v2". Nothing imports it."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """A storage: the numbers of one or more tensors."""

    key: str
    dtype: np.dtype
    length: int


@dataclass(frozen=True)
class _Tensor:
    """A tensor: its place in a storage, in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, values: np.ndarray) -> np.ndarray:
        """Returns the tensor from the values of its storage, as a copy."""
        last = self.offset + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))
        count = int(np.prod(self.shape, dtype=object))
        if not count:
            return np.empty(self.shape, values.dtype)
        if last >= len(values) or count > len(values):
            raise ValueError(f"a tensor of shape {self.shape} is outside of its storage of {len(values)} numbers")
        steps = tuple(stride * values.itemsize for stride in self.strides)
        return np.lib.stride_tricks.as_strided(values[self.offset :], self.shape, steps, writeable=False).copy()


def is_zip_of_tensors(archive: zipfile.ZipFile) -> bool:
    """Returns whether a zip archive is a file of `torch.save`."""
    return any(name.endswith("/data.pkl") for name in archive.namelist())


def from_zip(archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
    """Returns the tensors of an archive of `torch.save`, by name.

    Args:
        archive: the open archive.

    Raises:
        ValueError: the archive is damaged, or has something else than a state dict.
    """
    described = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
    root = described.removesuffix("data.pkl")
    members = {member.filename: member for member in archive.infolist()}
    order = archive.read(f"{root}byteorder") if f"{root}byteorder" in members else b"little"
    with archive.open(described) as file:
        tensors = _state_dict(_interpreted(_beginning(file)))

    def values(storage: _Storage) -> np.ndarray:
        member = members.get(f"{root}data/{storage.key}")
        wanted = storage.length * storage.dtype.itemsize
        # torch.save does not compress, so a file cannot claim more than it has.
        if member is None or member.compress_type != zipfile.ZIP_STORED or member.file_size != wanted:
            raise ValueError(f"the storage {storage.key!r} of {wanted:,} bytes is missing, or has another size")
        dtype = storage.dtype.newbyteorder("big" if order == b"big" else "little")
        return np.frombuffer(archive.read(member), dtype).astype(storage.dtype, copy=False)

    return _read_all(tensors, values)


def from_stream(file: IO[bytes]) -> dict[str, np.ndarray]:
    """Returns the tensors of a file of `torch.save` before PyTorch 1.6, by name.

    Args:
        file: the open file, at its beginning.

    Raises:
        ValueError: the file is damaged, or has something else than a state dict.
    """
    start = _beginning(file)
    if _interpreted(start) != _MAGIC or _interpreted(start) != _PROTOCOL:
        raise ValueError("it is not a file of torch.save")
    system = _interpreted(start)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise ValueError("its numbers are not in little-endian order")
    tensors = _state_dict(_interpreted(start))
    storages = {tensor.storage.key: tensor.storage for tensor in tensors.values()}
    keys = _interpreted(start)
    file.seek(start.tell())
    size = os.fstat(file.fileno()).st_size
    found: dict[str, np.ndarray] = {}
    for key in keys if isinstance(keys, list) else ():
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None:
            raise ValueError("it has a storage that no tensor uses")
        nbytes = storage.length * storage.dtype.itemsize
        length = int.from_bytes(file.read(8), "little")
        if length != storage.length or nbytes > size - file.tell():
            raise ValueError(f"the storage {key!r} of {nbytes:,} bytes is cut short")
        found[key] = np.frombuffer(file.read(nbytes), storage.dtype.newbyteorder("little"))
    if missing := storages.keys() - found.keys():
        raise ValueError(f"the storage {min(missing)!r} is missing")
    return _read_all(tensors, lambda storage: found[storage.key].astype(storage.dtype, copy=False))


def _beginning(file: IO[bytes]) -> io.BytesIO:
    """Returns the instructions in memory: how long a text is, is then no more than the file has."""
    return io.BytesIO(file.read(_MOST_INSTRUCTIONS))


def _state_dict(value: Any) -> dict[str, _Tensor]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"it has a {type(value).__name__}, not a state dict; save model.state_dict()")
    for name, tensor in value.items():
        if not isinstance(tensor, _Tensor):
            raise ValueError(  # noqa: TRY004 - it is the file that is wrong
                f"{name!r:.100} is a {type(tensor).__name__}, not a tensor; save model.state_dict() alone"
            )
    return value


def _read_all(tensors: Mapping[str, _Tensor], values: Callable[[_Storage], np.ndarray]) -> dict[str, np.ndarray]:
    read: dict[str, np.ndarray] = {}
    for tensor in tensors.values():
        if tensor.storage.key not in read:
            read[tensor.storage.key] = values(tensor.storage)
    return {name: tensor.read(read[tensor.storage.key]) for name, tensor in tensors.items()}


class _Mark:
    """The mark on the stack that the instruction MARK leaves."""


def _interpreted(stream: io.BytesIO) -> Any:
    """Runs the instructions up to the next STOP, and returns the value.

    Raises:
        ValueError: an instruction is not allowed, or does not fit.
    """
    interpreter = _Interpreter()
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name == "STOP":
                return interpreter.pop()
            interpreter.step(opcode.name, argument)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"its instructions do not fit together ({type(error).__name__})") from None
    raise ValueError("its instructions end early")


class _Interpreter:
    """The stack and the memory of the instructions."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memory: dict[int, Any] = {}

    def pop(self) -> Any:
        """Takes the top of the stack."""
        return self._stack.pop()

    def step(self, name: str, argument: Any) -> None:
        """Executes one instruction.

        Args:
            name: its name.
            argument: its argument, decoded.

        Raises:
            ValueError: the instruction is not allowed.
        """
        if name in _GIVEN:
            self._stack.append(argument)
        elif name in _MADE:
            self._stack.append(_MADE[name]())
        elif name in _SIMPLE:
            self._remember(name, argument)
        elif name in _JOINED:
            self._join(name)
        else:
            raise ValueError(f"it has the instruction {name}, which no state dict needs; save model.state_dict()")

    def _remember(self, name: str, argument: Any) -> None:
        match name:
            case "BINPUT" | "LONG_BINPUT":
                self._memory[argument] = self._stack[-1]
            case "MEMOIZE":
                self._memory[len(self._memory)] = self._stack[-1]
            case "BINGET" | "LONG_BINGET":
                self._stack.append(self._memory[argument])
            case "GLOBAL":
                self._stack.append(_Name(argument))
            case "BUILD":  # the attributes of an OrderedDict
                self._stack.pop()

    def _join(self, name: str) -> None:
        """Executes an instruction that makes one value of others."""
        stack = self._stack
        match name:
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple([stack.pop() for _ in range(int(name[-1]))][::-1]))
            case "APPEND" | "APPENDS":
                items = self._since_mark() if name == "APPENDS" else [stack.pop()]
                _target(stack, list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._since_mark() if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
                if not all(type(key) is str for key in items[::2]):  # to hash tuples in tuples could end the process
                    raise TypeError
                _target(stack, dict).update(zip(items[::2], items[1::2], strict=True))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_called(function, arguments))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))

    def _since_mark(self) -> list[Any]:
        place = len(self._stack) - 1
        while self._stack[place] is not _Mark:
            if place == 0:
                raise IndexError
            place -= 1
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items


# Instructions that push their argument, those that push a new value, and those of one or more values.
_GIVEN = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING", "BINFLOAT"}) | frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1"}
)
_MADE: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _Mark,
}
_SIMPLE = frozenset({"PROTO", "FRAME", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "BUILD"})
_JOINED = frozenset(
    {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "REDUCE", "BINPERSID"}
)


def _target(stack: list[Any], kind: type[Any]) -> Any:
    if type(stack[-1]) is not kind:
        raise TypeError
    return stack[-1]


def _called(function: Any, arguments: Any) -> Any:
    """Returns what a call stands for. Only calls that describe a tensor are known."""
    name = function.name if isinstance(function, _Name) else type(function).__name__
    match name, arguments:
        case "collections OrderedDict", ():
            return {}
        case "torch._utils _rebuild_tensor_v2" | "torch._utils _rebuild_tensor", (
            _Storage() as storage,
            int(offset),
            tuple(shape),
            tuple(strides),
            *_,
        ):
            numbers = (offset, *shape, *strides)
            if len(shape) == len(strides) and all(type(it) is int and 0 <= it < 1 << 48 for it in numbers):
                return _Tensor(storage, offset, shape, strides)
        case "torch._utils _rebuild_parameter", (_Tensor() as tensor, *_):
            return tensor
    raise ValueError(f"it calls {name!r:.100} in a way that no state dict needs; save model.state_dict()")


def _storage(described: Any) -> _Storage:
    match described:
        # In older files, a last item other than None is the part of another storage.
        case ("storage", _Name(name), str(key), _, int(length), *rest) if (
            name in _DTYPES and length >= 0 and rest in ([], [None])
        ):
            return _Storage(key, _DTYPES[name], length)
    raise ValueError(f"it has a storage of an unknown kind: {described!r:.100}")


__all__ = ["from_stream", "from_zip", "is_zip_of_tensors"]
