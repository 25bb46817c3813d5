"""An optimizer for loops in JAX, whose updates the servers of a cluster compute."""

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

import jax

from shoal import errors, optim
from shoal._adapters import ScriptEnd, check_optimizer, open_session
from shoal.client import Client
from shoal.jax._trees import trained_part, updated
from shoal.session import Session


class DistributedOptimizer:
    """Trains a tree of arrays, or the parameters of a module of Flax (nnx), in a job, together with its other workers.

        optimizer = shoal.jax.DistributedOptimizer(model, shoal.optim.AdamW(1e-3), job="m", workers=2)
        for x, y in batches:
            loss, gradients = loss_and_gradients(model, x, y)  # of nnx.value_and_grad, in nnx.jit
            optimizer.update(model, gradients)

    The constructor waits until all workers of the job are there. At the end of the program the session is closed, as
    `close` does; an uncaught exception is its error.

    Args:
        model: the module, which gets the values of the first worker, or a tree: `pull` returns these values then.
        optimizer: the optimizer of the job, from `shoal.optim`.
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
        BadRequest: there are an address and a client.
        ShoalError: see `shoal.Client.session`.

    Attributes:
        session: the session of the job, for example for its `batches`, `rank` and `log`.
    """

    def __init__(
        self,
        model: Any,
        optimizer: optim.Optimizer,
        *,
        job: str,
        address: str | None = None,
        client: Client | None = None,
        worker: str = "",
        on_error: Literal["leave", "fail"] = "leave",
        optimizer_state: optim.OptimizerState | None = None,
        **options: Any,
    ) -> None:
        check_optimizer(optimizer, "optax.adamw(1e-3) is shoal.optim.AdamW(1e-3, weight_decay=1e-4)")
        given = {"worker": worker, "on_error": on_error, "optimizer_state": optimizer_state, **options}
        variables = trained_part(model)
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
        self, model: Any, gradients: Any, *, weight: float = 1.0, metrics: Mapping[str, float] | None = None
    ) -> Any:
        """Pushes gradients, and pulls the new values of all workers.

        Args:
            model: the module, which gets the values, or the tree.
            gradients: the gradients, as `jax.grad` or `nnx.grad` return them.
            weight: weight in the mean of a synchronous step, > 0: usually the number of samples.
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
        self.session.push(gradients, weight=weight, metrics=metrics)
        return self.pull(model)

    def pull(self, model: Any) -> Any:
        """Returns the module or a tree with the newest values, as `update` does, without a push."""
        return updated(model, self.session.pull())

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
