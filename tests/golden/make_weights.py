"""Generator of weights.json and the files in weights: what torchvision, Keras and `torch.save` publish.

    pip install torch==2.13.0 torchvision keras numpy
    KERAS_BACKEND=torch PYTHONPATH=client:worker:tests python tests/golden/make_weights.py

`names` has the names and shapes of the arrays in the published files. `outputs` has what the two MobileNetV2 return, of
width 0.35 and with pseudo-random weights that depend only on their names. `tensors` has the values in the two .pth
files, which hold a small state dict in the new and the old format of `torch.save`.
"""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from torchvision import models

from support.devices.golden_layers import drawn
from support.published_weights import CLASSES, IMAGES, WIDTH, published_value

FOLDER = Path(__file__).parent
IMAGE = drawn("published images", IMAGES).astype(np.float32)


def of_torchvision(model: Any) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def of_keras(model: Any) -> dict[str, list[int]]:
    return {f"{layer.name}/{it.name}": list(it.shape) for layer in model.layers for it in layer.weights}


def torchvision_outputs() -> list[Any]:
    model = models.mobilenet_v2(num_classes=CLASSES, width_mult=WIDTH).eval()
    state = model.state_dict()
    for name, tensor in state.items():
        if tensor.is_floating_point():
            tensor.copy_(torch.from_numpy(published_value("torchvision", name, tuple(tensor.shape))))
    with torch.no_grad():
        outputs = model.double()(torch.from_numpy(IMAGE.transpose(0, 3, 1, 2).copy()).double())
    return list(outputs.numpy().tolist())


def keras_outputs() -> list[Any]:
    model = keras.applications.MobileNetV2(
        weights=None, input_shape=IMAGES[1:], alpha=WIDTH, classes=CLASSES, classifier_activation=None
    )
    for layer in model.layers:
        for it in layer.weights:
            it.assign(published_value("keras", f"{layer.name}/{it.name}", tuple(it.shape)))
    return list(np.asarray(model(IMAGE, training=False).detach().numpy(), np.float64).tolist())


def state_dict() -> "OrderedDict[str, torch.Tensor]":
    shared = torch.arange(12, dtype=torch.float32)
    tensors: OrderedDict[str, torch.Tensor] = OrderedDict()
    tensors["conv.weight"] = torch.from_numpy(drawn("conv.weight", (2, 1, 2, 3)).astype(np.float32))
    tensors["parameter"] = torch.nn.Parameter(torch.tensor([1.5, -2.5]))
    tensors["half"] = torch.tensor([1.5, 0.25], dtype=torch.float16)
    tensors["bfloat16"] = torch.tensor([1.5, -3.0], dtype=torch.bfloat16)
    tensors["double"] = torch.tensor([[0.1]], dtype=torch.float64)
    tensors["num_batches_tracked"] = torch.tensor(7)
    tensors["turned"] = shared.reshape(3, 4).T
    tensors["part"] = shared[3:5]
    tensors["empty"] = torch.zeros(0, 3)
    return tensors


def main() -> None:
    small = keras.applications.MobileNetV2(weights=None, alpha=WIDTH, classes=CLASSES, input_shape=IMAGES[1:])
    names = {
        "torchvision": {
            "resnet18": of_torchvision(models.resnet18()),
            "resnet34": of_torchvision(models.resnet34()),
            "resnet50": of_torchvision(models.resnet50()),
            "mobilenet_v2": of_torchvision(models.mobilenet_v2()),
            "narrow": of_torchvision(models.mobilenet_v2(num_classes=CLASSES, width_mult=WIDTH)),
        },
        "keras": {
            "resnet50": of_keras(keras.applications.ResNet50(weights=None)),
            "mobilenet_v2": of_keras(keras.applications.MobileNetV2(weights=None)),
            "narrow": of_keras(small),
        },
    }
    tensors = state_dict()
    (FOLDER / "weights").mkdir(exist_ok=True)
    torch.save(tensors, FOLDER / "weights" / "zip.pth")
    torch.save(tensors, FOLDER / "weights" / "stream.pth", _use_new_zipfile_serialization=False)
    values = {name: it.detach().double().tolist() for name, it in tensors.items()}
    outputs = {"torchvision": torchvision_outputs(), "keras": keras_outputs()}
    text = json.dumps({"names": names, "outputs": outputs, "tensors": values}, separators=(",", ":"))
    (FOLDER / "weights.json").write_text(text.replace('"},', '"},\n').replace("],", "],\n") + "\n")


if __name__ == "__main__":
    main()
