"""The seeds of what programs draw at random: the same for the same work, whoever does it, and however often."""

import inspect

import numpy as np

from shoal.program import Program
from shoal_worker.batches import Batch

# What the numbers behind it count: one stream of seeds is not another's.
_OF_DATA, _OF_STEPS = 0, 1


class Draws:
    """Gives each batch of a job a seed of its own.

    It depends on the job's seed and on which examples these are: epoch, and place in its order. So a batch that is
    trained on again, after a death or from a checkpoint, draws the same numbers, on whichever worker, of however many.
    Where a program makes its own batches, it depends on the step and the worker's rank.

    Args:
        seed: of the job.
        rank: of the worker.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank

    def seed(self, batch: Batch, step: int) -> int:
        """For one batch at one step, from [0, 2**63): what fits the generators of NumPy, CuPy, PyTorch and JAX."""
        which = (_OF_STEPS, step, self._rank) if batch.place is None else (_OF_DATA, *batch.place)
        # O'Neill's mixing, as NumPy has it: numbers that are close give seeds that have nothing to do with each other.
        return int(np.random.SeedSequence((self._seed, *which)).generate_state(1, np.uint64)[0] >> 1)


def wants_seed(program: Program) -> bool:
    """Whether it takes a `seed`, as a `shoal.program.RandomProgram` does."""
    try:
        parameters = inspect.signature(program.loss_and_gradients).parameters.values()
    except (TypeError, ValueError):  # some callables say nothing of theirs
        return False
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(parameter.name == "seed" and parameter.kind in by_name for parameter in parameters)


__all__ = ["Draws", "wants_seed"]
