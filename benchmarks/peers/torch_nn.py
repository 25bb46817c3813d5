"""Models in PyTorch on one thread: python torch_nn.py resnet18|mobilenet_v2|small_cnn first|last [--short].

"first" stores images in memory with the channels first (NCHW), and "last" with the channels last (NHWC). The models are
copies of torchvision's, with a first layer for small images. The script does not need torchvision.
"""

import sys

import nn_workload as work
import torch
from torch import nn

# Of MobileNetV2, width 0.35: how many times as wide a block is inside, its channels, blocks, stride of the first.
STAGES = ((1, 8, 1, 1), (6, 8, 2, 2), (6, 16, 3, 2), (6, 24, 4, 2), (6, 32, 3, 1), (6, 56, 3, 2), (6, 112, 1, 1))


class Sum(nn.Module):
    """body(x) + shortcut(x)."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + (x if self.shortcut is None else self.shortcut(x))


def normalized(inputs: int, filters: int, window: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, filters, window, stride, window // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(filters)]


def resnet18() -> nn.Module:
    layers = [*normalized(3, 64, 3), nn.ReLU(inplace=True)]
    channels = 64
    for filters in (64, 128, 256, 512):
        for stride in (1 if filters == 64 else 2, 1):
            body = [*normalized(channels, filters, 3, stride), nn.ReLU(inplace=True), *normalized(filters, filters, 3)]
            same = channels == filters and stride == 1
            shortcut = None if same else nn.Sequential(*normalized(channels, filters, 1, stride))
            layers += [Sum(nn.Sequential(*body), shortcut), nn.ReLU(inplace=True)]
            channels = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, work.CLASSES))


def mobilenet_v2() -> nn.Module:
    layers = [*normalized(3, 16, 3), nn.ReLU6(inplace=True)]
    channels = 16
    for expansion, filters, count, first in STAGES:
        for stride in (first, *[1] * (count - 1)):
            hidden = channels * expansion
            body = [*normalized(channels, hidden, 1), nn.ReLU6(inplace=True)] if expansion > 1 else []
            body += [*normalized(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6(inplace=True)]
            block = nn.Sequential(*body, *normalized(hidden, filters, 1))
            layers.append(Sum(block) if stride == 1 and channels == filters else block)
            channels = filters
    layers += [*normalized(channels, 1280, 1), nn.ReLU6(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(1280, work.CLASSES))


def small_cnn() -> nn.Module:
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    hidden = [nn.Flatten(), nn.Dropout(0.25), nn.Linear(7 * 7 * 64, 128), nn.ReLU(inplace=True), nn.Dropout(0.25)]
    return nn.Sequential(*convolutions, *hidden, nn.Linear(128, work.CLASSES))


def main(name: str, channels: str, *flags: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load = work.MODELS[name]
    layout = torch.channels_last if channels == "last" else torch.contiguous_format
    model = {"resnet18": resnet18, "mobilenet_v2": mobilenet_v2, "small_cnn": small_cnn}[name]()
    model = model.to(memory_format=layout).train()
    height, width, depth = load.image
    x = torch.randn(load.batch, depth, height, width).to(memory_format=layout)
    labels = torch.randint(0, work.CLASSES, (load.batch,))

    def step() -> float:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        return loss.item()

    seconds, loss = work.measure(step, short="--short" in flags)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    work.report(f"torch {torch.__version__.partition('+')[0]}", parameters, seconds, loss)


if __name__ == "__main__":
    main(*sys.argv[1:])
