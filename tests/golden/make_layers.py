"""Generator of layers.json: PyTorch's float64 results for the cases of `golden_layers.py`, read by `test_golden.py`.

    pip install torch==2.13.0 torchvision numpy
    PYTHONPATH=client:worker:tests python tests/golden/make_layers.py

Inputs and parameters are pseudo-random numbers that depend only on their names, so the file does not store them. For
each layer, the file holds the output, the gradients with respect to its parameters and its input, and its running
statistics. For torchvision's ResNet-18 it holds the outputs, the loss, and a digest of each gradient and each
statistic. All arrays have Shoal's order of axes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torchvision.models import resnet18

from support.devices.golden_layers import (
    CASES,
    LOGITS,
    RESNET,
    RESNET_IMAGES,
    RESNET_LABELS,
    digest,
    drawn,
    fed,
    values,
)


def conv(x: Any, p: Any, **settings: Any) -> Any:
    return images(F.conv2d, x, p["kernel"].permute(3, 2, 0, 1), p["bias"], **settings)


def norm(x: Any, p: Any, training: bool = True, momentum: float = 0.1) -> Any:
    def apply(given: Any) -> Any:
        return F.batch_norm(given, p["mean"], p["var"], p["scale"], p["bias"], training, momentum)

    return images(apply, x) if x.ndim == 4 else apply(x)


def images(function: Any, x: Any, *args: Any, **settings: Any) -> Any:
    """Applies a function of PyTorch, whose images have their channels first, to images with their channels last."""
    return function(x.permute(0, 3, 1, 2), *args, **settings).permute(0, 2, 3, 1)


LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "dense": lambda x, p: x @ p["kernel"] + p["bias"],
    "embedding": lambda x, p: F.embedding(x, p["table"]),
    "convolution": lambda x, p: conv(x, p, stride=2, padding=1),
    "groups": lambda x, p: conv(x, p, padding=(1, 0), groups=2),
    "depthwise": lambda x, p: conv(x, p, padding=1, groups=4),
    "batch norm": norm,
    "batch norm of rows": lambda x, p: norm(x, p, momentum=0.3),
    "batch norm, evaluated": lambda x, p: norm(x, p, training=False),
    "layer norm": lambda x, p: F.layer_norm(x, x.shape[-1:], p["scale"], p["bias"]),
    "largest": lambda x, _: images(F.max_pool2d, x, 3, 2, 1),
    "mean": lambda x, _: images(F.avg_pool2d, x, 3, 2, 1, count_include_pad=False),
    "mean with padding": lambda x, _: images(F.avg_pool2d, x, 3, 2, 1),
    "mean of all": lambda x, _: x.mean(dim=(1, 2)),
    "gelu": lambda x, _: F.gelu(x),
}
LOSSES = {
    "classes": lambda logits, labels: F.cross_entropy(logits.reshape(-1, 5), labels.argmax(-1).reshape(-1)),
    "probabilities": lambda logits, labels: F.cross_entropy(logits.reshape(-1, 5), labels.reshape(-1, 5)),
    "sigmoid": F.binary_cross_entropy_with_logits,
    "squares": F.mse_loss,
}


def main() -> None:
    """Writes the file beside this script."""
    golden = {
        "layers": {name: of_layer(name) for name in CASES},
        "losses": {name: of_loss(loss) for name, loss in LOSSES.items()},
        "resnet18": of_resnet(),
    }
    rows = ",\n".join(
        f'"{part}": {{\n' + ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in cases.items()) + "\n}"
        for part, cases in golden.items()
    )
    Path(__file__).with_name("layers.json").write_text(f"{{\n{rows}\n}}\n")


def of_layer(name: str) -> dict[str, Any]:
    params, state = values(CASES[name].layer, CASES[name].shape[1:])
    leaves = {key: torch.from_numpy(array).requires_grad_(key in params) for key, array in {**params, **state}.items()}
    x = torch.from_numpy(fed(name))
    y = LAYERS[name](x.requires_grad_(x.is_floating_point()), leaves)
    y.backward(torch.from_numpy(drawn(f"{name} dy", tuple(y.shape))))
    return {
        "value": y.tolist(),
        "gradients": {key: leaves[key].grad.tolist() for key in params},
        "dx": x.grad.tolist() if x.grad is not None else None,
        "state": {key: leaves[key].tolist() for key in state},
    }


def of_loss(function: Any) -> dict[str, Any]:
    logits = torch.from_numpy(drawn("logits", LOGITS)).requires_grad_()
    loss = function(logits, torch.from_numpy(abs(drawn("labels", LOGITS))))
    loss.backward()
    return {"loss": loss.item(), "gradient": logits.grad.tolist()}


def of_resnet() -> dict[str, Any]:
    params, state = values(RESNET, RESNET_IMAGES[1:])
    theirs = resnet18(num_classes=10).double()
    # Both list what they keep in the order in which it is used.
    kept = [key for key in theirs.state_dict() if not key.endswith("num_batches_tracked")]
    pairs = dict(zip(RESNET.variables(RESNET_IMAGES[1:]), kept, strict=True))
    theirs.load_state_dict(
        {key: torch.from_numpy(turned({**params, **state}[mine])) for mine, key in pairs.items()}, strict=False
    )
    x = torch.from_numpy(drawn("images", RESNET_IMAGES))
    logits = theirs(x.permute(0, 3, 1, 2))
    loss = F.cross_entropy(logits, torch.from_numpy(RESNET_LABELS))
    loss.backward()
    gradients, after = {key: it.grad for key, it in theirs.named_parameters()}, theirs.state_dict()
    found = {mine: digest(mine, back(gradients[pairs[mine]].numpy())) for mine in params}
    moved = {mine: digest(mine, after[pairs[mine]].numpy()) for mine in state}
    return {"logits": logits.tolist(), "loss": loss.item(), "gradients": found, "state": moved}


def turned(array: np.ndarray) -> np.ndarray:
    """Kernels with outputs first, then inputs, as PyTorch has them."""
    return np.ascontiguousarray(array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T)


def back(array: np.ndarray) -> np.ndarray:
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T


if __name__ == "__main__":
    main()
