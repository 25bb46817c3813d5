"""Data sets derived from another one: with changed images, or with some of its samples."""

import itertools
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import errors
from shoal._wire import DataRange, Lease, NoRange
from shoal.data import Arrays, Augmented, Seekable, Subset, split
from shoal.data.augment import Augmentation, Crop, Flip, Normalize, ToFloat
from shoal.program import BlockDataset, RandomDataset
from shoal_nn._mapped import Mapped
from shoal_worker.batch_seeds import epoch_seed
from shoal_worker.batches import LeasedBatches, prefetch_of

IMAGES = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 3), np.uint8)
NUMBERS = np.arange(40)
CHANGE = Augmentation(Flip(), Crop(padding=2), ToFloat())
PLAIN = Augmentation(ToFloat(), Normalize(0.5, 0.25))

Pair = namedtuple("Pair", "image label")


class Stored:
    """Images read in sequence."""

    def __len__(self) -> int:
        return len(IMAGES)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return IMAGES[start:stop], NUMBERS[start:stop]


def plain(prefetch: int = 0) -> Arrays:
    return Arrays((IMAGES, NUMBERS), prefetch=prefetch)


def in_blocks(prefetch: int = 0) -> Seekable:
    return Seekable(Stored(), block=7, window=2, prefetch=prefetch)


def trained_on(
    dataset: Any, ranges: Sequence[Lease], *, batch_size: int = 4, job_seed: int = 3
) -> dict[tuple[int, int], np.ndarray]:
    """What a program gets, by epoch and sample."""
    answers: list[Lease | NoRange] = [*ranges, NoRange.FINISHED]
    batches = LeasedBatches(dataset, batch_size, job_seed, lambda _done: answers.pop(0))
    seen: dict[tuple[int, int], np.ndarray] = {}
    while batches.lease() is not NoRange.FINISHED:
        while batches.has_next:
            batch = batches.take()
            images, numbers = batch.data
            assert batch.place
            seen.update({(batch.place[0], int(number)): image for image, number in zip(images, numbers, strict=True)})
    batches.close()
    return seen


def epoch(number: int, *cuts: int) -> list[Lease]:
    ends = [0, *cuts, 40]
    return [Lease(1, DataRange(number, start, stop)) for start, stop in itertools.pairwise(ends)]


@pytest.mark.parametrize("make", [plain, in_blocks])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_augmentation_depends_only_on_the_epoch_seed_and_the_sample_number(
    make: Callable[..., Any], prefetch: int
) -> None:
    dataset = Augmented(make(prefetch), CHANGE)
    assert isinstance(dataset, RandomDataset)
    assert isinstance(dataset, shoal.Dataset)
    assert isinstance(dataset, BlockDataset) is (make is in_blocks)
    seen = trained_on(dataset, epoch(0) + epoch(1))
    assert len(seen) == 80
    for number in (0, 1):
        seed = epoch_seed(3, number)
        expected = CHANGE(IMAGES, seed=seed, samples=NUMBERS)
        np.testing.assert_array_equal([seen[number, sample] for sample in range(40)], expected)
    for sample, image in trained_on(dataset, epoch(1, 6, 19), batch_size=5).items():
        np.testing.assert_array_equal(image, seen[sample])
    same = sum(np.array_equal(seen[0, sample], seen[1, sample]) for sample in range(40))
    assert same < 8, "of 50 ways to change an image, another epoch should take other ones"


def test_the_seeds_of_epochs_are_of_the_job_and_the_epoch() -> None:
    seeds = [epoch_seed(job, number) for job in (0, 1) for number in range(50)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert epoch_seed(7, 2) == 4956822115422362293, "a job that goes on from a checkpoint of an earlier release"


def test_a_data_set_of_your_own_gets_the_seed_if_it_takes_one() -> None:
    class Noisy:
        def __init__(self) -> None:
            self.seeds: list[int] = []

        def __len__(self) -> int:
            return 40

        def batch(self, indices: np.ndarray, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
            self.seeds.append(seed)
            return indices, indices

    class NoisyBlocks(Noisy):
        blocks = shoal.program.Blocks([0, 20, 40])

        def batches(self, plan: Iterator[Any], *, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            self.seeds.append(seed)
            for numbers in plan:
                yield numbers, numbers

    for dataset, times in ((Noisy(), 10), (NoisyBlocks(), 1)):
        assert isinstance(dataset, RandomDataset)
        trained_on(dataset, epoch(5))
        assert dataset.seeds == [epoch_seed(3, 5)] * times
    inner = Noisy()
    Subset(inner, slice(10)).batch(np.arange(3), seed=8)
    assert inner.seeds == [8]


def test_images_are_changed_in_the_thread_that_reads_ahead() -> None:
    class RecordingTransform:
        draws = 1

        def __init__(self) -> None:
            self.threads: set[str] = set()

        def apply(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:
            self.threads.add(threading.current_thread().name)
            return images

    for make in (plain, in_blocks):
        step = RecordingTransform()
        trained_on(Augmented(make(2), Augmentation(step)), epoch(0))
        assert step.threads == {"read-ahead"}


def test_steps_that_draw_nothing_need_no_seed() -> None:
    images, numbers = Augmented(plain(), PLAIN).batch(np.array([3, 1]))
    np.testing.assert_array_equal(images, PLAIN(IMAGES[[3, 1]], seed=0))
    assert numbers.tolist() == [3, 1]
    blocks = list(Augmented(in_blocks(), PLAIN).batches([np.array([3, 1]), np.array([9])]))
    np.testing.assert_array_equal(blocks[0][0], images)
    assert len(blocks) == 2


def test_steps_that_draw_need_one() -> None:
    with pytest.raises(
        errors.ProgramError, match=r"without a seed.*leave out random transforms.*batch\(indices, seed=\.\.\.\)"
    ):
        Augmented(plain(), CHANGE).batch(np.array([3, 1]))
    with pytest.raises(errors.ProgramError, match="without a seed"):
        next(Augmented(in_blocks(), CHANGE).batches([np.array([3, 1])]))


@pytest.mark.parametrize(
    ("arrays", "images"),
    [
        ((NUMBERS, IMAGES), 1),
        ([NUMBERS, IMAGES], -1),
        ({"image": IMAGES, "label": NUMBERS}, "image"),
        (Pair(IMAGES, NUMBERS), 0),
    ],
    ids=["tuple", "list", "dict", "named"],
)
def test_only_the_named_images_are_changed(arrays: Any, images: int | str) -> None:
    dataset = Arrays(arrays)
    numbers = np.array([5, 2])
    before, after = dataset.batch(numbers), Augmented(dataset, CHANGE, images=images).batch(numbers, seed=1)
    assert type(after) is type(before)
    np.testing.assert_array_equal(after[images], CHANGE(IMAGES[[5, 2]], seed=1, samples=numbers))
    labels: Any = "label" if isinstance(images, str) else 1 - images % 2
    assert after[labels].tolist() == [5, 2]


def test_two_kinds_of_images_are_changed_alike() -> None:
    both = Arrays({"photo": IMAGES, "mask": IMAGES[..., :1]})
    flipped = Augmentation(Flip(), Crop(padding=2))
    batch = Augmented(Augmented(both, flipped, images="photo"), flipped, images="mask").batch(NUMBERS, seed=1)
    np.testing.assert_array_equal(batch["photo"][..., :1], batch["mask"])
    assert (batch["photo"] != IMAGES).any()


@pytest.mark.parametrize(
    ("arrays", "images", "said"),
    [
        (IMAGES, 0, "a batch of Arrays is a ndarray, but images=0; set images to"),
        ((IMAGES, NUMBERS), 2, "is a tuple, but images=2"),
        ((IMAGES, NUMBERS), "image", "is a tuple, but images='image'"),
        ({"x": IMAGES, "y": NUMBERS}, 0, "is a dict of 'x', 'y', but images=0"),
        (([IMAGES], NUMBERS), 0, "item 0 of a batch of Arrays is a list; images must be NumPy arrays"),
        ((NUMBERS, IMAGES), 0, r"images have the shape \(2,\)"),
    ],
)
def test_missing_images_are_refused(
    arrays: np.ndarray | tuple[np.ndarray | list[np.ndarray], np.ndarray] | Mapping[str, np.ndarray],
    images: int | str,
    said: str,
) -> None:
    with pytest.raises(errors.InvalidData, match=said):
        Augmented(Arrays(arrays), PLAIN, images=images).batch(np.arange(2))


def test_transform_in_place_of_an_augmentation_is_refused() -> None:
    flip: Any = Flip()
    with pytest.raises(errors.InvalidData, match=r"a Flip; give shoal.data.augment.Augmentation\(\.\.\.\)"):
        Augmented(plain(), flip)


def test_derived_data_set_keeps_the_prefetch() -> None:
    for made in (Augmented(plain(5), CHANGE), Subset(plain(5), [1]), Augmented(Subset(plain(5), [1]), CHANGE)):
        assert prefetch_of(made) == 5
    source: Any = Stored()
    assert prefetch_of(Subset(source, [1])) == 2


def test_closing_batches_closes_the_inner_generator() -> None:
    closed = []

    class Closing(Stored):
        blocks = shoal.program.Blocks([0, 40])

        def batches(self, plan: Iterator[Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            try:
                for numbers in plan:
                    yield IMAGES[numbers], numbers
            finally:
                closed.append(True)

    source: Any = Closing()
    reading: Any = Augmented(source, PLAIN).batches(iter([NUMBERS[:4], NUMBERS[4:]]))
    next(reading)
    reading.close()
    assert closed


# Some of the samples.


@pytest.mark.parametrize("samples", [slice(30, None, -10), [30, 20, 10, 0], np.array([30, 20, 10, 0], np.uint8)])
def test_a_subset_has_these_samples_in_this_order(samples: np.ndarray | slice | list[int]) -> None:
    subset = Subset(plain(), samples)
    images, numbers = subset.batch(np.array([3, 0, 1]))
    assert len(subset) == 4
    assert numbers.tolist() == [0, 30, 20]
    np.testing.assert_array_equal(images, IMAGES[[0, 30, 20]])


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([], "float64 of shape \\(0,\\); give a slice or a list of whole numbers, at least one"),
        (slice(5, 5), r"int64 of shape \(0,\)"),
        (NUMBERS > 3, "bool of shape"),
        ([[1]], r"of shape \(1, 1\)"),
        ([1.5], "float64 of shape"),
        ([0, 40], "samples are 0 to 40, but Arrays has those from 0 to 39"),
        ([-1], "samples are -1 to -1"),
    ],
)
def test_samples_outside_the_data_set_are_refused(
    samples: np.ndarray | slice | Sequence[float | list[int]], said: str
) -> None:
    with pytest.raises(errors.InvalidData, match=said):
        Subset(plain(), samples)


def test_subset_copies_its_numbers() -> None:
    samples = np.array([4, 5])
    subset = Subset(plain(), samples)
    samples[:] = 0
    assert subset.batch(np.arange(2))[1].tolist() == [4, 5]


def numbers_of(dataset: Subset) -> set[int]:
    return set(dataset.batch(np.arange(len(dataset)))[1].tolist())


def test_split_gives_two_disjoint_parts() -> None:
    training, held_out = split(plain(), 0.1)
    assert (len(training), len(held_out)) == (36, 4)
    assert numbers_of(training) | numbers_of(held_out) == set(range(40))
    assert numbers_of(split(plain(), 0.1)[1]) == numbers_of(held_out)
    assert numbers_of(split(plain(), 0.1, seed=1)[1]) != numbers_of(held_out)


REENTRANT = threading.RLock


class Locked:
    """A reentrant lock that lists the locks that are held."""

    def __init__(self, held: list["Locked"]) -> None:
        self.lock, self.held = REENTRANT(), held

    def __enter__(self) -> None:
        self.lock.acquire()
        self.held.append(self)

    def __exit__(self, *_: object) -> None:
        self.held.pop()
        self.lock.release()


class Watched:
    """A data set that records the locks under which it is read."""

    def __init__(self, held: list[Locked]) -> None:
        self.held, self.locks = held, list[set[Locked]]()

    def __len__(self) -> int:
        return 40

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.locks.append({*self.held})
        return IMAGES[indices], NUMBERS[indices]


def test_parts_of_one_data_set_are_not_read_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do parts of parts, which one thread reads at once, nor parts of what is made of it."""
    held: list[Locked] = []
    monkeypatch.setattr(threading, "RLock", lambda: Locked(held))
    whole, apart = Watched(held), Watched(held)
    training, held_out = split(whole, 0.1)
    part = Subset(Augmented(training, PLAIN), slice(10))
    for reader in (training, held_out, part, Subset(Mapped(whole, len), [0, 1]), split(apart, 0.1)[0]):
        reader.batch(np.arange(2))
    [lock] = whole.locks[0]
    assert whole.locks == [{lock}] * 4
    [other] = apart.locks
    assert len(other) == 1
    assert lock not in other


@pytest.mark.parametrize("share", [0, 1, 1.5, -0.1, 0.01, 0.99, float("nan")])
def test_a_split_with_nothing_on_one_side_is_refused(share: float) -> None:
    with pytest.raises(errors.InvalidData, match="of 40 samples leaves one part empty"):
        split(plain(), share)


def test_data_in_blocks_cannot_be_subset_or_split() -> None:
    for made in (in_blocks(), Augmented(in_blocks(), CHANGE)):
        said = f"{type(made).__name__} is read in blocks, .*into separate files"
        with pytest.raises(errors.InvalidData, match=f"Subset: {said}"):
            Subset(made, [1])
        with pytest.raises(errors.InvalidData, match=f"split: {said}"):
            split(made, 0.5)
