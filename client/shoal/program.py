"""Programs and data sets: the protocols between a user's model and the worker that trains it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from shoal import errors
from shoal.variables import Variable

Array = Any
"""An array of the worker's device: `numpy.ndarray` on a CPU, `cupy.ndarray` on a GPU."""

DEFAULT_PREFETCH = 2
"""The number of batches that are read ahead of their step, unless the data set has another number."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of one batch, for programs that return more than (loss, gradients).

    Attributes:
        loss: mean loss of the batch: a number, or an array of one element.
        gradients: gradient of the mean loss for each trainable variable, by name, in the variable's shape and dtype. It
            can also be an iterable of (name, array) pairs in any order, such as a generator: the worker then pushes the
            first arrays while the program computes the next ones. Do not change these arrays before the worker requests
            the next step's gradients. The worker reads `loss`, `updates` and `metrics` before the gradients.
        updates: values for non-trainable variables, by name: the new value (aggregation "mean" or "last") or the
            increment ("sum"). If you give one variable of an aggregation, give all variables of that aggregation. A
            variable without an update keeps its value, and nothing is sent for it.
        metrics: further metrics of the batch, as numbers or arrays of one element: {"accuracy": 0.93}.
    """

    loss: Any
    gradients: Mapping[str, Array] | Iterable[tuple[str, Array]]
    updates: Mapping[str, Array] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class AggregateMetric(Protocol):
    """A metric of a set of samples that is not the mean over its batches, such as the area under a curve."""

    def merged_with(self, other: Self) -> Self:
        """Returns the metric of both sets together. The two sets have no sample in common."""
        ...

    def value(self) -> float:
        """Returns the value of the metric."""
        ...


@runtime_checkable
class Dataset(Protocol):
    """The samples of one epoch, by number. Every worker of a job has the same data set.

    The worker prefetches batches in a separate thread while the program computes. It reads from one thread at a time.
    The attribute `prefetch` is the number of batches to read ahead; the default is 2. If the data set and
    `loss_and_gradients` both use an object that one of them changes, set `prefetch = 0`: each batch is then read at its
    step, in the thread of the loop. The batches are the same in all cases.

    Held-out samples (`EvaluatedProgram`) are also read in a separate thread, possibly at the same time as the training
    samples. If both belong to one object, that object needs its own lock. The parts of `shoal.data.split` and
    `shoal.data.Subset` share a lock.
    """

    def __len__(self) -> int:
        """Returns the number of samples in one epoch. With 0, each worker takes `max_steps` steps without batches."""
        ...

    def batch(self, indices: np.ndarray) -> Any:
        """Returns a batch with the samples of the given numbers.

        Args:
            indices: int64 [batch], each in [0, len), in random order.

        Returns:
            Any value. The worker copies its NumPy arrays, also inside tuples, lists and dicts, to the device.
        """
        ...


@runtime_checkable
class RandomDataset(Protocol):
    """A data set that draws random numbers when it reads, for example to flip images or to add noise.

    Each call receives the seed of the epoch. Derive the random numbers of a sample only from that seed and the sample's
    number: `numpy.random.default_rng([seed, number])`, or `shoal.data.augment.uniforms` for a whole batch. A sample is
    then the same on every worker and in every batch, and differs in the next epoch. A data set with blocks has
    `batches(plan, *, seed)`. `shoal.data.Augmented` is such a data set.
    """

    def __len__(self) -> int:
        """Returns the number of samples in one epoch; see `Dataset`."""
        ...

    def batch(self, indices: np.ndarray, *, seed: int) -> Any:
        """Returns a batch with the samples of the given numbers; see `Dataset`.

        Args:
            indices: int64 [batch], each in [0, len).
            seed: seed of the epoch, in [0, 2**63). It depends on the job's seed.
        """
        ...


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a data set: consecutive samples that it reads in one operation each.

    Reading single samples in random order is slow for sequential files. The order of an epoch is therefore drawn from
    the blocks: a permutation of the runs of blocks, then a permutation of the samples within each window of blocks. The
    order depends only on the seed, the epoch and the arguments below.

    Args:
        starts: int64 [blocks + 1], increasing from 0 to the number of samples. Block b has the samples from starts[b]
            up to, but not including, starts[b + 1].
        window: number of consecutive blocks in the epoch's order whose samples are shuffled together. A worker holds
            about three windows in memory. 0 means that the samples of a block keep their order.
        runs: int64 [runs + 1], increasing from 0 to the number of blocks. The blocks of a run stay in order, because
            they are cheaper to read that way (such as the parts of a Parquet row group). None means that each block is
            a run.

    Raises:
        ProgramError: an argument has the wrong shape or order, or `starts` and `runs` do not match.
    """

    starts: np.ndarray
    window: int
    runs: np.ndarray

    def __init__(self, starts: ArrayLike, window: int = 1, runs: ArrayLike | None = None) -> None:
        rising = _rising("starts", starts)
        object.__setattr__(self, "starts", rising)
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "runs", np.arange(len(rising)) if runs is None else _rising("runs", runs))
        self._check(window)

    def _check(self, window: object) -> None:
        if self.runs[-1] != len(self.starts) - 1:
            raise errors.ProgramError(
                f"runs end at block {self.runs[-1]}, but there are {len(self.starts) - 1} blocks; make them agree"
            )
        if isinstance(window, bool) or not isinstance(window, int) or window < 0:
            raise errors.ProgramError(f"window is {window!r}; it must be a number of blocks, 0 or more")

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def samples(self) -> int:
        """The number of samples in all blocks."""
        return int(self.starts[-1])


def _rising(name: str, numbers: ArrayLike) -> np.ndarray:
    array = np.asarray(numbers)
    if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) < 2 or array[0] or not (np.diff(array) > 0).all():
        raise errors.ProgramError(f"{name} of blocks must be two or more whole numbers that increase strictly from 0")
    return array.astype(np.int64)


@runtime_checkable
class BlockDataset(Dataset, Protocol):
    """A data set that is read in blocks, such as the data sets of `shoal.data` that read files."""

    @property
    def blocks(self) -> Blocks:
        """The blocks, which never change."""
        ...

    def batches(self, plan: Iterable[np.ndarray]) -> Iterator[Any]:
        """Yields what `batch` returns for each item of the plan, in its order.

        A range may end within a block; the other samples of that block then belong to another worker. If the result is
        a generator, the worker closes it when it needs no more batches.

        Args:
            plan: the batches of one leased range, each int64 [batch]. Iterate it on a single thread, which can be any
                thread.
        """
        ...


@runtime_checkable
class Program(Protocol):
    """What a job trains: variables, data, and a function that returns gradients.

    A job names a factory as `package.module:factory` and passes its settings as keyword arguments. The factory is a
    program class, or a function whose return annotation names a program class. Each worker imports the factory and
    calls it once. The worker runs the loop: it leases samples, pulls, computes, pushes and reports.

    Example:
        A linear model in `regression.py`. Submit it with `shoal submit regression:linear --set features=8`.

            import numpy as np

            class Samples:
                def __init__(self, features):
                    rng = np.random.default_rng(0)
                    self.x = rng.normal(size=(1000, features)).astype(np.float32)
                    self.y = self.x.sum(axis=1)

                def __len__(self):
                    return len(self.x)

                def batch(self, indices):
                    return self.x[indices], self.y[indices]

            class Linear:
                def __init__(self, features):
                    self.dataset = Samples(features)
                    self.features = features

                def variables(self):
                    return {"w": np.zeros(self.features, np.float32)}

                def loss_and_gradients(self, params, batch):
                    x, y = batch
                    error = x @ params["w"] - y
                    return (error**2).mean(), {"w": 2 * x.T @ error / len(y)}

            def linear(features: int) -> Linear:
                return Linear(features)

    `dataset` is an attribute, not a method: every read must return the same data set. Use a cached property to load it
    late. The attribute is required, so that a misspelt name is an error. A program that creates its own batches sets
    `dataset = None`.
    """

    @property
    def dataset(self) -> Dataset | RandomDataset | None:
        """The data set. With None, each worker takes `max_steps` steps, and the batch is None."""
        ...

    def variables(self) -> Mapping[str, Variable | np.ndarray]:
        """Returns the variables by name, the same on every worker. An array is a variable with given values."""
        ...

    def loss_and_gradients(
        self, params: Mapping[str, Array], batch: Any
    ) -> tuple[Any, Mapping[str, Array] | Iterable[tuple[str, Array]]] | StepOutput:
        """Returns the mean loss of a batch and its gradients.

        Args:
            params: all variables by name, on the worker's device. They are valid during this call; do not change them.
            batch: what `dataset.batch` returned, on the worker's device.

        Returns:
            The loss and the gradients, or a `StepOutput`, which describes both.
        """
        ...


@runtime_checkable
class RandomProgram(Protocol):
    """A program that draws random numbers, for example for dropout, noise or negative samples.

    Each batch comes with a seed. Create the random generator from it (`numpy.random.default_rng(seed)`,
    `jax.random.key(seed)`, `torch.Generator().manual_seed(seed)`), and do not keep a generator across batches. A job
    that restarts from a checkpoint then draws the same numbers as without the interruption.
    """

    @property
    def dataset(self) -> Dataset | RandomDataset | None:
        """The data set; see `Program`."""
        ...

    def variables(self) -> Mapping[str, Variable | np.ndarray]:
        """Returns the variables by name; see `Program`."""
        ...

    def loss_and_gradients(
        self, params: Mapping[str, Array], batch: Any, *, seed: int
    ) -> tuple[Any, Mapping[str, Array] | Iterable[tuple[str, Array]]] | StepOutput:
        """Returns the mean loss of a batch and its gradients; see `Program`.

        Args:
            params: all variables by name.
            batch: what `dataset.batch` returned.
            seed: seed of this batch, in [0, 2**63). It depends on the job's seed and the epoch, but not on the worker.
                Without a data set, it depends on the job's seed, the step and the worker's rank.

        Returns:
            The loss and the gradients, or a `StepOutput`.
        """
        ...


@runtime_checkable
class EvaluatedProgram(Protocol):
    """A program with held-out samples, on which the job evaluates it during training.

    `Job.evaluation` says when the job evaluates it. One worker evaluates all held-out samples in order, in batches of
    the job's batch size, with the variables that it has pulled for its step. Each worker also evaluates one batch
    before its first step and discards the result, so that errors show early.
    """

    @property
    def held_out(self) -> Dataset:
        """The held-out samples, at least one. Like `dataset`, it is an attribute."""
        ...

    def evaluate(self, params: Mapping[str, Array], batch: Any) -> Mapping[str, float | AggregateMetric]:
        """Returns the metrics of one batch by name, with the same names for all batches.

        Args:
            params: all variables by name; see `Program`.
            batch: what `held_out.batch` returned, on the worker's device.

        Returns:
            The mean over the batch for each metric, as a number or an array of one element, such as {"loss": 0.31}. The
            job computes the mean over all samples. If a metric is not such a mean, return an `AggregateMetric` of the
            batch. The job merges the aggregate metrics of all batches.
        """
        ...


__all__ = [
    "DEFAULT_PREFETCH",
    "AggregateMetric",
    "Array",
    "BlockDataset",
    "Blocks",
    "Dataset",
    "EvaluatedProgram",
    "Program",
    "RandomDataset",
    "RandomProgram",
    "StepOutput",
]
