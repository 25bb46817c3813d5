"""Convolutions on a GPU go by cuDNN where it takes them, with the values that they have without; both are stand-ins."""

import sys

import numpy as np
import pytest

from shoal_nn import Conv2D, DepthwiseConv2D
from shoal_nn._ops import cudnn as _cudnn
from support.devices.fake_cudnn import GraphNotSupportedError, Note, fake_cudnn
from support.devices.fake_cupy import FakeArray, fake_cupy


@pytest.fixture
def cudnn(monkeypatch):
    cudnn = fake_cudnn()
    install(monkeypatch, cudnn)
    return cudnn


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    forget()
    yield
    forget()


def install(monkeypatch, cudnn) -> None:
    monkeypatch.delenv("CUPY_TF32", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)


def forget() -> None:
    for memory in (_cudnn._plan, _cudnn._handle, _cudnn._library):
        memory.cache_clear()


def run(layer, x, dy_like=np.float32, *, there: bool):
    """Output and gradients of a layer, on the host or on the stand-in for a GPU."""
    place = (lambda array: array.copy().view(FakeArray)) if there else (lambda array: array)
    params, _ = layer.init(np.random.default_rng(3), x.shape[1:])
    y, _, pullback = layer.apply({name: place(value) for name, value in params.items()}, {}, place(x), False)
    dy = np.random.default_rng(4).normal(size=y.shape).astype(dy_like)
    found, dx = pullback(place(dy))
    return {"y": y, "dx": dx, **found}


LAYERS = [
    Conv2D(4, window=3, padding=1, strides=2),
    Conv2D(4, window=(1, 3), padding="valid"),
    Conv2D(6, window=3, padding="same", groups=2),
    Conv2D(3, window=1, strides=2, padding=0, bias=False),
    DepthwiseConv2D(multiplier=2, window=3, padding=(1, 0), strides=(1, 2)),
]


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_values_and_gradients_are_those_of_matrix_products(cudnn, layer):
    x = np.random.default_rng(1).normal(size=(2, 6, 5, 4)).astype(np.float32)
    found, wanted = run(layer, x, there=True), run(layer, x, there=False)
    assert [graph.kind for graph in cudnn.graphs] == ["fprop", "wgrad", "dgrad"]
    for name, array in wanted.items():
        assert isinstance(found[name], FakeArray), name
        assert found[name].shape == array.shape
        np.testing.assert_allclose(np.asarray(found[name]), array, rtol=1e-4, atol=1e-5)


def test_nobody_asks_for_the_gradient_by_the_input_of_a_first_layer(cudnn):
    x = np.ones((2, 5, 5, 3), np.float32)
    assert run(Conv2D(2, input_gradient=False), x, there=True)["dx"] is None
    assert [graph.kind for graph in cudnn.graphs] == ["fprop", "wgrad"]


def test_a_plan_is_made_for_each_geometry_once(cudnn):
    for batch in (2, 2, 3, 2):
        run(Conv2D(2), np.ones((batch, 5, 5, 3), np.float32), there=True)
    assert len(cudnn.graphs) == 2 * 3
    assert cudnn.streams == [(1, 0)] * 4 * 3


def test_parts_of_arrays_are_copied_to_where_cudnn_wants_them(cudnn):
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
def test_what_cudnn_does_not_take_goes_by_matrix_products(cudnn, layer, dtype):
    x = np.random.default_rng(1).normal(size=(2, 6, 6, 3)).astype(dtype)
    found, wanted = run(layer, x, dtype, there=True), run(layer, x, dtype, there=False)
    assert cudnn.graphs == []
    for name, array in wanted.items():
        np.testing.assert_allclose(np.asarray(found[name]), array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("refusal", [GraphNotSupportedError("no engine"), RuntimeError("no heuristic")])
def test_what_cudnn_refuses_is_said_once_and_goes_by_matrix_products(monkeypatch, capsys, refusal):
    install(monkeypatch, fake_cudnn(refuses=refusal))
    x = np.ones((2, 5, 5, 3), np.float32)
    for _ in range(2):
        found, wanted = run(Conv2D(2), x, there=True), run(Conv2D(2), x, there=False)
        np.testing.assert_allclose(np.asarray(found["y"]), wanted["y"], rtol=1e-5)
    said = [line for line in capsys.readouterr().out.splitlines() if str(refusal) in line and "conv_fprop" in line]
    assert len(said) == 1


def test_a_lack_of_memory_is_no_refusal(monkeypatch):
    """Matrix products want more of it, and the next step may find some."""
    install(monkeypatch, fake_cudnn(refuses=RuntimeError("CUDNN_STATUS_ALLOC_FAILED")))
    x = np.ones((2, 5, 5, 3), np.float32)
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        run(Conv2D(2), x, there=True)
    monkeypatch.setitem(sys.modules, "cudnn", with_room := fake_cudnn())
    _cudnn._library.cache_clear()
    run(Conv2D(2), x, there=True)
    assert [graph.name for graph in with_room.graphs] == ["conv_fprop", "conv_wgrad", "conv_dgrad"]


def test_without_the_frontend_one_line_says_so(monkeypatch, capsys):
    install(monkeypatch, None)
    x = np.ones((2, 5, 5, 3), np.float32)
    for _ in range(2):
        run(Conv2D(2), x, there=True)
    assert capsys.readouterr().out.count("cuDNN or its frontend is not installed") == 1


@pytest.mark.parametrize(
    ("tf32", "unwanted"),
    [("0", {Note.NONDETERMINISTIC, Note.TENSOR_CORE, Note.DOWN_CONVERT_INPUTS}), ("1", {Note.NONDETERMINISTIC})],
)
def test_float32_is_float32_unless_cupy_too_is_told_otherwise(cudnn, monkeypatch, tf32, unwanted):
    monkeypatch.setenv("CUPY_TF32", tf32)
    run(Conv2D(2), np.ones((2, 5, 5, 3), np.float32), there=True)
    assert set(cudnn.graphs[0].unwanted) == unwanted


def test_halves_may_use_what_multiplies_halves(cudnn):
    run(Conv2D(2), np.ones((2, 5, 5, 3), np.float16), np.float16, there=True)
    assert cudnn.graphs[0].unwanted == [Note.NONDETERMINISTIC]
