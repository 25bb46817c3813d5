"""The data set that transforms the images of another one. `augment` has the transforms."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from shoal import errors
from shoal.data._dataset_wrapper import DatasetWrapper
from shoal.data.augment import Augmentation
from shoal.program import Dataset, RandomDataset


class Augmented(DatasetWrapper):
    """Another data set with transformed images: a `shoal.program.RandomDataset`.

        training, held_out = split(Cifar10("cifar-10-batches-bin"), 0.1)
        plain = Augmentation(ToFloat(), Normalize(0.47, 0.25))
        dataset = Augmented(training, Augmentation(Flip(), Crop(padding=4), plain))
        test = Augmented(held_out, plain)

    A sample is transformed in the same way on every worker and in every batch, and differently in each epoch. With
    prefetching, the images are transformed while the program computes. Use transforms without random numbers for
    held-out samples, so that all evaluations see the same images. Such transforms need no seed: call `batch(indices)`.

    If a batch has two kinds of images, such as images and masks, wrap one `Augmented` in another. Both draw the same
    random numbers. If their first transforms are the same, an image and its mask are flipped and cropped alike.

    Args:
        dataset: a data set whose batches are tuples, lists or dicts. It may have blocks.
        augmentation: the transforms of the images [n, height, width, channels].
        images: place of the images in the tuple or list, or their key in the dict.

    Attributes:
        dataset: the data set.
        prefetch: number of batches to read ahead, the same as for the data set.
        blocks: blocks of the data set, if it has blocks.

    Raises:
        InvalidData: `augmentation` is not an `Augmentation`.
    """

    def __init__(self, dataset: Dataset | RandomDataset, augmentation: Augmentation, *, images: int | str = 0) -> None:
        if not isinstance(augmentation, Augmentation):
            raise errors.InvalidData(
                f"Augmented: augmentation is a {type(augmentation).__name__}; give shoal.data.augment.Augmentation(...)"
            )
        super().__init__(dataset)
        self._augmentation, self._images = augmentation, images

    def batch(self, indices: np.ndarray, *, seed: int | None = None) -> Any:
        """Returns a batch with transformed images.

        Args:
            indices: numbers of the samples, int64 [n].
            seed: seed of the epoch. None is allowed if no transform draws random numbers.

        Raises:
            ProgramError: `seed` is None, but a transform draws random numbers.
            InvalidData: the batch has no images at the given place, or a transform does not accept them.
        """
        self._check(seed)
        return super().batch(indices, seed=seed)

    def batches(self, plan: Iterable[np.ndarray], *, seed: int | None = None) -> Iterator[Any]:
        """Yields what `batch` returns for each item of the plan. Only for data sets with blocks.

        Args:
            plan: numbers of the samples of each batch, int64 [n].
            seed: see `batch`.
        """
        self._check(seed)
        yield from super().batches(plan, seed=seed)

    def _check(self, seed: int | None) -> None:
        if seed is None and self._augmentation.draws:
            raise errors.ProgramError(
                "Augmented is read without a seed, but its augmentation draws random numbers; for held-out samples, "
                "leave out random transforms such as Flip and Crop; for training, give batch(indices, seed=...) a new "
                "seed in each epoch"
            )

    def _transform(self, batch: Any, numbers: np.ndarray, seed: int | None) -> Any:
        where = self._images
        match batch:
            case dict() if where in batch:
                return {**batch, where: self._augmented(batch[where], numbers, seed)}
            case tuple() | list() if isinstance(where, int) and -len(batch) <= where < len(batch):
                items = list(batch)
                items[where] = self._augmented(items[where], numbers, seed)
                named = type(batch) is not tuple and isinstance(batch, tuple)
                return type(batch)(*items) if named else type(batch)(items)
        what = f"a dict of {', '.join(map(repr, batch))}" if isinstance(batch, dict) else f"a {type(batch).__name__}"
        raise errors.InvalidData(
            f"Augmented: a batch of {type(self.dataset).__name__} is {what}, but images={where!r}; "
            "set images to the place in a tuple or the key of a dict"
        )

    def _augmented(self, images: Any, numbers: np.ndarray, seed: int | None) -> np.ndarray:
        if not isinstance(images, np.ndarray):
            raise errors.InvalidData(
                f"Augmented: item {self._images!r} of a batch of {type(self.dataset).__name__} is a "
                f"{type(images).__name__}; images must be NumPy arrays"
            )
        return self._augmentation(images, seed=0 if seed is None else seed, samples=numbers)


__all__ = ["Augmented"]
