"""Convolutions of CuPy's arrays by cuDNN, through NVIDIA's cudnn-frontend, where it is installed and takes them.

Each function answers None where it does not, and `_convolve` does the work. A plan is made for each geometry, and used
again. cuDNN's sums are asked to be the same in each run, and float32 to be float32 (TF32 where CUPY_TF32=1, as CuPy has
it for its products).
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

# cuDNN's names for dtypes. float64 is not among them: cuDNN takes it in another order of axes only.
_DTYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}
# Of memory beside the arrays, the most that a convolution may use; and how many plans are kept.
_WORKSPACE_BYTES, _PLANS = 512 << 20, 1024
# Arrays that begin elsewhere, as parts of others may, are copied: the frontend takes this alignment for granted.
_ALIGNMENT = 16

_Operation = Literal["conv_fprop", "conv_dgrad", "conv_wgrad"]
# The arguments of each, as the frontend names them.
_OPERANDS = {"conv_fprop": ("image", "weight"), "conv_dgrad": ("loss", "filter"), "conv_wgrad": ("image", "loss")}


def forward(x: Array, kernel: Array, windows: Windows) -> Array | None:
    """As `_convolve.convolve`, also in groups: the kernel's channels say how many."""
    filters = kernel.shape[3]
    return _run("conv_fprop", x, [x, _filters_first(x, kernel)], (len(x), *windows.outputs, filters), windows)


def gradient_by_kernel(x: Array, kernel: Array, dy: Array, windows: Windows) -> Array | None:
    """Of the shape of the kernel, and the dtype of x."""
    height, width, channels, filters = kernel.shape
    found = _run("conv_wgrad", x, [x, dy], (filters, height, width, channels), windows)
    return None if found is None else found.transpose(1, 2, 3, 0)


def gradient_by_input(x: Array, kernel: Array, dy: Array, windows: Windows) -> Array | None:
    """Of the shape and dtype of x."""
    return _run("conv_dgrad", x, [dy, _filters_first(x, kernel)], x.shape, windows)


def takes(x: Array, windows: Windows) -> bool:
    """Whether cuDNN can be asked: a GPU's array, of a dtype that it has, with the same surroundings on either side."""
    return (
        namespace_of(x) is not np
        and x.dtype.name in _DTYPES
        and windows.before == windows.after
        and x.size > 0
        and _library() is not None
    )


def _filters_first(x: Array, kernel: Array) -> Array:
    """[filters, height, width, channels]: with channels side by side, as in images."""
    return kernel.astype(x.dtype, copy=False).transpose(3, 0, 1, 2)


@dataclass(frozen=True)
class _Geometry:
    """All that a plan depends on; shapes have the channels last."""

    operation: _Operation
    operands: tuple[tuple[int, ...], tuple[int, ...]]
    result: tuple[int, ...]
    padding: tuple[int, int]
    strides: tuple[int, int]
    dtype: str
    device: int
    thread: int  # a handle is for one


@dataclass(frozen=True)
class _Plan:
    graph: Any
    tensors: Sequence[Any]  # the operands and the result
    handle: Any
    workspace_bytes: int

    def run(self, xp: Namespace, arrays: Sequence[Array]) -> None:
        """Queues it on the current stream."""
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
        if lacks_memory(error):  # matrix products want more of it, and the next time there may be enough
            raise
        reason = str(error).partition("\n")[0]
        _log.warning("cuDNN does not take a convolution; it goes by matrix products", what=geometry, reason=reason)
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
    """In cuDNN's order: batch, channels, height, width; of kernels: filters, channels, height, width."""
    first, height, width, channels = shape
    return [first, channels, height, width]


def _strides(shape: Sequence[int]) -> list[int]:
    """In elements, in that order, of an array with the channels last."""
    _, height, width, channels = shape
    return [height * width * channels, 1, width * channels, channels]


def _unwanted(cudnn: Any, dtype: str) -> list[Any]:
    note = cudnn.numerical_note
    if dtype == "float32" and os.environ.get("CUPY_TF32", "0") != "1":
        return [note.NONDETERMINISTIC, note.TENSOR_CORE, note.DOWN_CONVERT_INPUTS]
    return [note.NONDETERMINISTIC]


@functools.lru_cache(64)
def _handle(device: int, thread: int) -> Any:  # noqa: ARG001 - one for each; made on the device that is current
    return _library().create_handle()


@functools.cache
def _library() -> Any:
    """The frontend; None where it, or cuDNN itself, is not installed."""
    try:
        cudnn = importlib.import_module("cudnn")
        version = cudnn.backend_version()
    except (ImportError, OSError, RuntimeError) as error:
        _log.warning(
            "convolutions go by matrix products, which is slower: cuDNN or its frontend is not installed; "
            "shoal[gpu] and shoal[gpu13] have both",
            reason=str(error),
        )
        return None
    _log.info("convolutions go by cuDNN", version=version)
    return cudnn


__all__ = ["forward", "gradient_by_input", "gradient_by_kernel", "takes"]
