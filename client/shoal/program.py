"""What a job's program is: the contract between a user's model and the worker that trains it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shoal.variables import Variable

# An array of the worker's device: numpy.ndarray on a CPU, cupy.ndarray on a GPU.
Array = Any


@dataclass(frozen=True, slots=True)
class Step:
    """What one batch gives, for programs that have more to say than (loss, gradients).

    Attributes:
        loss: the batch's mean loss, a number or an array of one element.
        gradients: of every trainable variable, by name, of the variable's shape and dtype: the gradient of the mean
            loss over the batch. Or pairs of name and array one after the other, such as a generator gives them, in
            whatever order: then the first are pushed while the next are computed. These must not be changed before the
            next step's gradients are asked for; `loss`, `updates` and `metrics` are read before them.
        updates: for every non-trainable variable, by name: the new value (aggregation MEAN or LAST) or the increment
            (SUM). Empty: those variables stay as they are.
        metrics: further figures of the batch, shown beside the loss: {"accuracy": 0.93}.
    """

    loss: Any
    gradients: Mapping[str, Array] | Iterable[tuple[str, Array]]
    updates: Mapping[str, Array] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Dataset(Protocol):
    """The examples of one pass, by number. Every worker of a job has the same data set."""

    def __len__(self) -> int:
        """Examples in one pass. 0: none, and the job is stepped `max_steps` times with no batch."""
        ...

    def batch(self, indices: np.ndarray) -> Any:
        """The examples with these numbers (int64, each in [0, len), in random order), joined to a batch.

        NumPy arrays in what it returns, also inside tuples, lists and dicts, are brought to the worker's device.
        """
        ...


@runtime_checkable
class Program(Protocol):
    """What the factory of a job returns: variables, data, and a function that gives gradients.

    A job names the factory as `package.module:factory` and gives its keyword arguments as settings. Each worker
    imports it, calls it once, and owns the loop: it leases examples, pulls, computes, pushes and reports.

    Example:
        A linear model, in `regression.py`; submit it with `shoal submit regression:linear --set features=8`.

            import numpy as np

            class Examples:
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
                    self.dataset = Examples(features)
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
    def dataset(self) -> Dataset | None:
        """The examples, or None: `loss_and_gradients` then gets None as its batch, `max_steps` times a worker."""
        ...

    def variables(self) -> Mapping[str, Variable | np.ndarray]:
        """What is trained, by name; the same on every worker. An array is a variable that begins with its values."""
        ...

    def loss_and_gradients(
        self, params: Mapping[str, Array], batch: Any
    ) -> tuple[Any, Mapping[str, Array] | Iterable[tuple[str, Array]]] | Step:
        """The mean loss of a batch and its gradients: by name, or one by one, as `Step` says.

        Args:
            params: all variables, by name, on the worker's device; valid for this call, and not to be changed.
            batch: what `dataset.batch` returned, on the worker's device.
        """
        ...


__all__ = ["Array", "Dataset", "Program", "Step"]
