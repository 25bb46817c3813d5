"""Tensors: arrays that know how they were computed, so that a gradient tape can follow them back."""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.program import Array
from shoal_distribute.tensor_parallel import SplitArray
from shoal_distribute.values import DistributedVariable
from shoal_worker.arrays import namespace_of, on_host

_numbers = itertools.count()
# The records of the tapes that record what this thread computes.
_here = threading.local()


class Node:
    """One step of a computation: a layer, a loss, or an operation of arithmetic.

    Args:
        inputs: the tensors and variables that the step has gradients for.
        pull: takes the gradient with respect to the output, and returns one for each input, or None.

    Attributes:
        inputs: the same; empty once it is released.
        pull: the same; None once it is released.
        number: larger than those of the nodes that the inputs come from.
        holders: number of the records that have it.
    """

    __slots__ = ("holders", "inputs", "number", "pull")

    def __init__(
        self,
        inputs: tuple["Tensor | DistributedVariable", ...],
        pull: Callable[[Array], Sequence[Array | None]],
    ) -> None:
        self.inputs, self.number, self.holders = inputs, next(_numbers), 0
        self.pull: Callable[[Array], Sequence[Array | None]] | None = pull


class Record:
    """The steps that one tape has recorded. It keeps what their pullbacks need, until it is released."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []

    def add(self, node: Node) -> None:
        """Adds a step."""
        node.holders += 1
        self._nodes.append(node)

    @property
    def pullbacks(self) -> list[Callable[[Array], Sequence[Array | None]]]:
        """The pullbacks of the steps."""
        return [node.pull for node in self._nodes if node.pull is not None]

    def release(self) -> None:
        """Frees the memory of steps that no other record has. A loss that a user keeps then holds no activations."""
        for node in self._nodes:
            node.holders -= 1
            if not node.holders:
                node.inputs, node.pull = (), None
        self._nodes = []


class Tensor:
    """An array, and how a tape can find its gradients. Models and losses return it.

    It converts to NumPy by `numpy()` or `np.asarray`. A tape follows `+ - * / @ **`, `abs`, indexing, `sum` and `mean`,
    but no function of NumPy or CuPy. Comparisons return arrays.

    Args:
        array: a NumPy or CuPy array, or a `SplitArray`, which has a part on each of several devices.
        node: the step that computed it; None means that no gradient goes further back.

    Attributes:
        stored: the array as it was given.
        node: the step.
    """

    __slots__ = ("__weakref__", "_whole", "node", "stored")
    __array_ufunc__ = None  # an operator of NumPy's arrays leaves the work to this class

    def __init__(self, array: Array, node: Node | None = None) -> None:
        self.stored, self.node = array, node
        self._whole: Array | None = None

    @property
    def array(self) -> Array:
        """The array. One that is split over devices is gathered at the first access."""
        if not isinstance(self.stored, SplitArray):
            return self.stored
        if self._whole is None:
            self._whole = self.stored.gathered()
        return self._whole

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of its axes."""
        return tuple(self.stored.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its elements."""
        found: np.dtype[Any] = self.stored.dtype
        return found

    @property
    def ndim(self) -> int:
        """The number of its axes."""
        return int(self.stored.ndim)

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.array.__cuda_array_interface__

    def numpy(self) -> np.ndarray:
        """Returns the values on the host."""
        return on_host(self.array)

    def sum(self, axis: int | None = None) -> "Tensor":
        """Returns the sum over an axis, or over all elements."""
        shape = self.shape

        def pull(dy: Array) -> list[Array]:
            spread = dy if axis is None else namespace_of(dy).expand_dims(dy, axis)
            return [namespace_of(self.array).broadcast_to(spread, shape)]

        return recorded(namespace_of(self.array).asarray(self.array.sum(axis=axis)), (self,), pull)

    def mean(self, axis: int | None = None) -> "Tensor":
        """Returns the mean over an axis, or over all elements."""
        count: int = self.array.size if axis is None else self.array.shape[axis]
        return self.sum(axis) / count

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype, copy=copy)

    def __float__(self) -> float:
        return float(self.array)

    def __int__(self) -> int:
        return int(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __len__(self) -> int:
        return len(self.array)

    def __format__(self, text: str) -> str:
        return format(self.numpy()[()] if self.ndim == 0 else self.numpy(), text)

    def __repr__(self) -> str:
        return f"Tensor({self.numpy()!r})"

    def __add__(self, other: Any) -> "Tensor":
        return _combined(self, other, lambda a, b: a + b, lambda dy, *_: (dy, dy))

    def __sub__(self, other: Any) -> "Tensor":
        return _combined(self, other, lambda a, b: a - b, lambda dy, *_: (dy, -dy))

    def __mul__(self, other: Any) -> "Tensor":
        return _combined(self, other, lambda a, b: a * b, lambda dy, a, b: (dy * b, dy * a))

    def __truediv__(self, other: Any) -> "Tensor":
        return _combined(self, other, lambda a, b: a / b, lambda dy, a, b: (dy / b, -dy * a / (b * b)))

    def __rsub__(self, other: Any) -> "Tensor":
        return _combined(self, other, lambda a, b: b - a, lambda dy, *_: (-dy, dy))

    def __rtruediv__(self, other: Any) -> "Tensor":
        return _combined(self, other, lambda a, b: b / a, lambda dy, a, b: (-dy * b / (a * a), dy / a))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> "Tensor":
        return recorded(-self.array, (self,), lambda dy: [-dy])

    def __pow__(self, exponent: float) -> "Tensor":
        if not isinstance(exponent, int | float | np.number):
            return NotImplemented  # its gradient with respect to the exponent is not there
        x: Any = self.array
        slope = 0 if exponent == 0 else exponent  # 0 * 0**-1 is no number

        def pull(dy: Array) -> list[Array]:
            return [dy * slope * x ** (exponent - 1) if slope else dy * 0]

        return recorded(x**exponent, (self,), pull)

    def __abs__(self) -> "Tensor":
        x = self.array
        return recorded(abs(x), (self,), lambda dy: [dy * namespace_of(x).sign(x)])

    def __matmul__(self, other: Any) -> "Tensor":
        return _combined(self, other, lambda a, b: a @ b, _matmul_slopes)

    def __rmatmul__(self, other: Any) -> "Tensor":
        return _combined(self, other, lambda a, b: b @ a, lambda dy, a, b: _matmul_slopes(dy, b, a)[::-1])

    def __getitem__(self, key: Any) -> "Tensor":
        x, xp = self.array, namespace_of(self.array)

        def pull(dy: Array) -> list[Array]:
            whole = xp.zeros_like(x)
            xp.add.at(whole, key, dy)  # an element may be taken more than once
            return [whole]

        return recorded(xp.asarray(x[key]), (self,), pull)

    def __lt__(self, other: Any) -> Array:
        return self.array < array_of(other)

    def __gt__(self, other: Any) -> Array:
        return self.array > array_of(other)

    def __le__(self, other: Any) -> Array:
        return self.array <= array_of(other)

    def __ge__(self, other: Any) -> Array:
        return self.array >= array_of(other)


def array_of(value: Any) -> Any:
    """Returns the array of a tensor, the value of a variable, and any other value itself."""
    if isinstance(value, Tensor):
        return value.array
    return value.read() if isinstance(value, DistributedVariable) else value


def is_recorded(value: Any) -> bool:
    """Returns whether a gradient can go further back than this value, while a tape records."""
    return isinstance(value, Tensor) and value.node is not None and value.node.pull is not None


def is_recording() -> bool:
    """Returns whether a tape records what this thread computes."""
    return bool(open_records())


def open_records() -> list[Record]:
    """Returns the records of the tapes that record what this thread computes. A tape changes the list."""
    if not hasattr(_here, "records"):
        _here.records = []
    found: list[Record] = _here.records
    return found


def recorded(
    array: Array, inputs: Sequence[Tensor | DistributedVariable], pull: Callable[[Array], Sequence[Array | None]]
) -> Tensor:
    """Returns a tensor with its node, if a tape records and an input leads further back.

    Args:
        array: what the step computed.
        inputs: the tensors and variables that it was computed from.
        pull: see `Node`.
    """
    if not is_recording() or not any(isinstance(it, DistributedVariable) or is_recorded(it) for it in inputs):
        return Tensor(array)
    node = Node(tuple(inputs), pull)
    for record in open_records():
        record.add(node)
    return Tensor(array, node)


def leaf() -> Node:
    """Returns a node that leads no further back, for a tensor that a tape watches."""
    return Node((), lambda _: ())


def tensor_of(variable: DistributedVariable) -> Tensor:
    """Returns the value of a variable as a tensor that tapes follow back to the variable."""
    return recorded(variable.read(), (variable,), lambda dy: [dy])


DistributedVariable.tensor_of = tensor_of


def _combined(
    a: Tensor,
    other: Any,
    value: Callable[[Array, Any], Array],
    slopes: Callable[[Array, Array, Any], tuple[Array, Array]],
) -> Tensor:
    b = array_of(other)
    if not (np.isscalar(b) or hasattr(b, "__array__")):
        return NotImplemented  # type: ignore[no-any-return] # Python tries the other operand
    x = a.array
    inputs: tuple[Any, ...] = (a, other) if isinstance(other, Tensor | DistributedVariable) else (a,)

    def pull(dy: Array) -> list[Array]:
        found = slopes(dy, x, b)
        return [_unbroadcast(slope, array_of(it)) for slope, it in zip(found, inputs, strict=False)]

    return recorded(namespace_of(x).asarray(value(x, b)), inputs, pull)


def _matmul_slopes(dy: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """Returns the gradients of both factors of a matrix product, before those of broadcast axes are added up."""
    rows, columns = a if a.ndim > 1 else a[None, :], b if b.ndim > 1 else b[:, None]
    whole = dy if b.ndim > 1 else dy[..., None]
    whole = whole if a.ndim > 1 else whole[..., None, :]
    da, db = whole @ columns.swapaxes(-1, -2), rows.swapaxes(-1, -2) @ whole
    return da if a.ndim > 1 else da[..., 0, :], db if b.ndim > 1 else db[..., 0]


def _unbroadcast(gradient: Array, like: Array) -> Array:
    """Adds up a gradient along the axes that arithmetic has broadcast."""
    shape = like.shape
    ahead = gradient.ndim - len(shape)
    axes = (*range(ahead), *(ahead + i for i, length in enumerate(shape) if length == 1 != gradient.shape[ahead + i]))
    return gradient.sum(axis=axes).reshape(shape) if axes else gradient


__all__ = [
    "Node",
    "Record",
    "Tensor",
    "array_of",
    "is_recorded",
    "is_recording",
    "leaf",
    "open_records",
    "recorded",
    "tensor_of",
]
