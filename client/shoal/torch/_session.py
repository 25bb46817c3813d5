"""Sessions whose variables are the parameters and buffers of a module."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from shoal import errors, optim
from shoal._adapters import open_session
from shoal._training import PushResult
from shoal.client import Client
from shoal.session import Session
from shoal.torch._equivalents import checked_optimizer
from shoal.torch._state import optimizer_state as state_of
from shoal.torch._tensors import BufferRule, ModelTensors


class ModelSession:
    """A session with the variables of a module; `session` opens it.

        with shoal.torch.session(model, shoal.optim.SGD(0.1), job="m") as s:
            for x, y in loader:
                s.pull_into(model)
                loss_fn(model(x), y).backward()
                s.push_from(model)
                model.zero_grad()

    Args:
        session: the session.
        tensors: the parameters and buffers of the module.
        model: the module.
        owned: what is closed with this object.

    Attributes:
        session: the `shoal.Session`, for example for its `rank`, `log` and `checkpoint`.
        batch_samples: number of samples of the current batch of a `DataLoader` of this session; 0 if there is none.
        batch_weight: weight of the current batch in the mean of a synchronous step, for example its number of tokens if
            the loss is their mean. None means the number of samples.
    """

    def __init__(self, session: Session, tensors: ModelTensors, model: torch.nn.Module, owned: ExitStack) -> None:
        self.session, self.batch_samples = session, 0
        self.batch_weight: float | None = None
        self._newest, self._has_pushed = 0, True  # samples of the newest batch, and whether its gradients are pushed
        self._tensors, self._model, self._owned = tensors, model, owned

    def pull_into(self, model: torch.nn.Module) -> None:
        """Puts the newest values into a module, as soon as the job's consistency mode allows it.

        Raises:
            InvalidVariable: it is another module than that of the session.
            Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: see `shoal.Session.pull`.
        """
        self._check(model)
        self._tensors.load(self.session.pull())

    def push_from(
        self,
        model: torch.nn.Module,
        *,
        gradients: Iterable[tuple[str, np.ndarray]] | None = None,
        updates: Mapping[str, np.ndarray] | None = None,
        weight: float | None = None,
        samples: int | None = None,
        metrics: Mapping[str, float] | None = None,
        learning_rate: float | None = None,
    ) -> PushResult:
        """Pushes the gradients and the buffers of a module.

        Args:
            model: the module.
            gradients: pairs of name and array in place of the module's own gradients; see `shoal.Session.push`.
            updates: values of the buffers in place of the module's own.
            weight: weight in the mean of a synchronous step. None means `batch_weight`, or without one, the number of
                samples, or 1 if it is not known.
            samples: number of samples. None means `batch_samples`.
            metrics: metrics of the step by name, such as {"loss": 0.3}.
            learning_rate: see `shoal.Session.push`.

        Returns:
            The outcome.

        Raises:
            BadRequest: no parameter has a gradient: `backward` was not called.
            InvalidVariable: it is another module, or it has new parameters.
            InvalidGradient: a gradient is sparse.
            NonFiniteGradient, Fenced, UnknownJob, JobFailed, Cancelled, Unreachable: see `shoal.Session.push`.
        """
        self._check(model)
        if gradients is None:
            self._tensors.check()
        result = self.session.push(
            self._tensors.gradients() if gradients is None else gradients,
            updates=self._tensors.updates() if updates is None else updates,
            weight=self.weight if weight is None else weight,
            metrics=metrics,
            samples=(self.batch_samples if samples is None else samples) or None,
            learning_rate=learning_rate,
        )
        if gradients is None:
            self.end_batch()
        return result

    @property
    def weight(self) -> float:
        """The weight of the current batch in the mean of a synchronous step."""
        return self.batch_weight if self.batch_weight is not None else self.batch_samples or 1.0

    def begin_batch(self, samples: int) -> None:
        """Sets the number of samples. Those of batches without a push add up, as their gradients do."""
        self.batch_samples = samples if self._has_pushed else self.batch_samples + samples
        self._newest, self._has_pushed = samples, False

    def drop_batches(self) -> None:
        """Says that the gradients of the batches before the newest one are dropped."""
        if not self._has_pushed:
            self.batch_samples = self._newest

    def end_batch(self) -> None:
        """Says that the gradients of the batches so far are pushed."""
        self._has_pushed = True

    def end_range(self) -> None:
        """Prepares for the lease of the next range of samples."""

    @property
    def tensors(self) -> ModelTensors:
        """The parameters and buffers of the module."""
        return self._tensors

    def close(self, error: str | BaseException = "") -> None:
        """Closes the session; see `shoal.Session.close`."""
        with self._owned:
            self.session.close(error)

    def __enter__(self) -> "ModelSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._owned:
            self.session.__exit__(kind, error, trace)

    def _check(self, model: torch.nn.Module) -> None:
        if model is not self._model:
            raise errors.InvalidVariable(
                "this is another module than the one that the session was opened with; give that one"
            )


def session(
    model: torch.nn.Module,
    optimizer: optim.Optimizer | None = None,
    *,
    job: str,
    address: str | None = None,
    client: Client | None = None,
    buffers: BufferRule = "mean",
    worker: str = "",
    on_error: Literal["leave", "fail"] = "leave",
    optimizer_state: torch.optim.Optimizer | optim.OptimizerState | None = None,
    **options: Any,
) -> ModelSession:
    """Opens a session with the parameters and buffers of a module as its variables.

    Args:
        model: the module. Its values are the initial ones if this process starts the job.
        optimizer: the optimizer of the job, from `shoal.optim`. None means the default of `shoal.Job`.
        job: name of the job.
        address: host:port of the coordinator; see `shoal.Client`. Not with a client.
        client: the client to use, which stays open. None opens one.
        buffers: how the buffers of all workers, such as the statistics of BatchNorm, become one value in a synchronous
            step: "mean"; "last" for the value of one of them; "sum" adds the changes of all workers to the common
            value, which is right for counts; or "local" for no common value.
        worker: see `shoal.Client.session`.
        on_error: see `shoal.Client.session`.
        optimizer_state: the state that the optimizer of a new job goes on from: an optimizer of PyTorch with the
            parameters of the module, or what `optimizer_state` returns for it. Each worker gives the same.
        options: see `shoal.Client.session`.

    Returns:
        The open session.

    Raises:
        InvalidVariable: a parameter has no values, or is complex or sparse.
        InvalidOptimizer: the optimizer is one of another library. The message has its equivalent. Or the optimizer
            state does not fit the module or the optimizer.
        BadRequest: an argument is invalid, or there are an address and a client.
        ShoalError: see `shoal.Client.session`.
    """
    tensors, given = ModelTensors(model, buffers), {"optimizer": checked_optimizer(optimizer), **options}
    is_plain = isinstance(optimizer_state, torch.optim.Optimizer)
    given["optimizer_state"] = state_of(optimizer_state, model) if is_plain else optimizer_state
    raw, owned = open_session(
        tensors.variables(), job=job, address=address, client=client, worker=worker, on_error=on_error, **given
    )
    return ModelSession(raw, tensors, model, owned)


__all__ = ["ModelSession", "session"]
