"""What a job's program is: the contract between a user's model and the worker that trains it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from shoal import errors
from shoal.variables import Variable

# An array of the worker's device: numpy.ndarray on a CPU, cupy.ndarray on a GPU.
Array = Any

# Batches that are read before their step, where a data set does not say otherwise.
DEFAULT_PREFETCH = 2


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one batch gives, for programs that have more to say than (loss, gradients).

    Attributes:
        loss: the batch's mean loss, a number or an array of one element.
        gradients: of every trainable variable, by name, of the variable's shape and dtype: the gradient of the mean
            loss over the batch. Or pairs of name and array one after the other, such as a generator gives them, in
            whatever order: then the first are pushed while the next are computed. These must not be changed before the
            next step's gradients are asked for; `loss`, `updates` and `metrics` are read before them.
        updates: of non-trainable variables, by name: the new value (aggregation MEAN or LAST) or the increment (SUM).
            Of the variables of an aggregation either every one or none; those that nothing is given of stay as they
            are, and nothing travels for them.
        metrics: further figures of the batch, of the same kind, shown beside the loss: {"accuracy": 0.93}.
    """

    loss: Any
    gradients: Mapping[str, Array] | Iterable[tuple[str, Array]]
    updates: Mapping[str, Array] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class AggregateMetric(Protocol):
    """A figure of a whole set that is not the mean of its batches' figures."""

    def joined(self, other: Self) -> Self:
        """That of both sets together, which have no sample in common."""
        ...

    def value(self) -> float:
        """The figure."""
        ...


@runtime_checkable
class Dataset(Protocol):
    """The samples of one pass, by number. Every worker of a job has the same data set.

    Batches are read a little ahead of their step, in a thread of their own, while the program computes; from one thread
    at a time. A data set that must not be called then, since it shares more than constants with `loss_and_gradients`,
    has an attribute `prefetch = 0`: each batch is read at its step, in the loop's thread. Another whole number is how
    many batches to read ahead; without the attribute there are 2. What comes is the same.

    Held-out samples (`EvaluatedProgram`) are read in a thread of their own, too, perhaps at the same time as those to
    train on. Where both are parts of one object, made by hand, that object needs a lock of its own; those of
    `shoal.data.split` and `shoal.data.Subset` have one together.
    """

    def __len__(self) -> int:
        """Samples in one pass. 0: none, and the job is stepped `max_steps` times with no batch."""
        ...

    def batch(self, indices: np.ndarray) -> Any:
        """The samples with these numbers (int64, each in [0, len), in random order), joined to a batch.

        NumPy arrays in what it returns, also inside tuples, lists and dicts, are brought to the worker's device.
        """
        ...


@runtime_checkable
class RandomDataset(Protocol):
    """A data set that draws random numbers as it reads: images that are flipped, samples with noise.

    Each call comes with the seed of the epoch. What a sample is changed to follows from that seed and its number
    alone (`numpy.random.default_rng([seed, number])`, or `shoal.data.augment.uniforms` for a whole batch): then it is
    the same on whichever worker and in whichever batch it is read, and another in the next epoch. One that is read in
    blocks likewise has `batches(plan, *, seed)`. `shoal.data.Augmented` is one.
    """

    def __len__(self) -> int:
        """As of `Dataset`."""
        ...

    def batch(self, indices: np.ndarray, *, seed: int) -> Any:
        """As of `Dataset`.

        Args:
            indices: numbers of samples.
            seed: from [0, 2**63), of the epoch; it follows from the job's seed.
        """
        ...


@dataclass(frozen=True, eq=False)
class Blocks:
    """How a data set is best read: in blocks of samples, each in one go.

    A permutation of single samples would ask files that are read in sequence for one random sample after the other.
    Of a data set with blocks the order of an epoch is drawn from them instead: a permutation of the runs of blocks,
    then one of the samples of each window of blocks. It depends on the seed, the epoch and what is below, and on
    nothing else.

    Args:
        starts: int64 [blocks + 1], rising from 0 to the number of samples: block b is the samples from starts[b] up
            to starts[b + 1].
        window: blocks, one after the other in the epoch's order, whose samples are shuffled together; a worker holds
            about three times as many in memory. 0: the samples of a block stay in their order.
        runs: int64 [runs + 1], rising from 0 to the number of blocks: the blocks of a run stay one after the other,
            since they are cheaper to read so (parts of a Parquet row group). None: each block is a run of its own.

    Raises:
        ProgramError: these are not the shapes, orders and ends that they have to be.
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
                f"runs end at block {self.runs[-1]}, and there are {len(self.starts) - 1} blocks; make them agree"
            )
        if isinstance(window, bool) or not isinstance(window, int) or window < 0:
            raise errors.ProgramError(f"window is {window!r}; give a number of blocks, 0 or more")

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def samples(self) -> int:
        """Samples in all blocks."""
        return int(self.starts[-1])


def _rising(name: str, numbers: ArrayLike) -> np.ndarray:
    array = np.asarray(numbers)
    if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) < 2 or array[0] or not (np.diff(array) > 0).all():
        raise errors.ProgramError(f"{name} of blocks must be whole numbers that rise from 0: two at least, none twice")
    return array.astype(np.int64)


@runtime_checkable
class BlockDataset(Dataset, Protocol):
    """A data set that is read in blocks; those of `shoal.data` that read files are."""

    @property
    def blocks(self) -> Blocks:
        """Always the same."""
        ...

    def batches(self, plan: Iterable[np.ndarray]) -> Iterator[Any]:
        """What `batch` gives, for each item of the plan, in its order.

        The plan is one leased range, in batches. Ranges may end within a block, and then its other samples are another
        worker's. A generator is closed when no more is wanted. The plan may be iterated on any one thread.
        """
        ...


@runtime_checkable
class Program(Protocol):
    """What the factory of a job returns: variables, data, and a function that gives gradients.

    A job names the factory as `package.module:factory` and gives its keyword arguments as settings. Each worker
    imports it, calls it once, and owns the loop: it leases samples, pulls, computes, pushes and reports.

    Sample:
        A linear model, in `regression.py`; submit it with `shoal submit regression:linear --set features=8`.

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

            def linear(features: int):
                return Linear(features)

    `dataset` is an attribute, not a method: a program has one data set for its life, and whoever reads it twice gets
    the same one (make it a cached property to load it late). It must be there, so that a misspelt name does not
    train on nothing: a program that makes its own batches says `dataset = None`.
    """

    @property
    def dataset(self) -> Dataset | RandomDataset | None:
        """The samples, or None: `loss_and_gradients` then gets None as its batch, `max_steps` times a worker."""
        ...

    def variables(self) -> Mapping[str, Variable | np.ndarray]:
        """What is trained, by name; the same on every worker. An array is a variable that begins with its values."""
        ...

    def loss_and_gradients(
        self, params: Mapping[str, Array], batch: Any
    ) -> tuple[Any, Mapping[str, Array] | Iterable[tuple[str, Array]]] | StepOutput:
        """The mean loss of a batch and its gradients: by name, or one by one, as `StepOutput` says.

        Args:
            params: all variables, by name, on the worker's device; valid for this call, and not to be changed.
            batch: what `dataset.batch` returned, on the worker's device.
        """
        ...


@runtime_checkable
class RandomProgram(Protocol):
    """A program that draws random numbers: dropout, noise, negative samples.

    It makes them from the seed that comes with each batch (`numpy.random.default_rng(seed)`, `jax.random.key(seed)`,
    `torch.Generator().manual_seed(seed)`), and keeps no generator from one batch to the next. Then a job that goes on
    from a checkpoint draws what it would have drawn without the interruption.
    """

    @property
    def dataset(self) -> Dataset | RandomDataset | None:
        """As of `Program`."""
        ...

    def variables(self) -> Mapping[str, Variable | np.ndarray]:
        """As of `Program`."""
        ...

    def loss_and_gradients(
        self, params: Mapping[str, Array], batch: Any, *, seed: int
    ) -> tuple[Any, Mapping[str, Array] | Iterable[tuple[str, Array]]] | StepOutput:
        """As of `Program`.

        Args:
            params: all variables.
            batch: what `dataset.batch` returned.
            seed: from [0, 2**63), of this batch: the same whenever and on whichever worker it is trained on, another in
                each epoch. Without a data set, of the step and the worker's rank. It follows from the job's seed.
        """
        ...


@runtime_checkable
class EvaluatedProgram(Protocol):
    """A program with samples that it does not train on, to be evaluated while it trains.

    A job whose `evaluation` says when has one of its workers do it: all of them in order, in batches of the job's size,
    with the variables as they were pulled for its step. Before its first step each worker evaluates one batch, so that
    what is wrong shows then; what it finds is forgotten.
    """

    @property
    def held_out(self) -> Dataset:
        """The samples, one at least. As of `dataset`: read ahead in a thread, and by name, not by a method."""
        ...

    def evaluate(self, params: Mapping[str, Array], batch: Any) -> Mapping[str, float | AggregateMetric]:
        """Figures of one batch, by name, always the same names: {"loss": 0.31, "accuracy": 0.9}.

        Args:
            params: as of `Program`.
            batch: what `held_out.batch` returned, on the worker's device.

        Returns:
            Numbers, or arrays of one element, are means of the batch, of which the mean over all samples is taken.
            What is no mean of batches, such as the area under a curve, is a `AggregateMetric` of the batch, and they are
            joined.
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
