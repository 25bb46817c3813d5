"""Dense and Embedding layers."""

from dataclasses import dataclass

from shoal.initializers import HeNormal, Initializer, Normal, Zeros
from shoal.program import Array
from shoal.variables import Variable
from shoal_nn._ops import column_sums, matmul, widened
from shoal_nn.layer import Layer, Pullback, Shape, Train, Values, trainable
from shoal_worker.arrays import namespace_of

_HE, _ZEROS, _SMALL = HeNormal(), Zeros(), Normal(stddev=0.05)


@dataclass(frozen=True)
class Dense(Layer):
    """Fully connected layer: y = x @ kernel + bias, over the last axis.

    Variables: "kernel" [inputs, units] and "bias" [units].

    Args:
        units: length of the output's last axis, > 0.
        bias: whether to add a bias.
        initializer: initializer of the kernel; the bias starts at 0.

    Raises:
        InvalidLayer: units is 0 or less.
    """

    units: int
    bias: bool = True
    initializer: Initializer = _HE

    def __post_init__(self) -> None:
        self._demand(self.units > 0, f"units is {self.units}; it must be 1 or more")

    def output_shape(self, shape: Shape) -> Shape:
        self._require(len(shape) > 0, shape, "at least one axis: (..., inputs)")
        return (*shape[:-1], self.units)

    def variables(self, shape: Shape) -> dict[str, Variable]:
        self.output_shape(shape)
        kept = {"kernel": trainable((shape[-1], self.units), self.initializer)}
        return kept | ({"bias": trainable((self.units,), _ZEROS)} if self.bias else {})

    def apply(self, params: Values, state: Values, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:  # noqa: ARG002
        kernel = self._kept(params, "kernel", None, self.units)
        bias = self._kept(params, "bias", self.units) if self.bias else None
        inputs = kernel.shape[0]
        self._require_floats(x)
        self._require(x.ndim > 1 and x.shape[-1] == inputs, x.shape[1:], f"(..., {inputs})")
        rows = x.reshape(-1, inputs)
        y = matmul(rows, kernel, x.dtype)
        if bias is not None:
            y += bias.astype(y.dtype, copy=False)

        def pullback(dy: Array) -> tuple[dict[str, Array], Array]:
            flat = dy.reshape(-1, self.units)
            found = {"kernel": matmul(rows.T, flat, x.dtype).astype(kernel.dtype, copy=False)}
            if bias is not None:
                found["bias"] = column_sums(flat).astype(bias.dtype, copy=False)
            dx = matmul(flat, kernel.T, x.dtype).astype(x.dtype, copy=False)
            return found, dx.reshape(x.shape)

        return y.astype(x.dtype, copy=False).reshape(*x.shape[:-1], self.units), {}, pullback


@dataclass(frozen=True)
class Embedding(Layer):
    """Table of vectors: y = table[x]. x has integers, so there is no dx.

    Variables: "table" [rows, width]. The output has the table's dtype. On a GPU, gradients of a row that occurs more
    than once in a batch are added with atomics in no fixed order, so their last bits may differ from run to run.

    Args:
        rows: number of rows; x is in [0, rows). Other values are not checked: NumPy raises IndexError for large ones
            and counts negative ones from the end; CuPy takes any row.
        width: length of a vector.
        initializer: initializer of the table.

    Raises:
        InvalidLayer: rows or width is 0 or less.
    """

    rows: int
    width: int
    initializer: Initializer = _SMALL

    def __post_init__(self) -> None:
        self._demand(
            min(self.rows, self.width) > 0, f"the table is [{self.rows}, {self.width}]; give 1 or more of each"
        )

    def output_shape(self, shape: Shape) -> Shape:
        return (*shape, self.width)

    def variables(self, shape: Shape) -> dict[str, Variable]:  # noqa: ARG002 - any shape fits
        return {"table": trainable((self.rows, self.width), self.initializer)}

    def apply(self, params: Values, state: Values, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:  # noqa: ARG002
        table = self._kept(params, "table", self.rows, self.width)
        self._require(x.dtype.kind in "iu", x.shape[1:], f"integers, not {x.dtype}")

        def pullback(dy: Array) -> tuple[dict[str, Array], Array]:
            xp = namespace_of(dy)
            found = xp.zeros(table.shape, widened(table[:0]).dtype)
            xp.add.at(found, x.reshape(-1), dy.reshape(-1, self.width).astype(found.dtype, copy=False))
            return {"table": found.astype(table.dtype, copy=False)}, None

        return table[x], {}, pullback


__all__ = ["Dense", "Embedding"]
