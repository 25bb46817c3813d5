"""Programs to submit as they are: their settings say which model, and which data.

    shoal submit shoal_nn.programs:image_classifier --set data=/data/cifar-10-batches-py --set format=cifar10 \\
        --set model=resnet18 --set options='{"small_images": true}' --set augment='["flip", "crop"]'
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shoal import data as sources
from shoal import errors
from shoal.data.augment import Augmentation, Crop, Flip, Normalise, Resize, Step, ToFloat
from shoal.program import Dataset
from shoal_nn import models
from shoal_nn.containers import Sequential
from shoal_nn.dense import Dense
from shoal_nn.precision import Compute, Policy
from shoal_nn.supervised import OneOfMany, Supervised, YesOrNo

# By name; each takes the number of classes, and options of its own.
MODELS: Mapping[str, Callable[..., Sequential]] = {
    "mlp": models.mlp,
    "small_cnn": models.small_cnn,
    "resnet18": partial(models.resnet, 18),
    "resnet34": partial(models.resnet, 34),
    "resnet50": partial(models.resnet, 50),
    "mobilenet_v2": models.mobilenet_v2,
}
# Images to train on and images to be judged by, from a path; of those in one part the latter are None.
_Pair = tuple[Dataset, Dataset | None]


def image_classifier(
    data: str,
    format: str,
    model: str = "small_cnn",
    classes: int = 10,
    *,
    options: Mapping[str, Any] | None = None,
    size: int = 0,
    augment: Sequence[str] = (),
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.25,
    held_out: float = 0.1,
    top: int = 1,
    precision: Compute = "float32",
    head: str = "",
    train_from: str = "",
) -> Supervised:
    """Learns which class an image is of.

    Args:
        data: path of the images, the same on every worker.
        format: what is there. "idx": a folder with the four files of MNIST or Fashion-MNIST. "cifar10": CIFAR-10's
            folder for Python. "folder": "train" and, if it is there, "test", with a folder of images for each class;
            wants `size`. "npz": a file with "images" [n, height, width, channels] and "labels" [n].
        model: one of `MODELS`.
        classes: how many there are.
        options: further arguments of the model: {"width": 0.35}.
        size: images are resized to this height and width; 0: they stay as they are.
        augment: what is done at random to images to train on: "flip" (left and right), "crop" (with 4 pixels of zeros
            around).
        mean, std: pixels from 0 to 1 are shifted and scaled by these; a number, or one for each channel.
        held_out: the share of the images that the model is judged by, where they are in one part.
        top: evaluations tell the share of images whose class is among the so many likeliest, too; 1: they do not.
        precision: what is computed in: float32, float16, bfloat16, float64.
        head: name of the model's last layer, for fine-tuning: by a new name it begins anew in a partial restore. Empty:
            as the model has it.
        train_from: the model's first part that is trained; those before stay as they were restored. Empty: all are.

    Raises:
        ProgramError: a setting is none of those that there are.
        InvalidData: the images are not there, or not what they should be.
        InvalidLayer: the model does not take these options.
    """
    _choose("format", format, _FORMATS)
    _choose("model", model, MODELS)
    unknown = [step for step in augment if step not in _STEPS]
    if unknown:
        raise errors.ProgramError(f"augment has {unknown[0]!r}; choose of {', '.join(_STEPS)}")
    net = MODELS[model](classes, **(options or {}))
    if head:
        net = models.with_head(net, Dense(classes), head)
    if train_from:
        net = models.frozen(net, train_from)
    training, judging = _FORMATS[format](Path(data), size)
    there = len(getattr(training, "classes", ())) or classes
    if there != classes:
        raise errors.ProgramError(f"{data} has {there} classes, and the model {classes}; set classes={there}")
    if judging is None:
        training, judging = sources.split(training, held_out)
    # ImageFolder resizes as it decodes; where that is done, there is nothing left to do.
    resized: list[Step] = [Resize((size, size))] if size and format != "folder" else []
    plain = Augmentation(*resized, ToFloat(), Normalise(mean, std))
    changed = Augmentation(*(_STEPS[step]() for step in augment), plain)
    examples = sources.Augmented(judging, plain)
    shape = examples.batch(np.arange(1))[0].shape[1:]
    return Supervised(
        net,
        shape,
        sources.Augmented(training, changed),
        examples,
        OneOfMany(top),
        precision=Policy(precision),
    )


def wide_and_deep(
    data: str,
    held_out: str,
    label: str,
    categories: Mapping[str, int],
    numbers: Sequence[str] = (),
    crosses: Sequence[Sequence[str]] = (),
    *,
    embedding: int = 8,
    hidden: Sequence[int] = (1024, 512, 256),
    cross_rows: int = 10_000,
    window: int = 8,
    precision: Compute = "float32",
) -> Supervised:
    """Learns yes or no from a table: `shoal_nn.models.wide_deep`.

    Args:
        data: the Parquet files to train on, as of `shoal.data.Parquet`.
        held_out: those to be judged by.
        label: the column of labels, 0 or 1.
        categories: how many there are, by column: whole numbers from [0, that many).
        numbers: columns of floats, best of about unit size.
        crosses: pairs of categories.
        embedding, hidden, cross_rows: of the model.
        window: blocks that are shuffled together.
        precision: what is computed in: float32, float16, bfloat16, float64.

    Raises:
        InvalidData: the files are not there, or not what they should be.
        InvalidLayer: the model does not take these settings.
    """
    pairs = [(pair[0], pair[1]) for pair in crosses]
    net = models.wide_deep(categories, numbers, pairs, embedding=embedding, hidden=tuple(hidden), cross_rows=cross_rows)
    features = (*categories, *numbers)
    training, judging = (
        sources.Parquet(path, columns=[*features, label], window=blocks)
        for path, blocks in ((data, window), (held_out, 0))
    )
    shape = dict.fromkeys(features, ())
    return Supervised(net, shape, training, judging, YesOrNo(), label=label, precision=Policy(precision))


def _idx(folder: Path, _: int) -> _Pair:
    def part(name: str) -> Dataset:
        files = [folder / f"{name}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        return sources.Idx(*(file if file.exists() else f"{file}.gz" for file in files))

    return part("train"), part("t10k")


def _cifar10(folder: Path, _: int) -> _Pair:
    return sources.Cifar10(folder), sources.Cifar10(folder, train=False)


def _folder(folder: Path, size: int) -> _Pair:
    if not size:
        raise errors.ProgramError("format 'folder' wants a size, for images differ in theirs; set size, such as 224")

    def part(name: str) -> Dataset:
        return sources.ImageFolder(folder / name, size=(size, size), crop=True, skip_unreadable=True)

    return part("train"), part("test") if (folder / "test").exists() else None


def _npz(file: Path, _: int) -> _Pair:
    arrays = sources.Arrays(file)
    example = arrays.batch(np.arange(1))
    if not isinstance(example, dict) or not {"images", "labels"} <= example.keys():
        raise errors.ProgramError(f"{file} does not have the arrays images and labels; write it with numpy.savez")
    return _Images(arrays), None


class _Images:
    """The batches of a dict of arrays, as tuples of images and labels."""

    def __init__(self, arrays: Dataset) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        batch = self._arrays.batch(indices)
        return batch["images"], batch["labels"]


_FORMATS: Mapping[str, Callable[[Path, int], _Pair]] = {
    "idx": _idx,
    "cifar10": _cifar10,
    "folder": _folder,
    "npz": _npz,
}
_STEPS: Mapping[str, Callable[[], Step]] = {"flip": Flip, "crop": Crop}


def _choose(what: str, choice: str, choices: Mapping[str, object]) -> None:
    if choice not in choices:
        raise errors.ProgramError(f"{what} is {choice!r}; choose one of {', '.join(choices)}")


__all__ = ["MODELS", "image_classifier", "wide_and_deep"]
