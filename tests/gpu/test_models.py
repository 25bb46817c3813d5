"""Models on CuPy compared with the same models on NumPy, and jobs that train them on a device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike

from shoal import Job, optim
from shoal_nn import Layer, TrainingContext, sigmoid_cross_entropy, softmax_cross_entropy
from shoal_nn.models import resnet, wide_deep
from shoal_worker.devices import Device
from support.clusters.local import local_cluster
from support.programs.model_data import bright, pairs

pytestmark = pytest.mark.gpu


def begun(net: Layer, shape: Any) -> dict[str, np.ndarray]:
    params, state = net.init(np.random.default_rng(0), shape)
    return {**params, **state}


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """By their lengths: where ReLU or a maximum is decided the other way, single numbers differ wholly."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


# cuDNN has float32 alone of these; rounding decides some of ReLU's and maxima's elements the other way.
@pytest.mark.parametrize(("dtype", "near"), [(np.float32, 0.02), (np.float64, 1e-8)])
def test_gradients_of_a_resnet_are_those_that_it_has_on_the_cpu(device: Device, dtype: DTypeLike, near: float) -> None:
    net = resnet(18, 10, small_images=True)
    values = {name: value.astype(dtype) for name, value in begun(net, (32, 32, 3)).items()}
    rng = np.random.default_rng(1)
    x, labels = rng.normal(size=(16, 32, 32, 3)).astype(dtype), rng.integers(0, 10, 16)
    outcomes = []
    for place in (device.to_device, lambda array: array):
        there = {name: place(value) for name, value in values.items()}
        logits, state, pullback = net.apply(there, there, place(x), TrainingContext(7))
        _, dlogits = softmax_cross_entropy(logits, place(labels))
        outcomes.append({**pullback(dlogits)[0], **state})
    there, here = outcomes
    assert there.keys() == here.keys()
    for name, wanted in here.items():
        assert relative_error(device.to_host(there[name]), wanted) <= near, name


def test_a_step_of_resnet_50_has_the_loss_that_it_has_on_the_cpu(device: Device) -> None:
    net, size, batch = resnet(50), (224, 224, 3), 64
    values = begun(net, size)
    rng = np.random.default_rng(1)
    x, labels = rng.normal(size=(batch, *size)).astype(np.float32), rng.integers(0, 1000, batch)
    losses = []
    for place in (device.to_device, lambda array: array):
        there = {name: place(value) for name, value in values.items()}
        logits, _, pullback = net.apply(there, there, place(x), TrainingContext(7))
        loss, dlogits = softmax_cross_entropy(logits, place(labels))
        losses.append(float(loss))
        if len(losses) == 1:  # on the device; on the CPU it would take minutes
            gradients, _ = pullback(dlogits)
            assert all(np.isfinite(device.to_host(gradient)).all() for gradient in gradients.values())
        del pullback
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_gradients_of_wide_and_deep_are_those_that_it_has_on_the_cpu(device: Device) -> None:
    net = wide_deep({"a": 12, "b": 5}, ["rate"], [("a", "b")], hidden=(16, 8), cross_rows=40)
    values = begun(net, {"a": (), "b": (), "rate": ()})
    rng = np.random.default_rng(1)
    x: dict[str, np.ndarray] = {
        "a": rng.integers(0, 12, 64),
        "b": rng.integers(0, 5, 64),
        "rate": rng.normal(size=64).astype(np.float32),
    }
    labels = rng.integers(0, 2, (64, 1))
    outcomes = []
    for place in (device.to_device, lambda array: array):
        there = {name: place(value) for name, value in values.items()}
        logits, _, pullback = net.apply(there, {}, {name: place(it) for name, it in x.items()}, TrainingContext(7))
        _, dlogits = sigmoid_cross_entropy(logits, place(labels))
        outcomes.append(pullback(dlogits)[0])
    there, here = outcomes
    assert there.keys() == here.keys() == values.keys()
    for name, wanted in here.items():
        assert relative_error(device.to_host(there[name]), wanted) <= 1e-4, name


def check_training(place: str, factory: str, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """The variables of a job of two steps on one worker of this device."""
    job = Job(
        f"shoal_nn.programs:{factory}",
        settings=settings,
        optimizer=optim.SGD(0.1),
        batch_size=16,
        max_steps=2,
        workers=1,
    )
    with local_cluster(1, 1, {"worker": ["--device", place]}) as cluster, cluster.client() as client:
        [worker] = [member for member in client.status().members if member.device]
        assert worker.device.startswith(place)
        handle = client.submit(job)
        assert handle.wait(120).progress.steps == 2
        return handle.pull()


def test_a_job_learns_on_the_device_what_it_learns_on_the_cpu(device: Device, tmp_path: Path) -> None:
    table = pairs(tmp_path / "table.parquet", 100, 2)
    settings = {
        "data": table,
        "held_out": table,
        "label": "label",
        "categories": {"a": 12, "b": 12},
        "numbers": ["rate"],
        "crosses": [["a", "b"]],
        "hidden": [8],
    }
    there, here = (check_training(place, "wide_and_deep", settings) for place in ("cuda:0", "cpu"))
    assert there.keys() == here.keys()
    for name, wanted in here.items():
        np.testing.assert_allclose(there[name], wanted, rtol=1e-3, atol=1e-5, err_msg=name)


def test_image_job_in_float16_with_dropout_trains(device: Device, tmp_path: Path) -> None:
    settings = {"data": bright(tmp_path / "images.npz"), "format": "npz", "classes": 2, "precision": "float16"}
    values = check_training("cuda:0", "image_classifier", settings)
    assert all(np.isfinite(value).all() for value in values.values())
    assert values["head/bias"].any(), "it begins with zeros"
