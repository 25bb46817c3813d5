"""The data set of images in one folder per class. Pillow decodes the images of a batch."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal

import numpy as np

from shoal import errors
from shoal._system import check_type, load
from shoal.data._block_reader import check_number
from shoal.data._files import errors_naming
from shoal.program import DEFAULT_PREFETCH

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# A file's format may differ from its name. Formats that are programs, such as EPS, are not tried.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_MOST_NAMED = 10  # unreadable images that a message names


class ImageFolder:
    """Images in one folder per class. The name of the folder is the name of the class.

        dataset = ImageFolder("flowers/train", size=(224, 224))  # flowers/train/rose/0001.jpg, ...

    A batch is the tuple (images, labels): uint8 [n, height, width, 3], with 1 channel in mode "L", and int64 [n].
    Classes are numbered in the order of their names, and the images of a class in the order of their paths. So the
    numbers do not depend on the folder's location. The prefetching thread decodes the images of a batch. It decodes
    only the first frame of an image, and ignores transparency and orientation tags. Hidden files and files without the
    suffix of an image are left out.

    The constructor reads the header of every image. Damage after the header is detected when a batch needs the image.

    Args:
        folder: folder with one folder per class, which may have further folders in it.
        size: height and width to which all images are resized with Pillow's bilinear filter. It averages when it
            shrinks an image, unlike `shoal.data.augment.resize`.
        mode: "RGB" or "L" (grey), to which images are converted.
        crop: whether to crop an image at its center to the aspect ratio of `size`. False means that it is stretched.
        max_pixels: largest number of pixels of an image in its file. A larger one counts as unreadable and is not
            decoded. Pillow's own limit, `Image.MAX_IMAGE_PIXELS`, also applies.
        skip_unreadable: whether a batch replaces an unreadable image and its label by those of another image of the
            batch: the last readable one before it. If there is none before it, the first readable image of the batch is
            used. False means that unreadable images are an error. Files that cannot be opened and disk failures are
            always errors.
        prefetch: number of batches to read ahead. 0 means that each batch is read at its step.

    Attributes:
        classes: names of the classes, by label.

    Raises:
        InvalidData: the folder is missing, has no classes or a class without images; an argument is invalid; or,
            without `skip_unreadable`, an image cannot be read. Reading a batch raises it if none of its images can be
            read.
        ImportError: Pillow is not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        size: tuple[int, int],
        mode: Literal["RGB", "L"] = "RGB",
        crop: bool = False,
        max_pixels: int = 50_000_000,
        skip_unreadable: bool = False,
        prefetch: int = DEFAULT_PREFETCH,
    ) -> None:
        check_type("folder", folder, (str, os.PathLike), "a folder, such as 'data/train'")
        check_number("prefetch", prefetch, least=0)
        check_number("max_pixels", max_pixels, least=1)
        for name, number in zip(("the height in size", "the width in size"), size, strict=True):
            check_number(name, number, least=1)
        if mode not in {"RGB", "L"}:
            raise errors.InvalidData(f"mode is {mode!r}; give 'RGB' or 'L'")
        self._image = load("PIL.Image", "shoal.data.ImageFolder", extra="images")
        self._operations = load("PIL.ImageOps", "shoal.data.ImageFolder", extra="images")
        self._folder, self._size, self._mode, self._crop = str(Path(folder)), size, mode, crop
        self._max_pixels, self._skip = max_pixels, skip_unreadable
        self.prefetch = prefetch
        self.classes, self._paths, self._labels = _listed(Path(folder))
        self._unreadable: dict[str, str] = {}  # path to reason; grows, at most to all images
        for path in self._paths:
            self._read(path, whole=False)
        self._refuse()

    @property
    def unreadable(self) -> Mapping[str, str]:
        """The reasons why images could not be read, by path, as far as known from headers and earlier batches."""
        return MappingProxyType(self._unreadable)

    def __len__(self) -> int:
        return len(self._paths)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        channels = 1 if self._mode == "L" else 3
        images = np.empty((len(indices), *self._size, channels), np.uint8)
        readable = np.zeros(len(indices), bool)
        for place, number in enumerate(indices):
            if (image := self._read(self._paths[number], whole=True)) is not None:
                images[place] = image.reshape(images.shape[1:])
                readable[place] = True
        labels = self._labels[indices]
        if not readable.all():
            self._refuse(none_left=not readable.any())
            places = np.maximum.accumulate(np.where(readable, np.arange(len(indices)), 0))
            places[: readable.argmax()] = readable.argmax()
            images, labels = images[places], labels[places]
        return images, labels

    def _read(self, path: str, *, whole: bool) -> np.ndarray | None:
        """Returns an image, or None if it is unreadable or `whole` is False, which checks its header only."""
        with errors_naming(path), open(path, "rb") as file:
            try:
                return self._decoded(file) if whole else self._checked(file) and None
            except OSError as error:
                if error.errno is not None:  # the disk has failed, not the image
                    raise
                problem: Exception = error
            except MemoryError:
                raise
            except Exception as error:  # decoders raise many kinds of exceptions for damaged images
                problem = error
        reason = " ".join(str(problem).replace(repr(file), "the file").split())
        self._unreadable[path] = reason or type(problem).__name__
        return None

    def _checked(self, file: IO[bytes]) -> Any:
        """Opens an image and reads its header only."""
        image = self._image.open(file, formats=_FORMATS)
        pixels = image.width * image.height
        if pixels > self._max_pixels:
            raise ValueError(
                f"{image.width} x {image.height} are {pixels:,} pixels, but max_pixels is {self._max_pixels:,}"
            )
        return image

    def _decoded(self, file: IO[bytes]) -> np.ndarray:
        with self._checked(file) as image:
            size, bilinear = self._size[::-1], self._image.Resampling.BILINEAR
            plain = image.convert(self._mode)
            sized = self._operations.fit(plain, size, bilinear) if self._crop else plain.resize(size, bilinear)
            return np.asarray(sized)

    def _refuse(self, *, none_left: bool = False) -> None:
        """Raises InvalidData if images are unreadable and may not be skipped, or none is left."""
        bad = self._unreadable
        if not bad or (self._skip and not none_left and len(bad) < len(self)):
            return
        first = sorted(bad)[:_MOST_NAMED]
        reasons = "; ".join(f"{path} ({bad[path]})" for path in first) + ("; ..." if len(bad) > len(first) else "")
        advice = "repair or remove them" + ("" if self._skip else ", or skip them with skip_unreadable=True")
        raise errors.InvalidData(
            f"{len(bad):,} of {len(self):,} images in {self._folder} cannot be read: {reasons}; {advice}"
        )


def _listed(folder: Path) -> tuple[tuple[str, ...], list[str], np.ndarray]:
    """Returns the classes, the paths of all images, and their labels."""
    with errors_naming(str(folder)):
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not _hidden(entry.name))
    if not names:
        raise errors.InvalidData(f"{folder} contains no folders; create one for each class, with its images")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        root = folder / name
        inside = [path.relative_to(root) for path in root.rglob("*") if path.suffix.lower() in _SUFFIXES]
        images = sorted(path.as_posix() for path in inside if not any(map(_hidden, path.parts)))
        images = [image for image in images if (root / image).is_file()]
        if not images:
            raise errors.InvalidData(
                f"{root} contains no images ({', '.join(_SUFFIXES)}); add images, or remove the folder"
            )
        paths += [str(root / image) for image in images]
        labels += [label] * len(images)
    return tuple(names), paths, np.array(labels, np.int64)


def _hidden(name: str) -> bool:
    return name.startswith((".", "_"))


__all__ = ["ImageFolder"]
