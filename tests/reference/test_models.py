"""Models compared with PyTorch's with the same weights: outputs, a step's loss and every gradient, in float64."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shoal_nn import Layer, TrainingContext, crossed, sigmoid_cross_entropy, softmax_cross_entropy
from shoal_nn.models import mobilenet_v2, resnet, wide_deep

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make reference` does that")
if importlib.util.find_spec("torchvision") is None:
    pytest.skip("torchvision is not installed: `make reference` does that", allow_module_level=True)


def models_of_torchvision() -> Any:
    """They are Python alone, but the package wants operators of its own, which its build for another torch lacks."""
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision.models")


OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
published = models_of_torchvision()
TOLERANCE, FLOOR = 1e-9, 1e-4
MODELS: dict[str, tuple[Layer, Callable[[], Any], int]] = {
    "resnet18": (resnet(18, 10), lambda: published.resnet18(num_classes=10), 64),
    "resnet34": (resnet(34, 10), lambda: published.resnet34(num_classes=10), 64),
    "resnet50": (resnet(50, 10), lambda: published.resnet50(num_classes=10), 64),
    "mobilenet_v2": (mobilenet_v2(10, dropout=0), lambda: published.mobilenet_v2(num_classes=10, dropout=0), 64),
    "narrow": (
        mobilenet_v2(10, 0.35, dropout=0),
        lambda: published.mobilenet_v2(num_classes=10, width_mult=0.35, dropout=0),
        64,
    ),
}


def as_ours(array: np.ndarray) -> np.ndarray:
    """Kernels and weights as Shoal has them: height, width, inputs, outputs."""
    return np.ascontiguousarray(
        {4: lambda: array.transpose(2, 3, 1, 0), 2: lambda: array.T}.get(array.ndim, lambda: array)()
    )


def check_close(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert found.shape == expected.shape, what
    # Some gradients are 0 but for rounding, such as that of a bias before a BatchNorm.
    assert np.abs(found - expected).max() <= TOLERANCE * max(np.abs(expected).max(), FLOOR), what


@pytest.mark.parametrize("name", MODELS)
def test_step_of_a_model(name: str) -> None:
    ours, make, size = MODELS[name]
    torch.manual_seed(1)
    theirs = make().double()
    # Both list what they keep in the order in which it is used.
    kept = [(key, tensor) for key, tensor in theirs.state_dict().items() if not key.endswith("num_batches_tracked")]
    variables = ours.variables((size, size, 3))
    assert len(kept) == len(variables)
    arrays = {mine: as_ours(tensor.numpy()) for mine, (_, tensor) in zip(variables, kept, strict=True)}
    assert all(arrays[mine].shape == it.shape for mine, it in variables.items())
    params = {mine: arrays[mine] for mine, it in variables.items() if it.trainable}
    state = {mine: arrays[mine] for mine, it in variables.items() if not it.trainable}

    x, labels = np.random.default_rng(2).normal(size=(4, size, size, 3)), np.array([3, 1, 4, 1])
    logits, moved, pullback = ours.apply(params, state, x, TrainingContext(0))
    loss, by_logits = softmax_cross_entropy(logits, labels)
    gradients, _ = pullback(by_logits)

    expected = theirs(torch.from_numpy(x.transpose(0, 3, 1, 2).copy()))
    their_loss = torch.nn.functional.cross_entropy(expected, torch.from_numpy(labels))
    their_loss.backward()
    check_close(logits, expected.detach().numpy(), "logits")
    check_close(np.asarray(loss), np.asarray(their_loss.item()), "loss")
    by_name = {key: tensor.grad for key, tensor in theirs.named_parameters()}
    after = theirs.state_dict()
    for mine, (key, _) in zip(variables, kept, strict=True):
        if mine in params:
            check_close(gradients[mine], as_ours(by_name[key].numpy()), mine)
        else:
            check_close(moved[mine], after[key].numpy(), mine)
    theirs.eval()
    evaluated, _, _ = ours.apply(params, moved, x, False)
    check_close(evaluated, theirs(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).detach().numpy(), "evaluation")


class WideDeep(torch.nn.Module):  # type: ignore[misc,name-defined]  # torch is there for these tests alone
    """Of categories a and b, their cross, and a number n."""

    def __init__(self) -> None:
        super().__init__()
        table, linear = torch.nn.Embedding, torch.nn.Linear
        self.wide = torch.nn.ModuleList([table(5, 1), table(7, 1), table(11, 1)])
        self.embedded = torch.nn.ModuleList([table(5, 3), table(7, 3)])
        self.deep = torch.nn.Sequential(linear(7, 6), torch.nn.ReLU(), linear(6, 4), torch.nn.ReLU(), linear(4, 1))

    def forward(self, a: Any, b: Any, cross: Any, n: Any) -> Any:
        wide = sum(table(rows) for table, rows in zip(self.wide, (a, b, cross), strict=True))
        embedded = [table(rows) for table, rows in zip(self.embedded, (a, b), strict=True)]
        return wide + self.deep(torch.cat([*embedded, n[:, None]], dim=1))


def test_a_step_of_wide_and_deep() -> None:
    torch.manual_seed(1)
    theirs = WideDeep().double()
    ours = wide_deep({"a": 5, "b": 7}, ["n"], [("a", "b")], embedding=3, hidden=(6, 4), cross_rows=11)
    variables = ours.variables({"a": (), "b": (), "n": ()})
    kept = dict(theirs.named_parameters())
    assert len(kept) == len(variables)

    def as_mine(key: str, array: np.ndarray) -> np.ndarray:
        """Their tables are as ours, their linear layers' weights are turned."""
        return array.T if key.startswith("deep") and array.ndim == 2 else array

    params = {
        mine: as_mine(key, tensor.detach().numpy().copy())
        for mine, (key, tensor) in zip(variables, kept.items(), strict=True)
    }
    rng = np.random.default_rng(2)
    x = {"a": rng.integers(0, 5, 40), "b": rng.integers(0, 7, 40), "n": rng.normal(size=40)}
    labels = rng.integers(0, 2, (40, 1)).astype(float)
    logits, _, pullback = ours.apply(params, {}, x, TrainingContext(0))
    loss, by_logits = sigmoid_cross_entropy(logits, labels)
    gradients, _ = pullback(by_logits)

    given = (x["a"], x["b"], crossed(x["a"], x["b"], 11), x["n"])
    expected = theirs(*map(torch.from_numpy, given))
    their_loss = torch.nn.functional.binary_cross_entropy_with_logits(expected, torch.from_numpy(labels))
    their_loss.backward()
    check_close(logits, expected.detach().numpy(), "logits")
    check_close(np.asarray(loss), np.asarray(their_loss.item()), "loss")
    for mine, (key, tensor) in zip(variables, kept.items(), strict=True):
        check_close(gradients[mine], as_mine(key, tensor.grad.numpy()), mine)
