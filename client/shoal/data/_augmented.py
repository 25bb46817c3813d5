"""A data set whose images are changed as they are read. What is done to them is in `augment`."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from shoal import errors
from shoal.data._dataset_wrapper import DatasetWrapper
from shoal.data.augment import Augmentation
from shoal.program import Dataset, RandomDataset


class Augmented(DatasetWrapper):
    """Another data set, with its images changed: a `shoal.program.RandomDataset`.

        training, held_out = split(Cifar10("cifar-10-batches-bin"), 0.1)
        plain = Augmentation(ToFloat(), Normalise(0.47, 0.25))
        dataset = Augmented(training, Augmentation(Flip(), Crop(padding=4), plain))
        test = Augmented(held_out, plain)

    A sample is changed alike whoever reads it and in whichever batch it comes, and in another way in each epoch. As
    the worker reads ahead, the images are changed while the program computes. Data that a model is judged by should not
    change from one look to the next: steps that draw nothing need no seed, and `batch(indices)` does for them.

    Of one inside another, for two kinds of images in a batch, both draw the same numbers: with the same steps first, an
    image and its mask are flipped and cropped alike.

    Args:
        dataset: whose batches are tuples, lists or dicts. Read in blocks if it is.
        augmentation: what is done to the images, [n, height, width, channels].
        images: where in a batch they are: the place in a tuple, or the key of a dict.

    Attributes:
        dataset: as given.
        prefetch: of the data set.
        blocks: of the data set, if it has any.

    Raises:
        InvalidData: `augmentation` is none.
    """

    def __init__(self, dataset: Dataset | RandomDataset, augmentation: Augmentation, *, images: int | str = 0) -> None:
        if not isinstance(augmentation, Augmentation):
            raise errors.InvalidData(
                f"Augmented: augmentation is a {type(augmentation).__name__}; give shoal.data.augment.Augmentation(...)"
            )
        super().__init__(dataset)
        self._augmentation, self._images = augmentation, images

    def batch(self, indices: np.ndarray, *, seed: int | None = None) -> Any:
        """The samples with these numbers, their images changed.

        Raises:
            ProgramError: there is no seed, and a step draws.
            InvalidData: there are no images where they should be, or a step cannot do with them.
        """
        self._check(seed)
        return super().batch(indices, seed=seed)

    def batches(self, plan: Iterable[np.ndarray], *, seed: int | None = None) -> Iterator[Any]:
        """What `batch` gives, for each item of the plan. Of data sets in blocks alone."""
        self._check(seed)
        yield from super().batches(plan, seed=seed)

    def _check(self, seed: int | None) -> None:
        if seed is None and self._augmentation.draws:
            raise errors.ProgramError(
                "Augmented is read without a seed, and its augmentation draws random numbers; for data that a model is "
                "judged by, leave out Flip, Crop and their like; elsewhere, give batch(indices, seed=...), another one "
                "each epoch"
            )

    def _changed(self, batch: Any, numbers: np.ndarray, seed: int | None) -> Any:
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
            f"Augmented: a batch of {type(self.dataset).__name__} is {what}, and images={where!r}; "
            "say which item of a tuple or dict the images are"
        )

    def _augmented(self, images: Any, numbers: np.ndarray, seed: int | None) -> np.ndarray:
        if not isinstance(images, np.ndarray):
            raise errors.InvalidData(
                f"Augmented: item {self._images!r} of a batch of {type(self.dataset).__name__} is a "
                f"{type(images).__name__}; images are NumPy arrays"
            )
        return self._augmentation(images, seed=0 if seed is None else seed, samples=numbers)


__all__ = ["Augmented"]
