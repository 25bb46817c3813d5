"""Fake of NVIDIA's cudnn-frontend: graphs of one convolution, computed from bare pointers.

As in cuDNN, an array is only an address, lengths and strides, so a wrong stride gives wrong values.
"""

import ctypes
import enum
import itertools
import types
from typing import Any

import numpy as np

DataType = enum.Enum("DataType", ["HALF", "BFLOAT16", "FLOAT", "DOUBLE"])
Note = enum.Enum("Note", ["NONDETERMINISTIC", "TENSOR_CORE", "DOWN_CONVERT_INPUTS"])
Heuristic = enum.Enum("Heuristic", ["A", "FALLBACK"])
NUMPY = {DataType.HALF: np.float16, DataType.FLOAT: np.float32}


class GraphNotSupportedError(Exception):
    pass


class Tensor:
    def __init__(self, dim: Any = None, stride: Any = None, data_type: Any = None) -> None:
        self.dim, self.stride, self.data_type = dim, stride, data_type

    def set_output(self, is_output: bool) -> "Tensor":
        assert is_output
        return self

    def set_data_type(self, data_type: Any) -> "Tensor":
        self.data_type = data_type
        return self

    def set_dim(self, dim: Any) -> "Tensor":
        self.dim = dim
        return self

    def set_stride(self, stride: Any) -> "Tensor":
        self.stride = stride
        return self

    def at(self, pointer: int) -> np.ndarray:
        dtype = np.dtype(NUMPY[self.data_type])
        length = 1 + sum((size - 1) * step for size, step in zip(self.dim, self.stride, strict=True))
        memory = (ctypes.c_uint8 * (length * dtype.itemsize)).from_address(pointer)
        strides = [step * dtype.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(np.frombuffer(memory, dtype), self.dim, strides, writeable=True)


def fake_cudnn(*, refuses: Exception | None = None) -> types.ModuleType:
    """Returns a module that keeps the built `graphs` and the set `streams`. If `refuses` is given, graphs raise it."""
    cudnn = types.ModuleType("cudnn")

    class Graph:
        def __init__(
            self, *, name: str, io_data_type: Any, intermediate_data_type: Any, compute_data_type: Any, handle: Any
        ) -> None:
            assert compute_data_type is DataType.FLOAT
            self.name, self.handle, self.built = name, handle, False
            self.unwanted: list[Any] = []

        def tensor(self, *, name: str, dim: Any, stride: Any, data_type: Any) -> "Tensor":
            return Tensor(dim, stride, data_type)

        def conv_fprop(self, *, image: Any, weight: Any, **how: Any) -> Any:
            return self._add("fprop", image, weight, how)

        def conv_dgrad(self, *, loss: Any, filter: Any, **how: Any) -> Any:
            return self._add("dgrad", loss, filter, how)

        def conv_wgrad(self, *, image: Any, loss: Any, **how: Any) -> Any:
            return self._add("wgrad", image, loss, how)

        def _add(self, kind: str, first: Any, second: Any, how: Any) -> Any:
            assert how["dilation"] == [1, 1]
            assert how["pre_padding"] == how["post_padding"]
            self.kind, self.operands, self.how, self.result = kind, (first, second), how, Tensor()
            return self.result

        def validate(self) -> None:
            assert self.result.dim

        def build_operation_graph(self) -> None:
            pass

        def create_execution_plans(self, heuristics: Any) -> None:
            assert heuristics == [Heuristic.A, Heuristic.FALLBACK]

        def deselect_numeric_notes(self, notes: Any) -> None:
            self.unwanted += notes

        def deselect_workspace_greater_than(self, nbytes: int) -> None:
            pass

        def check_support(self) -> None:
            if cudnn.refuses:
                raise cudnn.refuses

        def build_plans(self) -> None:
            self.built = True
            cudnn.graphs.append(self)

        def get_workspace_size(self) -> int:
            return 0

        def execute(self, pointers: Any, workspace: Any, handle: Any) -> None:
            assert self.built
            assert handle == self.handle
            assert all(pointer % 16 == 0 for pointer in pointers.values())
            first, second = (tensor.at(pointers[tensor]) for tensor in self.operands)
            result = self.result.at(pointers[self.result])
            result[...] = 0
            by_kind = {
                "fprop": (first, second, result),
                "dgrad": (result, second, first),
                "wgrad": (first, result, second),
            }
            _convolve(self.kind, *by_kind[self.kind], self.how["stride"], self.how["pre_padding"])

    cudnn.__dict__.update(
        graphs=[],
        refuses=refuses,
        streams=[],
        pygraph=Graph,
        data_type=DataType,
        numerical_note=Note,
        heur_mode=Heuristic,
        cudnnGraphNotSupportedError=GraphNotSupportedError,
        backend_version=lambda: 91000,
        create_handle=lambda: 1,
        set_stream=lambda *, handle, stream: cudnn.streams.append((handle, stream)),
    )
    return cudnn


def _convolve(kind: str, image: Any, weight: Any, output: Any, strides: Any, padding: Any) -> None:
    """Computes the array that `kind` selects of the three, in cuDNN's order of axes."""
    (down, across), (top, left) = strides, padding
    filters, channels, height, width = weight.shape
    per_group = filters // (image.shape[1] // channels)
    for n, f, i, j in np.ndindex(output.shape):
        first = f // per_group * channels
        for h, w in itertools.product(range(height), range(width)):
            y, x = i * down + h - top, j * across + w - left
            if not (0 <= y < image.shape[2] and 0 <= x < image.shape[3]):
                continue
            seen = image[n, first : first + channels, y, x]
            if kind == "fprop":
                output[n, f, i, j] += seen @ weight[f, :, h, w]
            elif kind == "dgrad":
                seen += output[n, f, i, j] * weight[f, :, h, w]
            else:
                weight[f, :, h, w] += output[n, f, i, j] * seen
