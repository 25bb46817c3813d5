"""The seeds of what is drawn at random: the same for the same work, whoever does it, and however often."""

import numpy as np

# What the numbers behind it count: one stream of seeds is not another's.
_OF_DATA, _OF_STEPS, _OF_EPOCHS = 0, 1, 2


class BatchSeeds:
    """Gives each batch of a job a seed of its own.

    It depends on the job's seed and on which samples these are: epoch, and place in its order. So a batch that is
    trained on again, after a death or from a checkpoint, draws the same numbers, on whichever worker, of however many.
    Where a program makes its own batches, it depends on the step and the worker's rank.

    Args:
        seed: of the job.
        rank: of the worker.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank

    def seed(self, place: tuple[int, int] | None, step: int) -> int:
        """For the batch at this place (see `Batch`) and step, from [0, 2**63)."""
        which = (_OF_STEPS, step, self._rank) if place is None else (_OF_DATA, *place)
        return _mixed(self._seed, *which)


def epoch_seed(seed: int, epoch: int) -> int:
    """What a data set that draws is given with all batches of an epoch, from [0, 2**63).

    Args:
        seed: of the job.
        epoch: 0 or more.
    """
    return _mixed(seed, _OF_EPOCHS, epoch)


def _mixed(*numbers: int) -> int:
    """One that fits the generators of NumPy, CuPy, PyTorch and JAX."""
    # O'Neill's mixing, as NumPy has it: numbers that are close give seeds that have nothing to do with each other.
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


__all__ = ["BatchSeeds", "epoch_seed"]
