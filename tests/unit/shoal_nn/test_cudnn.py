"""Convolutions with cuDNN on a GPU: their values equal those without cuDNN. Stand-ins replace cuDNN and CuPy."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest

from shoal_nn import Conv2D, DepthwiseConv2D
from shoal_nn._ops import cudnn as cudnn_ops
from shoal_nn._windowed import Windowed
from support.devices.fake_cudnn import GraphNotSupportedError, Note, fake_cudnn
from support.devices.fake_cupy import FakeArray, fake_cupy


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    cudnn = fake_cudnn()
    install(monkeypatch, cudnn)
    return cudnn


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    cudnn_ops.forget()
    yield
    cudnn_ops.forget()


def install(monkeypatch: pytest.MonkeyPatch, cudnn: ModuleType | None) -> None:
    monkeypatch.delenv("CUPY_TF32", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)


def on_the_gpu(array: np.ndarray) -> np.ndarray:
    return array.copy().view(FakeArray)


def run(
    layer: Windowed, x: np.ndarray, dy_like: type[np.floating] = np.float32, *, there: bool
) -> dict[str, np.ndarray]:
    """Output and gradients of a layer, on the host or on the stand-in for a GPU; "dx" only if the layer gives it."""
    place: Callable[[np.ndarray], np.ndarray] = on_the_gpu if there else np.asarray
    params, _ = layer.init(np.random.default_rng(3), x.shape[1:])
    y, _, pullback = layer.apply({name: place(value) for name, value in params.items()}, {}, place(x), False)
    dy = np.random.default_rng(4).normal(size=y.shape).astype(dy_like)
    found, dx = pullback(place(dy))
    return {"y": y, **found} if dx is None else {"y": y, "dx": dx, **found}


LAYERS = [
    Conv2D(4, window=3, padding=1, strides=2),
    Conv2D(4, window=(1, 3), padding="valid"),
    Conv2D(6, window=3, padding="same", groups=2),
    Conv2D(3, window=1, strides=2, padding=0, bias=False),
    DepthwiseConv2D(multiplier=2, window=3, padding=(1, 0), strides=(1, 2)),
]


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_values_and_gradients_are_those_of_matrix_products(cudnn: ModuleType, layer: Windowed) -> None:
    x = np.random.default_rng(1).normal(size=(2, 6, 5, 4)).astype(np.float32)
    found, wanted = run(layer, x, there=True), run(layer, x, there=False)
    assert [graph.kind for graph in cudnn.graphs] == ["fprop", "wgrad", "dgrad"]
    for name, array in wanted.items():
        assert isinstance(found[name], FakeArray), name
        assert found[name].shape == array.shape
        np.testing.assert_allclose(np.asarray(found[name]), array, rtol=1e-4, atol=1e-5)


def test_a_first_layer_computes_no_gradient_by_its_input(cudnn: ModuleType) -> None:
    x = np.ones((2, 5, 5, 3), np.float32)
    assert "dx" not in run(Conv2D(2, input_gradient=False), x, there=True)
    assert [graph.kind for graph in cudnn.graphs] == ["fprop", "wgrad"]


def test_a_plan_is_made_for_each_geometry_once(cudnn: ModuleType) -> None:
    for batch in (2, 2, 3, 2):
        run(Conv2D(2), np.ones((batch, 5, 5, 3), np.float32), there=True)
    assert len(cudnn.graphs) == 2 * 3
    assert cudnn.streams == [(1, 0)] * 4 * 3


def test_parts_of_arrays_are_copied_to_where_cudnn_wants_them(cudnn: ModuleType) -> None:
    layer = Conv2D(2, window=3, bias=False)
    whole = np.random.default_rng(1).normal(size=(3, 5, 5, 3)).astype(np.float32).view(FakeArray)
    params, _ = layer.init(np.random.default_rng(3), (5, 5, 3))
    there = {name: value.view(FakeArray) for name, value in params.items()}
    y, _, _ = layer.apply(there, {}, whole[1:], False)  # begins 300 bytes in
    wanted, _, _ = layer.apply(params, {}, np.asarray(whole[1:]), False)
    np.testing.assert_allclose(np.asarray(y), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [(Conv2D(2, strides=2), np.float32), (Conv2D(2, window=3), np.float64)],
    ids=["other surroundings on one side than on the other", "float64"],
)
def test_convolutions_that_cudnn_lacks_use_matrix_products(
    cudnn: ModuleType, layer: Conv2D, dtype: type[np.floating]
) -> None:
    x = np.random.default_rng(1).normal(size=(2, 6, 6, 3)).astype(dtype)
    found, wanted = run(layer, x, dtype, there=True), run(layer, x, dtype, there=False)
    assert cudnn.graphs == []
    for name, array in wanted.items():
        np.testing.assert_allclose(np.asarray(found[name]), array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("refusal", [GraphNotSupportedError("no engine"), RuntimeError("no heuristic")])
def test_convolutions_that_cudnn_refuses_use_matrix_products_and_log_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refusal: Exception
) -> None:
    install(monkeypatch, fake_cudnn(refuses=refusal))
    x = np.ones((2, 5, 5, 3), np.float32)
    for _ in range(2):
        found, wanted = run(Conv2D(2), x, there=True), run(Conv2D(2), x, there=False)
        np.testing.assert_allclose(np.asarray(found["y"]), wanted["y"], rtol=1e-5)
    said = [line for line in capsys.readouterr().out.splitlines() if str(refusal) in line and "conv_fprop" in line]
    assert len(said) == 1


def test_a_lack_of_memory_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products want more of it, and the next step may find some."""
    cudnn = fake_cudnn(refuses=RuntimeError("CUDNN_STATUS_ALLOC_FAILED"))
    install(monkeypatch, cudnn)
    x = np.ones((2, 5, 5, 3), np.float32)
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        run(Conv2D(2), x, there=True)
    monkeypatch.setattr(cudnn, "refuses", None)
    run(Conv2D(2), x, there=True)
    assert [graph.name for graph in cudnn.graphs] == ["conv_fprop", "conv_wgrad", "conv_dgrad"]


def test_without_the_frontend_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, None)
    x = np.ones((2, 5, 5, 3), np.float32)
    for _ in range(2):
        run(Conv2D(2), x, there=True)
    assert capsys.readouterr().out.count("cuDNN or its frontend is not installed") == 1


@pytest.mark.parametrize(
    ("tf32", "unwanted"),
    [("0", {Note.NONDETERMINISTIC, Note.TENSOR_CORE, Note.DOWN_CONVERT_INPUTS}), ("1", {Note.NONDETERMINISTIC})],
)
def test_float32_is_exact_unless_cupy_allows_tf32(
    cudnn: ModuleType, monkeypatch: pytest.MonkeyPatch, tf32: str, unwanted: set[Note]
) -> None:
    monkeypatch.setenv("CUPY_TF32", tf32)
    run(Conv2D(2), np.ones((2, 5, 5, 3), np.float32), there=True)
    assert set(cudnn.graphs[0].unwanted) == unwanted


def test_halves_may_use_tensor_cores(cudnn: ModuleType) -> None:
    run(Conv2D(2), np.ones((2, 5, 5, 3), np.float16), np.float16, there=True)
    assert cudnn.graphs[0].unwanted == [Note.NONDETERMINISTIC]
