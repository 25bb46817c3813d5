"""An optimizer for loops in JAX, whose updates the servers of a cluster compute."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

import jax
import numpy as np

from shoal import errors, optim
from shoal._adapters import EpochRanges, ScriptEnd, check_optimizer, open_session
from shoal.client import Client
from shoal.jax._trees import trained_part, updated
from shoal.session import Session

_EQUAL = (
    "optax.sgd(0.1, momentum=0.9) is shoal.optim.Momentum(0.1, momentum=0.9), optax.adam(1e-3) is "
    "shoal.optim.Adam(1e-3), optax.adamw(1e-3) is shoal.optim.AdamW(1e-3, weight_decay=1e-4), and "
    "optax.clip_by_global_norm(1.0) is clip_norm=1.0"
)


class DistributedOptimizer:
    """Trains a tree of arrays, or the parameters of a module of Flax (nnx), in a job, together with its other workers.

        optimizer = shoal.jax.DistributedOptimizer(model, shoal.optim.AdamW(1e-3), job="m", workers=2)
        for epoch in range(epochs):
            for numbers in optimizer.batches(len(images)):
                loss, gradients = step(model, images[numbers], labels[numbers])  # nnx.value_and_grad, in nnx.jit
                optimizer.update(model, gradients)

    The constructor waits until all workers of the job are there. At the end of the program the session is closed, as
    `close` does; an uncaught exception is its error.

    Args:
        model: the module, which gets the values of the first worker, or a tree: `pull` returns these values then. All
            arrays of a tree are trained, so give only parameters.
        optimizer: the optimizer of the job, from `shoal.optim`.
        wrt: which variables of a module are trained: a filter as in `nnx.Optimizer`. None means `nnx.Param`.
        job: name of the job.
        address: host:port of the coordinator; see `shoal.Client`. Not with a client.
        client: the client to use, which stays open. None opens one.
        worker: see `shoal.Client.session`.
        on_error: see `shoal.Client.session`.
        optimizer_state: the state that the optimizer of a new job goes on from, such as moments of Optax. Each worker
            gives the same.
        options: see `shoal.Client.session`.

    Raises:
        InvalidOptimizer: the optimizer is not one of `shoal.optim`.
        InvalidVariable: the tree has more than parameters.
        BadRequest: there are an address and a client.
        ShoalError: see `shoal.Client.session`.

    Attributes:
        session: the session of the job, for example for its `rank` and `log`.
    """

    def __init__(
        self,
        model: Any,
        optimizer: optim.Optimizer,
        *,
        wrt: Any = None,
        job: str,
        address: str | None = None,
        client: Client | None = None,
        worker: str = "",
        on_error: Literal["leave", "fail"] = "leave",
        optimizer_state: optim.OptimizerState | None = None,
        **options: Any,
    ) -> None:
        check_optimizer(optimizer, _EQUAL)
        given = {"worker": worker, "on_error": on_error, "optimizer_state": optimizer_state, **options}
        self._wrt, self._epochs, self._batch = wrt, EpochRanges(), 0
        variables = trained_part(model, wrt)
        self.session: Session
        self.session, self._owned = open_session(
            variables, job=job, address=address, client=client, optimizer=optimizer, **given
        )
        with ExitStack() as failing:
            failing.push(self.__exit__)
            self._end = ScriptEnd(self.close)
            self.pull(model)
            failing.pop_all()

    def update(
        self,
        model: Any,
        gradients: Any,
        *,
        weight: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Any:
        """Pushes gradients, and pulls the new values of all workers.

        Args:
            model: the module, which gets the values, or the tree.
            gradients: the gradients, as `jax.grad` or `nnx.grad` return them.
            weight: weight in the mean of a synchronous step, > 0. None means the number of samples of the current
                batch of `batches`, or 1 without it.
            metrics: metrics of the step by name, such as {"loss": loss}.

        Returns:
            The module, or a tree with the new values.

        Raises:
            BadRequest: it is called inside a function that JAX compiles.
            InvalidGradient, NonFiniteGradient, ShoalError: see `shoal.Session.push`.
        """
        if any(isinstance(it, jax.core.Tracer) for it in jax.tree.leaves(gradients)):
            raise errors.BadRequest(
                "update is called inside a function that JAX compiles, where there are no values yet; return the "
                "gradients from that function, and call update after it"
            )
        weight = weight if weight is not None else self._batch or 1.0
        self.session.push(gradients, weight=weight, samples=self._batch or None, metrics=metrics)
        return self.pull(model)

    def batches(self, samples: int) -> Iterator[np.ndarray]:
        """Yields the numbers of the samples of each batch of one epoch that this worker gets.

        The workers divide the samples of each epoch, in shuffled order, as `shoal.Session.batches` says. The job's
        `epochs` and `batch_size` apply. If a loop ends early, the next call continues the same epoch. If no epoch is
        left, it yields nothing.

        Args:
            samples: samples in one epoch, the same for all workers.

        Yields:
            int64 arrays of at most `batch_size` numbers.

        Raises:
            ShoalError: see `shoal.Session.batches`.
        """
        for leased in self._epochs.of_one(lambda: self.session.ranges(samples)):
            for numbers in leased:
                self._batch = len(numbers)
                yield numbers

    def pull(self, model: Any) -> Any:
        """Returns the module or a tree with the newest values, as `update` does, without a push."""
        return updated(model, self.session.pull(), self._wrt)

    def close(self, error: str | BaseException = "") -> None:
        """Closes the session of the job; see `shoal.Session.close`. A second call does nothing."""
        self._end.over()
        with self._owned:
            self.session.close(error)

    def __enter__(self) -> "DistributedOptimizer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.over()
        with self._owned:
            self.session.__exit__(kind, error, trace)


__all__ = ["DistributedOptimizer"]
