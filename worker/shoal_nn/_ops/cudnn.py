"""Convolutions of CuPy arrays by cuDNN, through NVIDIA's package cudnn-frontend.

Each function returns None if the package is not installed or does not support the convolution. The caller then uses
`convolve`. Plans are cached by geometry. Only deterministic algorithms are used. float32 is computed in float32; with
CUPY_TF32=1 it is computed in TF32, as CuPy does for matrix products.
"""

import functools
import importlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import structlog

from shoal.program import Array
from shoal_nn._ops.windows import Windows
from shoal_worker.arrays import Namespace, lacks_memory, namespace_of

_log = structlog.get_logger(__name__)

# cuDNN's names of dtypes. It supports float64 only with another order of axes.
_DTYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}
# Largest workspace of a convolution in bytes, and the number of cached plans.
_WORKSPACE_BYTES, _PLANS = 512 << 20, 1024
# The frontend assumes this alignment. Arrays with another one, such as parts of others, are copied.
_ALIGNMENT = 16

_Operation = Literal["conv_fprop", "conv_dgrad", "conv_wgrad"]
# The frontend's names of each operation's arguments.
_OPERANDS = {"conv_fprop": ("image", "weight"), "conv_dgrad": ("loss", "filter"), "conv_wgrad": ("image", "loss")}


def forward(x: Array, kernel: Array, windows: Windows) -> Array | None:
    """Returns the same as `convolve.convolve`. The number of groups follows from the kernel's channels."""
    filters = kernel.shape[3]
    return _run("conv_fprop", x, [x, _filters_first(x, kernel)], (len(x), *windows.outputs, filters), windows)


def gradient_by_kernel(x: Array, kernel: Array, dy: Array, windows: Windows) -> Array | None:
    """Returns the gradient with respect to the kernel, of the kernel's shape and the dtype of x.

    Args:
        x: [batch, height, width, channels], the input.
        kernel: [window height, window width, channels / groups, filters].
        dy: [batch, *outputs, filters], the gradient with respect to the output.
        windows: the windows of the convolution.
    """
    height, width, channels, filters = kernel.shape
    found = _run("conv_wgrad", x, [x, dy], (filters, height, width, channels), windows)
    return None if found is None else found.transpose(1, 2, 3, 0)


def gradient_by_input(x: Array, kernel: Array, dy: Array, windows: Windows) -> Array | None:
    """Returns the gradient with respect to the input, of the shape and dtype of x.

    Args:
        x: [batch, height, width, channels], the input.
        kernel: [window height, window width, channels / groups, filters].
        dy: [batch, *outputs, filters], the gradient with respect to the output.
        windows: the windows of the convolution.
    """
    return _run("conv_dgrad", x, [dy, _filters_first(x, kernel)], x.shape, windows)


def takes(x: Array, windows: Windows) -> bool:
    """Returns whether cuDNN may support the call: an array on a GPU, a known dtype, and symmetric padding."""
    return (
        namespace_of(x) is not np
        and x.dtype.name in _DTYPES
        and windows.before == windows.after
        and x.size > 0
        and _library() is not None
    )


def _filters_first(x: Array, kernel: Array) -> Array:
    """Returns the kernel as [filters, height, width, channels], with the channels last as in images."""
    return kernel.astype(x.dtype, copy=False).transpose(3, 0, 1, 2)


@dataclass(frozen=True)
class _Geometry:
    """Key of a plan. Shapes have the channels last."""

    operation: _Operation
    operands: tuple[tuple[int, ...], tuple[int, ...]]
    result: tuple[int, ...]
    padding: tuple[int, int]
    strides: tuple[int, int]
    dtype: str
    device: int
    thread: int  # a handle belongs to one thread


@dataclass(frozen=True)
class _Plan:
    graph: Any
    tensors: Sequence[Any]  # the operands and the result
    handle: Any
    workspace_bytes: int

    def run(self, xp: Namespace, arrays: Sequence[Array]) -> None:
        """Queues the operation on the current stream."""
        workspace = xp.empty(max(self.workspace_bytes, 1), xp.uint8)
        _library().set_stream(handle=self.handle, stream=xp.cuda.get_current_stream().ptr)
        pointers = {tensor: array.data.ptr for tensor, array in zip(self.tensors, arrays, strict=True)}
        self.graph.execute(pointers, workspace.data.ptr, handle=self.handle)


def _run(
    operation: _Operation, x: Array, operands: Sequence[Array], result: tuple[int, ...], windows: Windows
) -> Array | None:
    xp = namespace_of(x)
    first, second = operands
    plan = _plan(
        _Geometry(
            operation,
            (first.shape, second.shape),
            result,
            windows.before,
            windows.strides,
            x.dtype.name,
            x.device.id,
            threading.get_ident(),
        )
    )
    if plan is None:
        return None
    found = xp.empty(result, x.dtype)
    plan.run(xp, [*(_ready(xp, array.astype(x.dtype, copy=False)) for array in operands), found])
    return found


def _ready(xp: Namespace, array: Array) -> Array:
    array = xp.ascontiguousarray(array)
    return array if array.data.ptr % _ALIGNMENT == 0 else array.copy()


@functools.lru_cache(_PLANS)
def _plan(geometry: _Geometry) -> _Plan | None:
    cudnn = _library()
    try:
        return _built(cudnn, geometry)
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
        if lacks_memory(error):  # matrix products need even more; the next call may succeed
            raise
        reason = str(error).partition("\n")[0]
        _log.warning("cuDNN does not support a convolution; using matrix products", what=geometry, reason=reason)
        return None


def _built(cudnn: Any, geometry: _Geometry) -> _Plan:
    handle = _handle(geometry.device, geometry.thread)
    dtype = getattr(cudnn.data_type, _DTYPES[geometry.dtype])
    graph = cudnn.pygraph(
        name=geometry.operation,
        io_data_type=dtype,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    names = _OPERANDS[geometry.operation]
    operands = {
        name: graph.tensor(name=name, dim=_dims(shape), stride=_strides(shape), data_type=dtype)
        for name, shape in zip(names, geometry.operands, strict=True)
    }
    result = getattr(graph, geometry.operation)(
        **operands,
        pre_padding=list(geometry.padding),
        post_padding=list(geometry.padding),
        stride=list(geometry.strides),
        dilation=[1, 1],
    )
    result.set_output(True).set_data_type(dtype)
    result.set_dim(_dims(geometry.result)).set_stride(_strides(geometry.result))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.deselect_numeric_notes(_unwanted(cudnn, geometry.dtype))
    graph.deselect_workspace_greater_than(_WORKSPACE_BYTES)
    graph.check_support()
    graph.build_plans()
    return _Plan(graph, [*operands.values(), result], handle, graph.get_workspace_size())


def _dims(shape: Sequence[int]) -> list[int]:
    """Returns a shape in cuDNN's order: batch or filters, channels, height, width."""
    first, height, width, channels = shape
    return [first, channels, height, width]


def _strides(shape: Sequence[int]) -> list[int]:
    """Returns the strides of an array with the channels last, in elements and in cuDNN's order."""
    _, height, width, channels = shape
    return [height * width * channels, 1, width * channels, channels]


def _unwanted(cudnn: Any, dtype: str) -> list[Any]:
    note = cudnn.numerical_note
    if dtype == "float32" and os.environ.get("CUPY_TF32", "0") != "1":
        return [note.NONDETERMINISTIC, note.TENSOR_CORE, note.DOWN_CONVERT_INPUTS]
    return [note.NONDETERMINISTIC]


@functools.lru_cache(64)
def _handle(device: int, thread: int) -> Any:  # noqa: ARG001 - one for each pair; created on the current device
    return _library().create_handle()


def forget() -> None:
    """Drops all plans and handles, and looks for cuDNN again at the next call."""
    for cache in (_plan, _handle, _library):
        cache.cache_clear()


@functools.cache
def _library() -> Any:
    """Returns the frontend; None if it or cuDNN is not installed."""
    try:
        cudnn = importlib.import_module("cudnn")
        version = cudnn.backend_version()
    except (ImportError, OSError, RuntimeError) as error:
        _log.warning(
            "cuDNN or its frontend is not installed; convolutions use matrix products, which is slower. "
            "Install shoal[gpu] or shoal[gpu13]",
            reason=str(error),
        )
        return None
    _log.info("convolutions use cuDNN", version=version)
    return cudnn


__all__ = ["forget", "forward", "gradient_by_input", "gradient_by_kernel", "takes"]
