"""Files that Python's object serialization wrote, read as data: plain values and byte arrays, and nothing is called.

The standard module of that format runs whatever a file asks for; it is imported nowhere here. This is a stack machine
of the opcodes that dicts, lists, numbers, texts and NumPy's arrays of bytes are written with, by protocols 2 to 4, as
`pickletools` of the standard library describes them. Three names are known, and stand for themselves; others are
refused.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from shoal import errors

_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_NDARRAY, _DTYPE = "numpy ndarray", "numpy dtype"
_BYTE_TYPES = {"u1", "|u1"}


class Damaged(Exception):
    """What the file says makes no sense, or is none of what is read here."""


class _Name(str):
    """One of the names that are known, as a value on the stack."""

    __slots__ = ()


class _Byte:
    """The type of an array's elements; uint8 is the only one."""


class _Array:
    """An array: empty when it is made, and filled by what follows."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def fill(self, state: Any) -> None:
        _version, shape, dtype, by_columns, raw = state
        if not isinstance(dtype, _Byte) or not isinstance(raw, bytes) or not isinstance(shape, tuple):
            raise Damaged("an array is not of bytes")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise Damaged("the dimensions of an array are no sizes")
        self.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if by_columns else "C")


class Reader:
    """Reads one file.

    Args:
        raw: its bytes.
        name: of the file, for messages.
    """

    def __init__(self, raw: bytes, name: str) -> None:
        self._raw, self._name = raw, name
        self._at = 0  # the next byte
        self._stack: list[Any] = []
        self._marks: list[int] = []  # rising; heights of _stack
        self._memo: dict[int, Any] = {}

    def mapping(self) -> dict[str, Any]:
        """What the file holds, which is a dict: values by name, arrays as read-only uint8, texts of Python 2 as bytes.

        Raises:
            InvalidData: it asks for more than data.
            Damaged: it is damaged, cut short, or no such file; the message says where.
        """
        begin = 0
        try:
            while True:
                begin = self._at
                if (code := self._take(1)) == b".":
                    break
                self._steps.get(code, Reader._unknown)(self)
            (value,) = self._stack
            return {key: item.value if isinstance(item, _Array) else item for key, item in _dict(value).items()}
        # What a machine of this kind stumbles over when its program is not one.
        except (Damaged, IndexError, KeyError, TypeError, AttributeError, ValueError, struct.error) as error:
            what = str(error) if isinstance(error, Damaged) else f"makes no sense ({type(error).__name__})"
            raise Damaged(f"at byte {begin}: {what}") from None

    def _take(self, size: int) -> bytes:
        if not 0 <= size <= len(self._raw) - self._at:
            raise Damaged(f"it ends at byte {len(self._raw)}, and {size} bytes more are to follow")
        self._at += size
        return self._raw[self._at - size : self._at]

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _line(self) -> str:
        end = self._raw.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1].decode("ascii")

    def _above_mark(self) -> list[Any]:
        """What was put on the stack since the last mark, taken from it."""
        height = self._marks.pop()
        items = self._stack[height:]
        if height > len(self._stack):
            raise Damaged("a mark is above the stack")
        del self._stack[height:]
        return items

    def _unknown(self) -> None:
        code = self._raw[self._at - 1]
        raise Damaged(f"the opcode {code:02x} is none that arrays and plain values need")

    def _protocol(self) -> None:
        if (protocol := self._number("B")) not in {2, 3, 4}:
            raise Damaged(f"it is of protocol {protocol}; 2 to 4 are read")

    def _frame(self) -> None:
        self._take(8)  # how much may be buffered

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _remember(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _recall(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def _tuple(self, size: int | None) -> None:
        items = self._above_mark() if size is None else [self._stack.pop() for _ in range(size)][::-1]
        self._stack.append(tuple(items))

    def _append(self, items: list[Any]) -> None:
        _list(self._stack[-1]).extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = _dict(self._stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_text(key)] = value

    def _global(self, module: str, attribute: str) -> None:
        name = f"{module} {attribute}"
        if name not in {*_RECONSTRUCT, _NDARRAY, _DTYPE}:
            raise errors.InvalidData(
                f"{self._name}, at byte {self._at}, asks for {module[:80]}.{attribute[:80]}, which no data needs; "
                "nothing of it was run: get the file from those who publish it"
            )
        self._stack.append(_Name(name))

    def _stack_global(self) -> None:
        attribute, module = self._stack.pop(), self._stack.pop()
        self._global(_text(module), _text(attribute))

    def _reduce(self) -> None:
        arguments, called = self._stack.pop(), self._stack.pop()
        first = arguments[0]
        if type(called) is _Name and called in _RECONSTRUCT and type(first) is _Name and first == _NDARRAY:
            self._stack.append(_Array())
        elif type(called) is _Name and called == _DTYPE and _text(first) in _BYTE_TYPES:
            self._stack.append(_Byte())
        else:
            raise Damaged("what it makes is no array of bytes")

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, _Array):
            target.fill(state)
        elif not isinstance(target, _Byte):  # whose state says nothing: bytes have no order
            raise Damaged("what it fills is no array")

    def _bytes(self, form: str) -> None:
        self._stack.append(self._take(self._number(form)))

    def _unicode(self, form: str) -> None:
        self._stack.append(self._take(self._number(form)).decode())

    _steps: ClassVar[Mapping[bytes, Callable[["Reader"], object]]] = {
        b"\x80": _protocol,
        b"\x95": _frame,
        b"(": _mark,
        b"N": lambda self: self._stack.append(None),
        b"\x88": lambda self: self._stack.append(True),
        b"\x89": lambda self: self._stack.append(False),
        b"J": lambda self: self._stack.append(self._number("<i")),
        b"K": lambda self: self._stack.append(self._number("B")),
        b"M": lambda self: self._stack.append(self._number("<H")),
        b"\x8a": lambda self: self._stack.append(int.from_bytes(self._take(self._number("B")), "little", signed=True)),
        b"T": lambda self: self._bytes("<i"),
        b"U": lambda self: self._bytes("B"),
        b"B": lambda self: self._bytes("<I"),
        b"C": lambda self: self._bytes("B"),
        b"\x8e": lambda self: self._bytes("<Q"),
        b"X": lambda self: self._unicode("<I"),
        b"\x8c": lambda self: self._unicode("B"),
        b"\x8d": lambda self: self._unicode("<Q"),
        b"]": lambda self: self._stack.append([]),
        b"}": lambda self: self._stack.append({}),
        b")": lambda self: self._stack.append(()),
        b"t": lambda self: self._tuple(None),
        b"\x85": lambda self: self._tuple(1),
        b"\x86": lambda self: self._tuple(2),
        b"\x87": lambda self: self._tuple(3),
        b"a": lambda self: self._append([self._stack.pop()]),
        b"e": lambda self: self._append(self._above_mark()),
        b"s": lambda self: self._set_items([self._stack.pop(), self._stack.pop()][::-1]),
        b"u": lambda self: self._set_items(self._above_mark()),
        b"q": lambda self: self._remember(self._number("B")),
        b"r": lambda self: self._remember(self._number("<I")),
        b"\x94": lambda self: self._remember(len(self._memo)),
        b"h": lambda self: self._recall(self._number("B")),
        b"j": lambda self: self._recall(self._number("<I")),
        b"c": lambda self: self._global(self._line(), self._line()),
        b"\x93": _stack_global,
        b"R": _reduce,
        b"b": _build,
    }


def _dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise Damaged(f"a {type(value).__name__} is where a dict belongs")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise Damaged(f"a {type(value).__name__} is where a list belongs")
    return value


def _text(value: Any) -> str:
    """A text, which Python 2 wrote as bytes. Nothing else may be a key: tuples deep enough overrun the stack of C."""
    if type(value) is bytes:
        return value.decode("latin-1")
    if type(value) is not str:
        raise Damaged(f"a {type(value).__name__} is where a text belongs")
    return value


__all__ = ["Damaged", "Reader"]
