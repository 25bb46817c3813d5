"""Models beside torchvision's with the same weights: outputs, a step's loss and every gradient, in float64."""

import importlib
import importlib.util
import sys

import numpy as np
import pytest

from shoal_nn import Training, softmax_cross_entropy
from shoal_nn.models import mobilenet_v2, resnet

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make reference` does that")
if importlib.util.find_spec("torchvision") is None:
    pytest.skip("torchvision is not installed: `make reference` does that", allow_module_level=True)


def models_of_torchvision():
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
TOLERANCE = 1e-9
MODELS = {
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


def as_ours(array):
    """Kernels and weights as Shoal has them: height, width, inputs, outputs."""
    return np.ascontiguousarray(
        {4: lambda: array.transpose(2, 3, 1, 0), 2: lambda: array.T}.get(array.ndim, lambda: array)()
    )


def close(found, expected, what):
    assert found.shape == expected.shape, what
    assert np.abs(found - expected).max() <= TOLERANCE * max(1.0, np.abs(expected).max()), what


@pytest.mark.parametrize("name", MODELS)
def test_a_step(name):
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
    logits, moved, pullback = ours.apply(params, state, x, Training(0))
    loss, by_logits = softmax_cross_entropy(logits, labels)
    gradients, _ = pullback(by_logits)

    expected = theirs(torch.from_numpy(x.transpose(0, 3, 1, 2).copy()))
    their_loss = torch.nn.functional.cross_entropy(expected, torch.from_numpy(labels))
    their_loss.backward()
    close(logits, expected.detach().numpy(), "logits")
    close(np.asarray(loss), np.asarray(their_loss.item()), "loss")
    by_name = {key: tensor.grad for key, tensor in theirs.named_parameters()}
    after = theirs.state_dict()
    for mine, (key, _) in zip(variables, kept, strict=True):
        if mine in params:
            close(gradients[mine], as_ours(by_name[key].numpy()), mine)
        else:
            close(moved[mine], after[key].numpy(), mine)
    theirs.eval()
    evaluated, _, _ = ours.apply(params, moved, x, False)
    close(evaluated, theirs(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).detach().numpy(), "evaluation")
