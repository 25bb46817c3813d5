"""Variables: the named tensors that a job trains. A program returns them in a dict by name.

`shoal.initializers` defines their initial values, `shoal.partitioners` how they are cut into slices.
"""

import copy
import math
import operator
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shoal import errors, initializers, partitioners
from shoal._limits import catalogue
from shoal._numerics import SUPPORTED_DTYPES, Aggregation, array_of, dtype_code, dtype_from_code, rows_of, storage_dtype
from shoal.initializers import Given, Initializer, Zeros
from shoal.partitioners import Partitioner
from shoal.v1 import tensor_pb2

_MAX_NAME_CHARACTERS = 255
_INT64_AGGREGATIONS = (Aggregation.SUM, Aggregation.LAST)
_ZEROS = Zeros()

AggregationName = Literal["mean", "sum", "last"]
_AGGREGATIONS: dict[AggregationName, Aggregation] = {
    "mean": Aggregation.MEAN,
    "sum": Aggregation.SUM,
    "last": Aggregation.LAST,
}
_AGGREGATION_NAMES = {aggregation: name for name, aggregation in _AGGREGATIONS.items()}


@dataclass(frozen=True, init=False)
class Variable:
    """A dense tensor that servers keep and that pushes change.

    Args:
        shape: dimensions, each > 0. () is a scalar; a single integer is the length of a vector.
        dtype: float32, float64, float16, bfloat16 or int64. For float16 and bfloat16, the servers keep float32 values,
            which travel in two bytes per element.
        initializer: the rule for the initial values.
        trainable: whether pushes carry gradients, which the job's optimizer applies.
        aggregation: the rule for a variable that is not trainable. "mean" assigns the mean of the values pushed in a
            step, "last" assigns the last value, and "sum" adds increments. None means "last". If a sum leaves the range
            of the dtype, the element stays at the limit that it passed. In modes other than synchronous, "mean" of a
            session assigns the last value, and that of a program changes by the worker's change divided by the number
            of workers.
        partitioner: the rule that cuts the variable along its first axis, so that several servers can share it. None
            means one slice.

    Raises:
        InvalidVariable: an argument is out of range, or two contradict each other.
        LimitExceeded: the variable has too many dimensions, elements or bytes.

    Attributes:
        shape: the shape, as a tuple.
        dtype: the NumPy dtype.
        aggregation: the rule that `trainable` and `aggregation` resolve to.
        values: the initial values that `of` was called with, or None. They do not travel with the variable.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    initializer: Initializer
    aggregation: Aggregation
    partitioner: Partitioner | None
    values: np.ndarray | None = field(compare=False, repr=False)

    def __init__(
        self,
        shape: int | Sequence[int],
        dtype: npt.DTypeLike = "float32",
        initializer: Initializer = _ZEROS,
        *,
        trainable: bool = True,
        aggregation: AggregationName | None = None,
        partitioner: Partitioner | None = None,
    ) -> None:
        # The class is frozen, so object.__setattr__ sets the normalized fields.
        object.__setattr__(self, "shape", _shape(shape))
        object.__setattr__(self, "dtype", _dtype(dtype))
        object.__setattr__(self, "initializer", initializer)
        object.__setattr__(self, "aggregation", _aggregation(trainable, aggregation))
        object.__setattr__(self, "partitioner", partitioner)
        object.__setattr__(self, "values", None)
        self._check()

    @classmethod
    def of(
        cls,
        array: npt.ArrayLike,
        *,
        trainable: bool = True,
        aggregation: AggregationName | None = None,
        partitioner: Partitioner | None = None,
    ) -> "Variable":
        """Returns a variable that starts with the values of an array, in its shape and dtype.

            variables = {"w": weights, "mean": shoal.Variable.of(mean, trainable=False, aggregation="mean")}

        Args:
            array: the initial values. An array is not copied: do not change it until the job has begun.
            trainable: see `Variable`.
            aggregation: see `Variable`.
            partitioner: see `Variable`.

        Raises:
            InvalidVariable, LimitExceeded: see `Variable`.
        """
        values = array_of(array, "Variable.of", errors.InvalidVariable)
        made = cls(
            values.shape,
            values.dtype,
            Given(),
            trainable=trainable,
            aggregation=aggregation,
            partitioner=partitioner,
        )
        object.__setattr__(made, "values", values)
        return made

    def with_state(self, updates: int) -> "Variable":
        """Returns the same variable, whose given values come with a state of the optimizer; see `Given`.

        A variable that is not trainable, or whose values are not given, is returned as it is.

        Args:
            updates: number of updates that the values have received.
        """
        if not self.trainable or not isinstance(self.initializer, Given):
            return self
        return self._changed(initializer=Given(1 + updates))

    def as_stored(self) -> "Variable":
        """Returns the same variable in the dtype that servers keep."""
        return self._changed(dtype=storage_dtype(self.dtype))

    def _changed(self, **fields: Any) -> "Variable":
        changed = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(changed, name, value)
        return changed

    @property
    def trainable(self) -> bool:
        """Whether pushes carry gradients."""
        return self.aggregation is Aggregation.TRAINABLE

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes, in the variable's own dtype."""
        return self.size * self.dtype.itemsize

    def slices(self) -> list[tuple[int, int]]:
        """Returns the rows [start, stop) of each slice, in order. No slice is empty; together they contain all rows."""
        if self.partitioner is None:
            return [(0, rows_of(self.shape))]
        return self.partitioner.slices(self.shape, self.dtype)

    def to_proto(self, name: str) -> tensor_pb2.Variable:
        """Returns the message that carries this variable under a name.

        Raises:
            InvalidVariable: the name is not valid.
        """
        _check_name(name)
        return tensor_pb2.Variable(
            name=name,
            shape=self.shape,
            dtype=dtype_code(self.dtype),
            aggregation=self.aggregation.value,
            initializer=self.initializer.to_proto(),
            partitioner=self.partitioner.to_proto() if self.partitioner else None,
        )

    def _check(self) -> None:
        if not isinstance(self.initializer, Initializer):
            raise errors.InvalidVariable(
                f"initializer is {self.initializer!r}; it must be an instance of an initializer, such as Zeros()"
            )
        if self.partitioner is not None and not isinstance(self.partitioner, Partitioner):
            raise errors.InvalidVariable(
                f"partitioner is {self.partitioner!r}; it must be an instance of a partitioner, such as "
                "FixedShards(4), or None"
            )
        if self.dtype.kind == "i" and self.aggregation not in _INT64_AGGREGATIONS:
            raise errors.InvalidVariable(
                f"a variable of {self.dtype} cannot be trained or averaged; "
                'set trainable=False and aggregation="sum" or "last", or choose a float dtype',
                dtype=self.dtype,
            )
        advice = "check the shape, or split the variable into several"
        if self.nbytes > catalogue.TENSOR_BYTES.default:
            # A product of 32 large dimensions is no float.
            tib = f"{self.nbytes / 2**40:,.1f}" if self.nbytes < 1 << 80 else "over 2^40"
            problem = f"a variable of shape {self.shape} and {self.dtype} has {tib} TiB"
            raise catalogue.TENSOR_BYTES.refusal(problem, advice, shape=self.shape)
        if self.size > catalogue.TENSOR_ELEMENTS.default:
            problem = f"a variable of shape {self.shape} has {self.size} elements"
            raise catalogue.TENSOR_ELEMENTS.refusal(problem, advice, shape=self.shape)
        self.initializer.check(self.dtype)
        if self.partitioner:
            self.slices()


def variable_from_array(array: np.ndarray) -> Variable:
    """Returns the variable that an array among a job's variables stands for. It starts with the array's values.

    A float array becomes a trainable variable, an int64 array one with the aggregation "last".

    Raises:
        InvalidVariable: a variable cannot have the array's shape or dtype.
    """
    return Variable(array.shape, array.dtype, Given(), trainable=array.dtype.kind != "i")


def from_protos(messages: Iterable[tensor_pb2.Variable]) -> dict[str, Variable]:
    """Returns the variables that messages carry, by name. Equal variables are one object.

    Most of a job's variables have one of a few shapes, so most need not be decoded and checked again.

    Raises:
        InvalidVariable: a variable is invalid. The text of the error begins with the variable's name.
        LimitExceeded: a variable is too large. The text begins likewise.
    """
    variables: dict[str, Variable] = {}
    decoded: dict[bytes, Variable] = {}
    nameless = tensor_pb2.Variable()
    for message in messages:
        name = message.name
        nameless.CopyFrom(message)
        nameless.ClearField("name")
        encoded = nameless.SerializeToString()
        try:
            _check_name(name)
            variable = decoded.get(encoded)
            if variable is None:
                variable = decoded[encoded] = _variable_from_proto(message)
        except (errors.InvalidVariable, errors.LimitExceeded) as error:
            raise type(error)(f"variable {name!r}: {error.message}", **{**error.details, "variable": name}) from None
        variables[name] = variable
    return variables


def _variable_from_proto(message: tensor_pb2.Variable) -> Variable:
    try:
        dtype, aggregation = dtype_from_code(message.dtype), Aggregation(message.aggregation)
    except (KeyError, ValueError) as error:
        raise errors.InvalidVariable("its dtype or its aggregation is missing or unknown") from error
    return Variable(
        message.shape,
        dtype,
        initializers.from_proto(message.initializer),
        trainable=aggregation is Aggregation.TRAINABLE,
        aggregation=_AGGREGATION_NAMES.get(aggregation),
        partitioner=partitioners.from_proto(message.partitioner),
    )


def _check_name(name: str) -> None:
    if not (0 < len(name) <= _MAX_NAME_CHARACTERS and name.isprintable()):
        raise errors.InvalidVariable(
            f"{name[: _MAX_NAME_CHARACTERS + 1]!r} is not a valid variable name; "
            f"use 1 to {_MAX_NAME_CHARACTERS} printable characters",
            variable=name[:_MAX_NAME_CHARACTERS],
        )


def _shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    rank = len(shape) if isinstance(shape, Sized) else 1
    if rank > catalogue.TENSOR_RANK.default:  # before the shape is copied or shown: a message may have millions
        raise catalogue.TENSOR_RANK.refusal(f"a shape has {rank} dimensions", dimensions=rank)
    try:
        dimensions = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError as error:
        raise errors.InvalidVariable(f"shape is {shape!r}; it must consist of integers", shape=shape) from error
    if min(dimensions, default=1) <= 0:
        raise errors.InvalidVariable(
            f"shape {dimensions} has a dimension of 0 or less, so there is nothing to train; leave the variable out",
            shape=dimensions,
        )
    return dimensions


def _dtype(dtype: npt.DTypeLike) -> np.dtype:
    try:
        resolved = np.dtype(dtype)
        dtype_code(resolved)
    except (TypeError, KeyError) as error:
        names = ", ".join(map(str, SUPPORTED_DTYPES))
        raise errors.InvalidVariable(
            f"dtype {dtype!s} is not supported; choose, or cast to, one of {names}", dtype=dtype
        ) from error
    return resolved


def _aggregation(trainable: bool, aggregation: AggregationName | None) -> Aggregation:
    if trainable and aggregation is None:
        return Aggregation.TRAINABLE
    if trainable:
        raise errors.InvalidVariable(
            f"aggregation is {aggregation!r}, but a trainable variable is changed by the optimizer; "
            "set trainable=False, or leave the aggregation out",
            aggregation=aggregation,
        )
    if aggregation is None:
        return Aggregation.LAST
    if aggregation not in _AGGREGATIONS:
        raise errors.InvalidVariable(
            f"aggregation {aggregation!r} is not one of {', '.join(_AGGREGATIONS)}", aggregation=aggregation
        )
    return _AGGREGATIONS[aggregation]


__all__ = ["Variable", "from_protos", "variable_from_array"]
