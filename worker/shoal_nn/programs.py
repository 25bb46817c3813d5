"""Ready-made programs. Their settings choose the model and the data.

    shoal submit shoal_nn.programs:image_classifier --set data=/data/cifar-10-batches-bin --set format=cifar10 \\
        --set model=resnet18 --set options='{"small_images": true}' --set augment=flip,crop
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog

from shoal import data as sources
from shoal import errors
from shoal.data.augment import Augmentation, Crop, Flip, Normalize, Resize, ToFloat, Transform
from shoal.program import Dataset
from shoal.variables import Variable
from shoal_nn import models
from shoal_nn._mapped import Mapped
from shoal_nn._settings import checked_settings
from shoal_nn.containers import Sequential
from shoal_nn.dense import Dense
from shoal_nn.layer import Shape
from shoal_nn.precision import Compute, Policy
from shoal_nn.supervised import BinaryClassification, MulticlassClassification, Supervised

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")

MODELS: Mapping[str, Callable[..., Sequential]] = {
    "mlp": models.mlp,
    "small_cnn": models.small_cnn,
    "resnet18": partial(models.resnet, 18),
    "resnet34": partial(models.resnet, 34),
    "resnet50": partial(models.resnet, 50),
    "mobilenet_v2": models.mobilenet_v2,
}
"""The models by name. Each takes the number of classes and its own options."""
_SHARE = 0.1  # default share of held-out images


@checked_settings
def image_classifier(
    data: str,
    format: str,
    model: str = "small_cnn",
    classes: int = 10,
    *,
    options: Mapping[str, Any] | None = None,
    weights: str = "",
    size: int = 0,
    augment: str | Sequence[str] = (),
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.25,
    held_out_share: float | None = None,
    top: int = 1,
    precision: Compute = "float32",
    head: str = "",
    train_from: str = "",
) -> Supervised:
    """Trains an image classifier.

    Args:
        data: path of the images, the same on every worker. "~" is the home of the worker's user.
        format: format of the data. "idx" is a folder with the four files of MNIST or Fashion-MNIST. "cifar10" is the
            archive or the folder of CIFAR-10's binary version. "folder" has folders "train" and, optionally, "test",
            each with a folder of images for each class; it needs `size` and skips unreadable images. "npz" is a file
            with "images" [n, height, width, channels] or [n, height, width], uint8 or floats up to 1, and "labels" [n].
        model: one of `MODELS`.
        classes: number of classes, >= 2.
        options: further arguments of the model, such as {"width": 0.35}.
        weights: path of published weights to start from, as for `shoal_nn.models.load_weights`. Empty means none.
        size: height and width that images are resized to; 0 keeps their size.
        augment: random augmentations of training images after resizing, a list or a string such as "flip,crop". "flip"
            mirrors left and right; "crop" crops after padding with 4 pixels of zeros.
        mean: number to subtract from the pixels, which are from 0 to 1, or one number for each channel.
        std: number to divide the pixels by after the subtraction, or one number for each channel.
        held_out_share: share of the training images to hold out; None means 0.1, or the test images if there are any.
        top: k of an additional top-k accuracy in evaluations; 1 means none.
        precision: dtype to compute in: float32, float16, bfloat16 (on a GPU from CuPy 14 on) or float64.
        head: new name of the model's last layer, which then starts from initial values. Empty keeps the name.
        train_from: first part of the model that is trained; earlier parts stay as restored. Empty trains all parts.

    Returns:
        The program, with its data set and held-out samples.

    Raises:
        ProgramError: a setting is invalid.
        InvalidData: the images or the weights do not exist or are invalid.
        InvalidLayer: the model does not accept these options, or has no such part.
        InvalidShape: the model does not accept images of this size.
    """
    _check_counts(classes, top)
    net = _tuned(_model(model, classes, options or {}), classes, head, train_from)
    changes = [_choice("augment", step, _CHANGES)() for step in _listed(augment)]
    policy = Policy(precision)
    images = _images(data, format, size, classes)
    plain, changed = _augmentations(images.like, size, changes, mean, std)
    training, judging = images.parts(held_out_share, changed, plain)
    shape = plain(images.like, seed=0).shape[1:]
    first = _first_values(net, weights, shape, head)
    return Supervised(net, shape, training, judging, MulticlassClassification(top), precision=policy, variables=first)


@checked_settings
def wide_and_deep(
    data: str | Sequence[str],
    held_out: str | Sequence[str],
    label: str,
    categories: Mapping[str, int],
    numbers: str | Sequence[str] | Mapping[str, Sequence[float]] = (),
    crosses: Sequence[Sequence[str]] = (),
    *,
    embedding: int = 8,
    hidden: Sequence[int] = (1024, 512, 256),
    cross_rows: int = 10_000,
    fill: Mapping[str, Any] | None = None,
    window: int = 8,
) -> Supervised:
    """Trains a binary classifier of a table: `shoal_nn.models.wide_deep`.

    Args:
        data: Parquet files for training, as for `shoal.data.Parquet`.
        held_out: Parquet files for evaluation.
        label: column of labels, 0 or 1.
        categories: number of categories of each column. A column with n categories has integers in [0, n).
        numbers: columns of numbers, a list or a string such as "age,hours". They should be of about unit size. A
            mapping gives the mean and standard deviation to normalize them with: {"age": [38.6, 13.7]}.
        crosses: pairs of category columns, such as [["education", "occupation"]].
        embedding: width of the embeddings, as for `shoal_nn.models.wide_deep`.
        hidden: units of the hidden layers, as for `shoal_nn.models.wide_deep`.
        cross_rows: rows of each cross's table, as for `shoal_nn.models.wide_deep`.
        fill: values that replace nulls, by column: {"age": 38}.
        window: number of blocks that are shuffled together.

    Returns:
        The program, with its data set and held-out samples.

    Raises:
        ProgramError: a setting is invalid.
        InvalidData: the files do not exist or are invalid. Reading a batch raises it for nulls without a fill, unknown
            categories, and numbers that are not finite.
        InvalidLayer: the model does not accept these settings.
    """
    scales = _scales(numbers)
    pairs = [_pair(cross) for cross in crosses]
    net = models.wide_deep(
        categories, list(scales), pairs, embedding=embedding, hidden=tuple(hidden), cross_rows=cross_rows
    )
    columns = [*categories, *scales]
    ready = partial(_features, categories, scales)
    training, judging = (
        Mapped(sources.Parquet(files, columns=[*columns, label], fill=fill, window=blocks), ready)
        for files, blocks in ((data, window), (held_out, 0))
    )
    return Supervised(net, dict.fromkeys(columns, ()), training, judging, BinaryClassification(), label=label)


@dataclass(frozen=True)
class _Images:
    """Images at a path. Batches of both data sets are tuples of images and labels."""

    training: Dataset
    judging: Dataset | None  # None if there are no test images
    like: np.ndarray  # [1, height, width, channels], as images are read
    classes: tuple[str, ...] = ()  # names of classes; may be empty

    def parts(
        self, held_out_share: float | None, changed: Augmentation, plain: Augmentation
    ) -> tuple[Dataset, Dataset]:
        """Returns the training images, augmented, and the held-out images.

        Args:
            held_out_share: share of the training images that is held out; None takes the test images if there are any.
            changed: augmentation of the training images.
            plain: augmentation of the held-out images.
        """
        training, judging = self.training, self.judging
        if judging is None or held_out_share is not None:
            training, judging = sources.split(training, _SHARE if held_out_share is None else held_out_share)
        return sources.Augmented(training, changed), sources.Augmented(judging, plain)


def _idx(folder: Path, _: int) -> _Images:
    def part(name: str) -> Dataset:
        files = [folder / f"{name}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        return sources.Idx(*(file if file.exists() else f"{file}.gz" for file in files))

    training = part("train")
    return _Images(training, part("t10k"), training.batch(np.arange(1))[0])


def _cifar10(folder: Path, _: int) -> _Images:
    training = sources.Cifar10(folder)
    return _Images(training, sources.Cifar10(folder, train=False), training.batch(np.arange(1))[0], training.classes)


def _folder(folder: Path, size: int) -> _Images:
    if not size:
        raise errors.ProgramError(
            "format 'folder' needs a size, because its images may differ in size; set size, such as 224"
        )

    def part(name: str) -> sources.ImageFolder:
        images = sources.ImageFolder(folder / name, size=(size, size), crop=True, skip_unreadable=True)
        if images.unreadable:
            first = next(iter(images.unreadable))
            _log.warning("images_unreadable", folder=str(folder / name), images=len(images.unreadable), first=first)
        return images

    training = part("train")
    judging = part("test") if (folder / "test").exists() else None
    if judging and judging.classes != training.classes:
        other = sorted({*training.classes} ^ {*judging.classes})[0]
        raise errors.InvalidData(
            f"the class {other!r} is in only one of train and test in {folder}, so their labels would differ; "
            "give both the same folders"
        )
    return _Images(training, judging, np.zeros((1, size, size, 3), np.uint8), training.classes)


def _npz(file: Path, _: int) -> _Images:
    arrays = sources.Arrays(file)
    sample = arrays.batch(np.arange(1))
    if not isinstance(sample, dict) or not {"images", "labels"} <= sample.keys():
        found = ", ".join(sample) if isinstance(sample, dict) else "one array without a name"
        raise errors.InvalidData(
            f"{file} must have the arrays images and labels, but has {found}; write it with "
            "numpy.savez(file, images=..., labels=...)"
        )
    if sample["images"].ndim not in {3, 4}:
        shape = ", ".join(["n", *map(str, sample["images"].shape[1:])])
        raise errors.InvalidData(f"images in {file} are [{shape}]; give [n, height, width, channels]")

    def pair(batch: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        images = batch["images"]
        if images.dtype.kind == "f" and not (high := images.max()) <= 1:
            raise errors.InvalidData(
                f"images in {file} are {images.dtype} up to {high:g}, but floats must be from 0 to 1; divide them "
                "by 255, or store uint8"
            )
        return images if images.ndim == 4 else images[..., np.newaxis], batch["labels"]

    return _Images(Mapped(arrays, pair), None, pair(sample)[0])


_FORMATS: Mapping[str, Callable[[Path, int], _Images]] = {
    "idx": _idx,
    "cifar10": _cifar10,
    "folder": _folder,
    "npz": _npz,
}
_CHANGES: Mapping[str, Callable[[], Transform]] = {"flip": Flip, "crop": Crop}


def _model(name: str, classes: int, options: Mapping[str, Any]) -> Sequential:
    build = _choice("model", name, MODELS)
    known = [option for option in inspect.signature(build).parameters if option != "classes"]
    if wrong := [option for option in options if option not in known]:
        raise errors.ProgramError(
            f"options have {wrong[0]!r}, which {name} does not have; its options are {', '.join(known)}"
        )
    return checked_settings(build)(classes, **options)


def _check_counts(classes: int, top: int) -> None:
    if classes < 2:
        raise errors.ProgramError(f"classes is {classes}; give 2 or more")
    if not 1 <= top <= classes:
        raise errors.ProgramError(f"top is {top}; give a number from 1 to the number of classes, {classes}")


def _images(data: str, form: str, size: int, classes: int) -> _Images:
    """Opens the images. Raises ProgramError if the number of classes is not the model's."""
    images = _choice("format", form, _FORMATS)(Path(data).expanduser(), size)
    if images.classes and len(images.classes) != classes:
        there = len(images.classes)
        raise errors.ProgramError(f"{data} has {there} classes, but the model has {classes}; set classes={there}")
    return images


def _augmentations(
    like: np.ndarray,
    size: int,
    changes: Sequence[Transform],
    mean: float | Sequence[float],
    std: float | Sequence[float],
) -> tuple[Augmentation, Augmentation]:
    """Returns the augmentations of all images that are `like` this one, and of training images.

    Args:
        like: one image, [1, height, width, channels].
        size: height and width to resize to; 0 keeps the size.
        changes: random transforms of training images.
        mean: numbers to subtract from the pixels.
        std: numbers to divide the pixels by.
    """
    resized: list[Transform] = [Resize((size, size))] if size and like.shape[1:3] != (size, size) else []
    ready: list[Transform] = [ToFloat(), Normalize(mean, std)]
    return Augmentation(*resized, *ready), Augmentation(*resized, *changes, *ready)


def _tuned(net: Sequential, classes: int, head: str, train_from: str) -> Sequential:
    """Returns the model with a new last layer and with earlier parts frozen, if they are named."""
    if head:
        net = models.with_head(net, Dense(classes), head)
    return models.frozen(net, train_from) if train_from else net


def _first_values(net: Sequential, weights: str, shape: Shape, head: str) -> Mapping[str, Variable] | None:
    return models.pretrained(net, Path(weights).expanduser(), shape, head=not head) if weights else None


def _choice(what: str, name: str, choices: Mapping[str, _T]) -> _T:
    if name not in choices:
        raise errors.ProgramError(f"{what} is {name!r}; choose from {', '.join(choices)}")
    return choices[name]


def _listed(names: str | Sequence[str]) -> list[str]:
    """Returns a list of names, which may be given as a comma-separated string."""
    return [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)


def _scales(numbers: str | Sequence[str] | Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Returns the mean and standard deviation by column."""
    if not isinstance(numbers, Mapping):
        return dict.fromkeys(_listed(numbers), (0.0, 1.0))
    scales = {}
    for name, scale in numbers.items():
        if len(scale) != 2 or not np.isfinite(scale).all() or not scale[1]:
            raise errors.ProgramError(f"numbers have {scale!r} for {name!r}; give [mean, std] with std not 0")
        scales[name] = scale[0], scale[1]
    return scales


def _pair(cross: Sequence[str]) -> tuple[str, str]:
    if len(cross) != 2:
        raise errors.ProgramError(f'crosses have {cross!r}; give pairs of categories: [["education", "occupation"]]')
    return cross[0], cross[1]


def _features(
    categories: Mapping[str, int], scales: Mapping[str, tuple[float, float]], batch: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns a batch of a table as the model's input. Raises InvalidData for invalid categories or numbers."""
    features = dict(batch)
    for name, count in categories.items():
        column = batch[name]
        if column.dtype.kind not in "iub":
            raise errors.InvalidData(
                f"column {name!r} is of {column.dtype}; categories must be integers from 0 to {count - 1}"
            )
        low, high = int(column.min()), int(column.max())
        if low < 0 or high >= count:
            raise errors.InvalidData(
                f"column {name!r} has {low if low < 0 else high}, but categories has {count}, 0 to {count - 1}; set a "
                "larger number, or correct the table"
            )
        features[name] = column.astype(np.uint8) if column.dtype.kind == "b" else column
    for name, (mean, std) in scales.items():
        if batch[name].dtype.kind not in "iuf":
            raise errors.InvalidData(f"column {name!r} is of {batch[name].dtype}; numbers must be integers or floats")
        with np.errstate(over="ignore"):  # overflow is reported below
            features[name] = ((batch[name] - mean) / std).astype(np.float32)
        if wrong := np.count_nonzero(~np.isfinite(features[name])):
            raise errors.InvalidData(
                f"column {name!r} has {wrong} of {len(batch[name])} numbers that are NaN, infinite or too large; "
                "correct them, or write nulls and set a fill"
            )
    return features


__all__ = ["MODELS", "image_classifier", "wide_and_deep"]
