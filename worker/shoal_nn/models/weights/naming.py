"""The names and layouts of published weights, for each variable of a model. No I/O."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

Layout = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Source:
    """Where the value of a variable is in a file.

    Attributes:
        names: the names that it may have; the first one in the file is used.
        layout: converts the array to Shoal's layout.
        minus: names of an array to subtract, if the file has one. Keras' ResNets have convolutions with a bias before
            each BatchNorm. Subtracting the bias from the mean gives the same model without it.
    """

    names: tuple[str, ...]
    layout: Layout
    minus: tuple[str, ...] = ()

    def find(self, names: Iterable[str]) -> str | None:
        """Returns the first of its possible names that is among the given names, or None."""
        return next((name for name in self.names if name in names), None)


@dataclass(frozen=True)
class Naming:
    """The names of one publisher.

    Attributes:
        publisher: its name.
        source: takes the name of a variable, and returns its place in a file.
    """

    publisher: str
    source: Callable[[str], Source]


def namings(variables: Iterable[str], head: str) -> list[Naming]:
    """Returns the namings for a model: those of Shoal, and of torchvision and Keras if they publish the model.

    Args:
        variables: names of the model's variables.
        head: name of its last part.
    """
    found = [Naming("shoal", lambda name: Source((name,), np.asarray))]
    kinds = {name.partition("/")[0] for name in variables}
    if "layer1" in kinds:
        found += [
            Naming("torchvision", _in_torchvision(_RESNET, head)),
            Naming("keras", _in_keras(_KERAS_RESNET, head)),
        ]
    elif "block0" in kinds:
        found += [
            Naming("torchvision", _in_torchvision(_MOBILENET, head)),
            Naming("keras", _in_keras(_KERAS_MOBILENET, head)),
        ]
    return found


# From the name of a layer in Shoal to its name elsewhere. Names of Shoal's containers, "sum" and "body", are left out.
Rules = Mapping[str, str | Callable[[re.Match[str]], str]]

_RESNET: Rules = {
    r"conv1|bn1": r"\g<0>",
    r"layer(\d)/(\d+)/((?:conv|bn)\d)": r"layer\1.\2.\3",
    r"layer(\d)/(\d+)/shortcut/conv": r"layer\1.\2.downsample.0",
    r"layer(\d)/(\d+)/shortcut/bn": r"layer\1.\2.downsample.1",
    r"head": "fc",
}
# In the first block, which expands nothing, the numbers of the later parts are 1 less.
_MOBILENET: Rules = {
    r"stem/conv": "features.0.0",
    r"stem/bn": "features.0.1",
    r"block(\d+)/expand/conv": lambda match: f"{_feature(match)}.conv.0.0",
    r"block(\d+)/expand/bn": lambda match: f"{_feature(match)}.conv.0.1",
    r"block(\d+)/depthwise/conv": lambda match: f"{_feature(match)}.conv.{_expands(match)}.0",
    r"block(\d+)/depthwise/bn": lambda match: f"{_feature(match)}.conv.{_expands(match)}.1",
    r"block(\d+)/project": lambda match: f"{_feature(match)}.conv.{_expands(match) + 1}",
    r"block(\d+)/bn": lambda match: f"{_feature(match)}.conv.{_expands(match) + 2}",
    r"last/conv": "features.18.0",
    r"last/bn": "features.18.1",
    r"head": "classifier.1",
}
_KERAS_RESNET: Rules = {
    r"conv1": "conv1_conv",
    r"bn1": "conv1_bn",
    r"layer(\d)/(\d+)/(conv|bn)(\d)": lambda match: f"{_keras_block(match)}_{match[4]}_{match[3]}",
    r"layer(\d)/(\d+)/shortcut/(conv|bn)": lambda match: f"{_keras_block(match)}_0_{match[3]}",
    r"head": "predictions",
}
_KERAS_MOBILENET: Rules = {
    r"stem/conv": "Conv1",
    r"stem/bn": "bn_Conv1",
    r"block(\d+)/(expand|depthwise)/conv": lambda match: f"{_keras_mobile_block(match)}_{match[2]}",
    r"block(\d+)/(expand|depthwise)/bn": lambda match: f"{_keras_mobile_block(match)}_{match[2]}_BN",
    r"block(\d+)/project": lambda match: f"{_keras_mobile_block(match)}_project",
    r"block(\d+)/bn": lambda match: f"{_keras_mobile_block(match)}_project_BN",
    r"last/conv": "Conv_1",
    r"last/bn": "Conv_1_bn",
    r"head": "predictions",
}
_OLD_KERAS_HEADS = ("Logits", "fc1000", "probs")
_TORCH_WEIGHTS = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


def _in_torchvision(rules: Rules, head: str) -> Callable[[str], Source]:
    def source(name: str) -> Source:
        layer, weight = _layer_of(name, head)
        return Source((f"{_renamed(layer, rules)}.{_TORCH_WEIGHTS[weight]}",), _from_torch)

    return source


def _in_keras(rules: Rules, head: str) -> Callable[[str], Source]:
    def source(name: str) -> Source:
        layer, weight = _layer_of(name, head)
        theirs = _renamed(layer, rules)
        layers = (theirs, *_OLD_KERAS_HEADS) if layer == "head" else (theirs,)
        # Within `save_weights` of Keras 3, weights have numbers.
        weights = {
            "kernel": ("kernel", "depthwise_kernel", "0"),
            "scale": ("gamma", "0"),
            "bias": ("bias", "1") if layer == "head" else ("beta", "1"),
            "mean": ("moving_mean", "2"),
            "var": ("moving_variance", "3"),
        }[weight]
        conv = re.sub(r"_bn$", "_conv", theirs)
        minus = (f"{conv}/bias", f"{conv}/1") if weight == "mean" and conv != theirs else ()
        layout = _from_keras_depthwise if layer.endswith("depthwise/conv") else np.asarray
        return Source(tuple(f"{each}/{it}" for each in layers for it in weights), layout, minus)

    return source


def _layer_of(name: str, head: str) -> tuple[str, str]:
    """Returns the name of a variable's layer, without containers, and the variable's own name."""
    path, _, weight = name.rpartition("/")
    layer = "/".join(part for part in path.split("/") if part not in ("sum", "body"))
    return "head" if layer == head else layer, weight


def _renamed(layer: str, rules: Rules) -> str:
    for pattern, replacement in rules.items():
        if match := re.fullmatch(pattern, layer):
            return replacement(match) if callable(replacement) else match.expand(replacement)
    return layer


def _feature(match: re.Match[str]) -> str:
    return f"features.{int(match[1]) + 1}"


def _expands(match: re.Match[str]) -> int:
    return int(match[1] != "0")


def _keras_block(match: re.Match[str]) -> str:
    return f"conv{int(match[1]) + 1}_block{int(match[2]) + 1}"


def _keras_mobile_block(match: re.Match[str]) -> str:
    return f"block_{match[1]}" if match[1] != "0" else "expanded_conv"


def _from_torch(array: np.ndarray) -> np.ndarray:
    """From outputs, inputs, height, width to height, width, inputs, outputs; from outputs, inputs to the reverse."""
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T if array.ndim == 2 else array


def _from_keras_depthwise(array: np.ndarray) -> np.ndarray:
    """From height, width, channels, multiplier to height, width, 1, channels * multiplier."""
    return array.reshape(*array.shape[:2], 1, -1)


__all__ = ["Naming", "Source", "namings"]
