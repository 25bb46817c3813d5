"""Seeds of a job's batches and epochs. They depend on the samples, not on the worker that trains on them."""

import numpy as np

# The kind of the numbers that follow, so that the streams of seeds differ.
_OF_DATA, _OF_STEPS, _OF_EPOCHS = 0, 1, 2


class BatchSeeds:
    """Seeds of a job's batches, one for each.

    A seed depends on the job's seed and on the batch's samples: their epoch and their place in its order. A batch that
    is trained on again, after a crash or a restore, gets the same seed, on any worker and with any number of workers.
    If the program makes its own batches, a seed depends on the step and on the worker's rank.

    Args:
        seed: the job's seed.
        rank: the worker's rank.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank

    def seed(self, place: tuple[int, int] | None, step: int) -> int:
        """Returns the seed, in [0, 2**63), of the batch at this place (see `Batch`) and step."""
        which = (_OF_STEPS, step, self._rank) if place is None else (_OF_DATA, *place)
        return _mixed(self._seed, *which)


def epoch_seed(seed: int, epoch: int) -> int:
    """Returns the seed, in [0, 2**63), that a random data set gets with all batches of an epoch.

    Args:
        seed: the job's seed.
        epoch: 0 or more.
    """
    return _mixed(seed, _OF_EPOCHS, epoch)


def _mixed(*numbers: int) -> int:
    """Returns a seed that the generators of NumPy, CuPy, PyTorch and JAX accept."""
    # O'Neill's mixing, as implemented in NumPy: similar numbers give unrelated seeds.
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


__all__ = ["BatchSeeds", "epoch_seed"]
