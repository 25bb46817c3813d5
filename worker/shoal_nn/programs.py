"""Programs to submit as they are: their settings say which model, and which data.

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
from shoal_nn import models
from shoal_nn._mapped import Mapped
from shoal_nn._settings import checked_settings
from shoal_nn.containers import Sequential
from shoal_nn.dense import Dense
from shoal_nn.precision import Compute, Policy
from shoal_nn.supervised import BinaryClassification, MulticlassClassification, Supervised

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")

# By name; each takes the number of classes, and options of its own.
MODELS: Mapping[str, Callable[..., Sequential]] = {
    "mlp": models.mlp,
    "small_cnn": models.small_cnn,
    "resnet18": partial(models.resnet, 18),
    "resnet34": partial(models.resnet, 34),
    "resnet50": partial(models.resnet, 50),
    "mobilenet_v2": models.mobilenet_v2,
}
_SHARE = 0.1  # of images in one part, where nothing is said


@checked_settings
def image_classifier(
    data: str,
    format: str,
    model: str = "small_cnn",
    classes: int = 10,
    *,
    options: Mapping[str, Any] | None = None,
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
    """Learns which class an image is of.

    Args:
        data: path of the images, the same on every worker; "~" is the home of the user whose worker it is.
        format: what is there. "idx": a folder with the four files of MNIST or Fashion-MNIST. "cifar10": the folder of
            CIFAR-10's binary version. "folder": "train" and, if it is there, "test", with a folder of images for each
            class; wants `size`, and images that cannot be read are passed by. "npz": a file with "images" [n, height,
            width, channels] or [n, height, width], uint8 or floats from 0 to 1, and "labels" [n].
        model: one of `MODELS`.
        classes: how many there are, 2 or more.
        options: further arguments of the model: {"width": 0.35}.
        size: images are resized to this height and width; 0: they stay as they are.
        augment: what is done at random to images to train on, once they are resized, a list or "flip,crop": "flip"
            (left and right), "crop" (with 4 pixels of zeros around).
        mean: subtracted from pixels, which are from 0 to 1; a number, or one for each channel.
        std: pixels are divided by it after that; a number, or one for each channel.
        held_out_share: of the images to train on, the share that is left out and that the model is judged by. None: it
            is judged by the images to test on; where the format has none, by a tenth.
        top: evaluations tell the share of images whose class is among the so many likeliest, too; 1: they do not.
        precision: what is computed in: float32, float16, bfloat16 (not on a GPU), float64.
        head: name of the model's last layer, for fine-tuning: by a new name it begins anew in a partial restore. Empty:
            as the model has it.
        train_from: the model's first part that is trained; those before stay as they were restored. Empty: all are.

    Raises:
        ProgramError: a setting is none of those that there are.
        InvalidData: the images are not there, or not what they should be.
        InvalidLayer: the model does not take the values of these options, or has no such part.
        InvalidShape: the model does not take images of this size.
    """
    _check_counts(classes, top)
    net = _tuned(_model(model, classes, options or {}), classes, head, train_from)
    changes = [_choice("augment", step, _CHANGES)() for step in _listed(augment)]
    policy = Policy(precision)
    images = _images(data, format, size, classes)
    plain, changed = _augmentations(images.like, size, changes, mean, std)
    training, judging = images.parts(held_out_share, changed, plain)
    return Supervised(
        net, plain(images.like, seed=0).shape[1:], training, judging, MulticlassClassification(top), precision=policy
    )


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
    """Learns yes or no from a table: `shoal_nn.models.wide_deep`.

    Args:
        data: the Parquet files to train on, as of `shoal.data.Parquet`.
        held_out: those to be judged by.
        label: the column of labels, 0 or 1.
        categories: how many there are, by column: whole numbers from [0, that many).
        numbers: columns of numbers, a list or "age,hours": best of about unit size, or by column the mean and the
            standard deviation that they are shifted and scaled by: {"age": [38.6, 13.7]}.
        crosses: pairs of categories: [["education", "occupation"]].
        embedding: the model's, as of `shoal_nn.models.wide_deep`.
        hidden: the same.
        cross_rows: the same.
        fill: by column, what stands in the place of a null: {"age": 38}.
        window: blocks that are shuffled together.

    Raises:
        ProgramError: a setting is not of this form.
        InvalidData: the files are not there, or not what they should be. From a batch: a column has nulls that nothing
            fills, categories that there are not, or numbers that are not finite.
        InvalidLayer: the model does not take these settings.
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
    """What a path has. Batches of both data sets are tuples of images and labels."""

    training: Dataset
    judging: Dataset | None  # None: there is one part
    like: np.ndarray  # [1, height, width, channels], as images are read
    classes: tuple[str, ...] = ()  # names, where they have any

    def parts(
        self, held_out_share: float | None, changed: Augmentation, plain: Augmentation
    ) -> tuple[Dataset, Dataset]:
        """Returns the images to train on, changed, and those to judge by; a share is taken from the former."""
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
        raise errors.ProgramError("format 'folder' wants a size, for images differ in theirs; set size, such as 224")

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
            f"of train and test in {folder} one has a class {other!r} and the other has not, so their labels would "
            "not mean the same; give both the same folders"
        )
    return _Images(training, judging, np.zeros((1, size, size, 3), np.uint8), training.classes)


def _npz(file: Path, _: int) -> _Images:
    arrays = sources.Arrays(file)
    sample = arrays.batch(np.arange(1))
    if not isinstance(sample, dict) or not {"images", "labels"} <= sample.keys():
        found = ", ".join(sample) if isinstance(sample, dict) else "one without a name"
        raise errors.InvalidData(
            f"{file} has not the arrays images and labels, but {found}; write it with numpy.savez(file, images=..., "
            "labels=...)"
        )
    if sample["images"].ndim not in {3, 4}:
        shape = ", ".join(["n", *map(str, sample["images"].shape[1:])])
        raise errors.InvalidData(f"images in {file} are [{shape}]; give [n, height, width, channels]")

    def pair(batch: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        images = batch["images"]
        if images.dtype.kind == "f" and not (high := images.max()) <= 1:
            raise errors.InvalidData(
                f"images in {file} are {images.dtype} up to {high:g}, and floats are taken as from 0 to 1; divide them "
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
        raise errors.ProgramError(f"options have {wrong[0]!r}; give, by name, what {name} has: {', '.join(known)}")
    return checked_settings(build)(classes, **options)


def _check_counts(classes: int, top: int) -> None:
    if classes < 2:
        raise errors.ProgramError(f"classes is {classes}; give 2 or more")
    if not 1 <= top <= classes:
        raise errors.ProgramError(f"top is {top}; give a number from 1 to the number of classes, {classes}")


def _images(data: str, form: str, size: int, classes: int) -> _Images:
    """Reads what a path has; ProgramError if its classes are not as many as the model's."""
    images = _choice("format", form, _FORMATS)(Path(data).expanduser(), size)
    if images.classes and len(images.classes) != classes:
        there = len(images.classes)
        raise errors.ProgramError(f"{data} has {there} classes, and the model {classes}; set classes={there}")
    return images


def _augmentations(
    like: np.ndarray,
    size: int,
    changes: Sequence[Transform],
    mean: float | Sequence[float],
    std: float | Sequence[float],
) -> tuple[Augmentation, Augmentation]:
    """Returns what is done to all images that are `like` this one, and to those to train on."""
    resized: list[Transform] = [Resize((size, size))] if size and like.shape[1:3] != (size, size) else []
    ready: list[Transform] = [ToFloat(), Normalize(mean, std)]
    return Augmentation(*resized, *ready), Augmentation(*resized, *changes, *ready)


def _tuned(net: Sequential, classes: int, head: str, train_from: str) -> Sequential:
    """Returns the model with a new last layer, and only its last parts trained, where these are named."""
    if head:
        net = models.with_head(net, Dense(classes), head)
    return models.frozen(net, train_from) if train_from else net


def _choice(what: str, name: str, choices: Mapping[str, _T]) -> _T:
    if name not in choices:
        raise errors.ProgramError(f"{what} is {name!r}; choose of {', '.join(choices)}")
    return choices[name]


def _listed(names: str | Sequence[str]) -> list[str]:
    """A list, which is a text with commas on the command line."""
    return [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)


def _scales(numbers: str | Sequence[str] | Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation, by column."""
    if not isinstance(numbers, Mapping):
        return dict.fromkeys(_listed(numbers), (0.0, 1.0))
    scales = {}
    for name, scale in numbers.items():
        if len(scale) != 2 or not np.isfinite(scale).all() or not scale[1]:
            raise errors.ProgramError(f"numbers have {scale!r} for {name!r}; give [mean, std], the latter not 0")
        scales[name] = scale[0], scale[1]
    return scales


def _pair(cross: Sequence[str]) -> tuple[str, str]:
    if len(cross) != 2:
        raise errors.ProgramError(f'crosses have {cross!r}; give pairs of categories: [["education", "occupation"]]')
    return cross[0], cross[1]


def _features(
    categories: Mapping[str, int], scales: Mapping[str, tuple[float, float]], batch: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """A batch of a table as the model takes it, if it does: finite numbers, categories in their ranges."""
    features = dict(batch)
    for name, count in categories.items():
        column = batch[name]
        if column.dtype.kind not in "iub":
            raise errors.InvalidData(
                f"column {name!r} is of {column.dtype}; categories are whole numbers, from 0 to {count - 1}"
            )
        low, high = int(column.min()), int(column.max())
        if low < 0 or high >= count:
            raise errors.InvalidData(
                f"column {name!r} has {low if low < 0 else high}, and categories says {count}, 0 to {count - 1}; set a "
                "larger number, or mend the table"
            )
        features[name] = column.astype(np.uint8) if column.dtype.kind == "b" else column
    for name, (mean, std) in scales.items():
        if batch[name].dtype.kind not in "iuf":
            raise errors.InvalidData(f"column {name!r} is of {batch[name].dtype}; numbers are whole ones or floats")
        with np.errstate(over="ignore"):  # what is too large for float32 is told below
            features[name] = ((batch[name] - mean) / std).astype(np.float32)
        if wrong := np.count_nonzero(~np.isfinite(features[name])):
            raise errors.InvalidData(
                f"column {name!r} has {wrong} among {len(batch[name])} numbers that are NaN, infinite or too large; "
                "write others, or nulls and a fill for them"
            )
    return features


__all__ = ["MODELS", "image_classifier", "wide_and_deep"]
