"""Fake of the kernels of channels.cu: the same sums and maps by NumPy, and checks of how they are launched."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal_nn._ops import channels_on_gpu

_SOURCE = Path(channels_on_gpu.__file__).with_name("channels.cu").read_text()
# Threads of a block and shared memory that every GPU has.
_MOST_THREADS, _MOST_SHARED = 1024, 48 << 10


class FakeModule:
    """A fake of CuPy's RawModule."""

    def __init__(self, code: str, options: Sequence[str]) -> None:
        assert code == _SOURCE
        self._width = next(int(option.partition("=")[2]) for option in options if option.startswith("-DWIDTH="))

    def get_function(self, name: str) -> Callable[..., None]:
        declared = re.search(rf'extern "C" __global__ void {name}\((.*?)\) {{', _SOURCE, re.DOTALL)
        assert declared, f"channels.cu has no kernel {name}"
        parameters = declared[1].split(",")

        def launch(
            blocks: tuple[int, ...], threads: tuple[int, ...], arguments: Sequence[Any], shared_mem: int = 0
        ) -> None:
            assert len(arguments) == len(parameters), (name, parameters)
            assert np.prod(threads) <= _MOST_THREADS
            assert shared_mem <= _MOST_SHARED
            for parameter, argument in zip(parameters, arguments, strict=True):
                _check(parameter, argument, self._width)
            _KERNELS[name](blocks, threads, *arguments)

        return launch


def _check(parameter: str, argument: Any, width: int) -> None:
    scalar = {"long long": np.int64, "int": np.int32, "double": np.float64}
    kind = parameter.rpartition(" ")[0].strip()
    if kind in scalar:
        assert type(argument) is scalar[kind], (parameter, type(argument))
        return
    assert argument.flags.c_contiguous
    if "Pack" in kind:
        assert argument.data.ptr % (width * argument.dtype.itemsize) == 0, "a load that is not aligned"
    else:
        assert argument.dtype == np.float64 or "double" not in kind


def _rows(x: np.ndarray, rows: int, channels: int) -> np.ndarray:
    return np.asarray(x).reshape(rows, channels).astype(np.float64)


def _spread(totals: np.ndarray, blocks: tuple[int, int], partial: np.ndarray) -> None:
    """Stores sums as blocks do: their total over the blocks is the sum."""
    assert partial.shape == (blocks[1], totals.size)
    partial[...] = totals / len(partial)


def _sums(blocks: Any, _: Any, x: Any, partial: Any, rows: int, channels: int) -> None:
    _spread(_rows(x, rows, channels).sum(axis=0), blocks, partial)


def _squares(blocks: Any, _: Any, x: Any, mean: Any, partial: Any, rows: int, channels: int) -> None:
    _spread(((_rows(x, rows, channels) - mean) ** 2).sum(axis=0), blocks, partial)


def _gradient_sums(blocks: Any, _: Any, dy: Any, x: Any, mean: Any, partial: Any, rows: int, channels: int) -> None:
    slopes, centered = _rows(dy, rows, channels), _rows(x, rows, channels) - mean
    _spread(np.concatenate([slopes.sum(axis=0), (slopes * centered).sum(axis=0)]), blocks, partial)


def _total(blocks: Any, threads: Any, partial: Any, total: Any, parts: int, columns: int) -> None:
    assert blocks[0] * threads[0] >= 32 * columns, "a warp for each column"
    assert partial.shape == (parts, columns)
    total[...] = partial.sum(axis=0).reshape(total.shape)


def _statistics(
    blocks: Any, threads: Any, squares: Any, mean: Any, scale: Any, running_mean: Any, running_var: Any,
    results: Any, count: float, divisor: float, momentum: float, epsilon: float, channels: int,
) -> None:  # fmt: skip
    assert blocks[0] * threads[0] >= channels
    inverse = 1 / np.sqrt(squares / count + epsilon)
    results[0], results[1] = inverse, inverse * scale
    results[2] = (1 - momentum) * running_mean + momentum * mean
    results[3] = (1 - momentum) * running_var + momentum * (squares / divisor)


def _slope_and_shift(
    blocks: Any, threads: Any, products: Any, sums: Any, inverse: Any, results: Any, count: float, channels: int
) -> None:
    assert blocks[0] * threads[0] >= channels
    results[0], results[1] = products * inverse * inverse / -count, sums / count


def _scaled(_: Any, __: Any, x: Any, mean: Any, factor: Any, bias: Any, y: Any, rows: int, channels: int) -> None:
    y[...] = ((_rows(x, rows, channels) - mean) * factor + bias).reshape(y.shape)


def _input_gradient(
    _: Any, __: Any, dy: Any, x: Any, mean: Any, slope: Any, shift: Any, factor: Any, dx: Any, rows: int, channels: int
) -> None:
    along = (_rows(x, rows, channels) - mean) * slope
    dx[...] = ((along + _rows(dy, rows, channels) - shift) * factor).reshape(dx.shape)


_KERNELS: dict[str, Callable[..., None]] = {
    "sums": _sums,
    "squares": _squares,
    "gradient_sums": _gradient_sums,
    "total": _total,
    "statistics": _statistics,
    "slope_and_shift": _slope_and_shift,
    "scaled": _scaled,
    "input_gradient": _input_gradient,
}
