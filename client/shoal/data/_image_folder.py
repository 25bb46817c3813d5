"""Images in folders, a class each, decoded by Pillow when they are wanted."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal

import numpy as np

from shoal import errors
from shoal._system import load
from shoal.data._block_reader import check_number
from shoal.data._files import errors_naming
from shoal.program import DEFAULT_PREFETCH

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# What is in a file may differ from its name. Formats that are programs (EPS), or that others read, are not tried.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_TOLD = 10  # unreadable images that a message names


class ImageFolder:
    """Images in a folder for each class, named by the folder.

        dataset = ImageFolder("flowers/train", size=(224, 224))  # flowers/train/rose/0001.jpg, ...

    A batch is the tuple (images, labels): uint8 [n, height, width, 3], or 1 with mode "L", and int64 [n]. Classes are
    numbered by name, and images within them by path, so numbers mean the same wherever the folder is. Each image is
    decoded when a batch wants it, in the thread that reads ahead; of several frames the first. Its transparency and its
    orientation tag are not looked at. Hidden files, and those whose names do not end as those of images, do not count.

    The header of every image is read when the data set is made; damage behind it shows when the image is wanted.

    Args:
        folder: with a folder for each class; images may lie in folders in these, too.
        size: height and width that all images are resized to, by Pillow's bilinear filter, which averages where it
            shrinks. `shoal.data.augment.resize` does not.
        mode: "RGB" or "L" (grey), which images are converted to.
        crop: an image is cut to the shape of `size` about its centre before; False: it is stretched.
        max_pixels: of an image as it is in its file; one with more counts as unreadable, and is not decoded. Pillow's
            own `Image.MAX_IMAGE_PIXELS` holds, too.
        skip_unreadable: the place of an unreadable image in its batch is taken by the readable one before it, or after
            it if there is none, image and label; False: the first unreadable one is an error that counts and names all
            that are known. Files that cannot be opened, or a disk that fails, are errors in any case.
        prefetch: batches to read ahead; 0: each is read at its step.

    Attributes:
        classes: their names, by label.

    Raises:
        InvalidData: the folder is not there, has no classes or a class without images, or an argument makes no sense;
            unless `skip_unreadable`, an image cannot be read. From a batch: none of its images can be read.
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
        """Why images could not be read, by path: those known so far, by their headers or since they were wanted."""
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
        """An image, or None where only its header was asked for, or it is unreadable."""
        with errors_naming(path), open(path, "rb") as file:
            try:
                return self._decoded(file) if whole else self._checked(file) and None
            except OSError as error:
                if error.errno is not None:  # of the disk, which says nothing about the image
                    raise
                problem: Exception = error
            except MemoryError:
                raise
            except Exception as error:  # decoders raise whatever their bytes lead them to
                problem = error
        reason = " ".join(str(problem).replace(repr(file), "the file").split())
        self._unreadable[path] = reason or type(problem).__name__
        return None

    def _checked(self, file: IO[bytes]) -> Any:
        """The image with its header read, and nothing else."""
        image = self._image.open(file, formats=_FORMATS)
        pixels = image.width * image.height
        if pixels > self._max_pixels:
            raise ValueError(
                f"{image.width} x {image.height} are {pixels:,} pixels, and max_pixels is {self._max_pixels:,}"
            )
        return image

    def _decoded(self, file: IO[bytes]) -> np.ndarray:
        with self._checked(file) as image:
            size, bilinear = self._size[::-1], self._image.Resampling.BILINEAR
            plain = image.convert(self._mode)
            sized = self._operations.fit(plain, size, bilinear) if self._crop else plain.resize(size, bilinear)
            return np.asarray(sized)

    def _refuse(self, *, none_left: bool = False) -> None:
        """Raises if images are unreadable, and that is not allowed or too much."""
        bad = self._unreadable
        if not bad or (self._skip and not none_left and len(bad) < len(self)):
            return
        first = sorted(bad)[:_TOLD]
        told = "; ".join(f"{path} ({bad[path]})" for path in first) + ("; ..." if len(bad) > len(first) else "")
        advice = "mend or remove them" + ("" if self._skip else ", or pass them by with skip_unreadable=True")
        raise errors.InvalidData(
            f"{len(bad):,} of {len(self):,} images in {self._folder} cannot be read: {told}; {advice}"
        )


def _listed(folder: Path) -> tuple[tuple[str, ...], list[str], np.ndarray]:
    """Classes, the paths of all images, and their labels."""
    with errors_naming(str(folder)):
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not _hidden(entry.name))
    if not names:
        raise errors.InvalidData(f"{folder} has no folders in it; make one for each class, with its images")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        root = folder / name
        inside = [path.relative_to(root) for path in root.rglob("*") if path.suffix.lower() in _SUFFIXES]
        images = sorted(path.as_posix() for path in inside if not any(map(_hidden, path.parts)))
        images = [image for image in images if (root / image).is_file()]
        if not images:
            raise errors.InvalidData(
                f"{root} has no images in it ({', '.join(_SUFFIXES)}); put some there, or remove the folder"
            )
        paths += [str(root / image) for image in images]
        labels += [label] * len(images)
    return tuple(names), paths, np.array(labels, np.int64)


def _hidden(name: str) -> bool:
    return name.startswith((".", "_"))


__all__ = ["ImageFolder"]
