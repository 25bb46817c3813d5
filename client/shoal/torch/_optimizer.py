"""An optimizer in the form of PyTorch's, whose updates the servers of a cluster compute."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from shoal import errors, optim
from shoal._adapters import ScriptEnd
from shoal._training import PushResult
from shoal.client import Client
from shoal.session import Session
from shoal.torch._backward import BackwardSender
from shoal.torch._session import session
from shoal.torch._state import state_dict_for
from shoal.torch._tensors import BufferRule


@dataclass(frozen=True)
class _Terms:
    """What a push carries besides gradients and metrics.

    Attributes:
        rate: the learning rate; None means that of the job.
        weight: weight in the mean of a synchronous step.
        samples: number of samples; 0 if it is not known.
        updates: values of the buffers.
    """

    rate: float | None = None
    weight: float = 1.0
    samples: int = 0
    updates: Mapping[str, np.ndarray] = field(default_factory=dict)

    def equal(self, other: "_Terms") -> bool:
        mine, its = ((it.rate, it.weight, it.samples) for it in (self, other))
        return mine == its and all(np.array_equal(self.updates.get(name, ()), it) for name, it in other.updates.items())


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer of PyTorch that trains a module in a job, together with the other workers of the job.

        optimizer = shoal.torch.DistributedOptimizer(model, shoal.optim.SGD(0.1), job="m", workers=2)
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    The constructor waits until all workers of the job are there, and gives each of them the values of the first one.
    `step` pushes the gradients and buffers, and puts the new values into the module. In synchronous mode it waits for
    the other workers. At the end of the program the session is closed, as `close` does; an uncaught exception is its
    error. The slots of the optimizer, such as moments, are on the servers, and in the job's checkpoints.

    Gradients are sent while the backward pass computes the others, if nothing changes them before the step. To clip
    their norm, give `clip_norm` to the optimizer: `clip_grad_norm_` sees the gradients of this worker alone.

    `param_groups` shows the learning rates. If a scheduler of PyTorch changes them, each step carries the rate, so it
    counts from the next step on. Schedulers of all workers are at the same step in synchronous mode; if they differ,
    the job uses the rate of the lowest rank that has changed it. A schedule of `shoal.optim` is on the servers, and in
    checkpoints.

    Args:
        model: the module. Its values are the initial ones if this process starts the job.
        optimizer: the optimizer of the job, from `shoal.optim`.
        job: name of the job.
        address: see `shoal.torch.session`.
        client: see `shoal.torch.session`.
        buffers: see `shoal.torch.session`.
        worker: see `shoal.torch.session`.
        on_error: see `shoal.torch.session`.
        optimizer_state: see `shoal.torch.session`.
        options: see `shoal.torch.session`.

    Raises:
        InvalidVariable, InvalidOptimizer, BadRequest, ShoalError: see `shoal.torch.session`.

    Attributes:
        model_session: the session of the module.
    """

    # A `torch.amp.GradScaler` leaves the scale of gradients to `step` then, and sets `found_inf` and `grad_scale`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: optim.Optimizer,
        *,
        job: str,
        address: str | None = None,
        client: Client | None = None,
        buffers: BufferRule = "mean",
        worker: str = "",
        on_error: Literal["leave", "fail"] = "leave",
        optimizer_state: torch.optim.Optimizer | optim.OptimizerState | None = None,
        **options: Any,
    ) -> None:
        self._model = model
        self._metrics: dict[str, float] = {}  # of the next push
        self._pushed_metrics: dict[str, float] = {}  # of the push in progress
        self._terms = _Terms()  # of the push in progress
        self.model_session = session(
            model,
            optimizer,
            job=job,
            address=address,
            client=client,
            buffers=buffers,
            worker=worker,
            on_error=on_error,
            optimizer_state=optimizer_state,
            **options,
        )
        self._spec = optimizer
        with ExitStack() as failing:
            failing.push(self.model_session)
            super().__init__(self._groups(), {"lr": optimizer.rate(0)})
            self._rates = [group["lr"] for group in self.param_groups]  # those of the job
            self._decays = [group["weight_decay"] for group in self.param_groups]
            # With overlap, a push may still read arrays that are given one by one when the next backward pass begins.
            self._sender = BackwardSender(
                self.model_session.tensors, self._push, self._begin_push, enabled=not self.session.overlap
            )
            failing.callback(self._sender.close)
            self.model_session.pull_into(model)
            self._show_rates()
            failing.pop_all()
        self._closed, self._end = False, ScriptEnd(self.close)

    @property
    def session(self) -> Session:
        """The session of the job, for example for its `rank`, `log` and `checkpoint`."""
        return self.model_session.session

    @property
    def batch_samples(self) -> int:
        """Number of samples of the current batch of a `DataLoader` of this optimizer; 0 if there is none."""
        return self.model_session.batch_samples

    @batch_samples.setter
    def batch_samples(self, samples: int) -> None:
        self.model_session.batch_samples = samples

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes the gradients, and puts the new values of all workers into the module.

        If a `GradScaler` calls it with gradients that are not finite, it does nothing.

        Args:
            closure: computes the loss and the gradients again, and returns the loss.

        Returns:
            The loss of the closure.

        Raises:
            BadRequest: no parameter has a gradient: `backward` was not called.
            InvalidVariable: the module has new parameters.
            InvalidOptimizer: learning rates of groups were changed by different factors.
            ShoalError: see `shoal.Session.push`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if hasattr(self, "found_inf") and not self._unscale():
            return loss
        try:
            if not self._terms.equal(terms := self._current_terms()):  # changed since the push in progress has begun
                self._sender.cancel()
        except errors.InvalidOptimizer:
            self._sender.cancel()
            raise
        self._terms = terms
        if self._sender.finish() is None:
            self._take_metrics()
            self._push(None)
        self._pushed_metrics = {}
        self.model_session.end_batch()
        self.model_session.pull_into(self._model)
        self._show_rates()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients; see `torch.optim.Optimizer.zero_grad`."""
        super().zero_grad(set_to_none)
        self.model_session.drop_batches()

    def report(self, **metrics: float) -> None:
        """Adds metrics to those that the next push reports, for example `optimizer.report(loss=loss.item())`.

        The push of a step can begin with the backward pass. Then metrics that are added after it count for the step
        that follows.
        """
        self._metrics.update(metrics)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group while this object is made. A job cannot get more variables later.

        Raises:
            InvalidVariable: this object exists.
        """
        if hasattr(self, "_closed"):
            raise errors.InvalidVariable(
                "a running job gets no more variables; add all parameters to the module before the optimizer is made"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the groups with their learning rates, and the job's name and step. The servers have the slots.

        `state_dict_for` returns the slots, too, for an optimizer of PyTorch.
        """
        return {**super().state_dict(), "shoal": {"job": self.session.job, "step": self.session.step}}

    def state_dict_for(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the state of the job as one that an optimizer of PyTorch loads, to go on without Shoal.

            plain = torch.optim.Adam(model.parameters(), 1e-3)
            plain.load_state_dict(optimizer.state_dict_for(plain))

        In synchronous mode it belongs to the present values of the module. Other modes: see
        `shoal.Session.optimizer_state`.

        Args:
            optimizer: the optimizer of PyTorch that computes what the job does, with parameters of the module.

        Returns:
            The state, with the settings of `optimizer` and the present learning rates of the job.

        Raises:
            InvalidOptimizer: see `shoal.torch.state_dict_for`.
            ShoalError: see `shoal.Session.optimizer_state`.
        """
        found = state_dict_for(self.session.optimizer_state(), optimizer, self._model)
        rates = {it: group["lr"] for group in self.param_groups for it in group["params"]}
        for group, its in zip(found["param_groups"], optimizer.param_groups, strict=True):
            group["lr"] = next((rates[it] for it in its["params"] if it in rates), group["lr"])
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the learning rates of a state, unless the job has a schedule of `shoal.optim`.

        The servers keep the slots.

        Args:
            state_dict: a result of `state_dict` for the same parameters.

        Raises:
            InvalidOptimizer: it is the state of another optimizer.
        """
        if "shoal" not in state_dict:
            raise errors.InvalidOptimizer(
                "the state is that of another optimizer, and the servers keep the state of this one; to begin with it, "
                "load it into an optimizer of PyTorch, and give that as optimizer_state"
            )
        super().load_state_dict(state_dict)
        if isinstance(self._spec.learning_rate, optim.Schedule):
            for group, rate in zip(self.param_groups, self._rates, strict=True):
                group["lr"] = rate

    def close(self, error: str | BaseException = "") -> None:
        """Closes the session of the job; see `shoal.Session.close`. A second call does nothing."""
        if self._closed:
            return
        self._stop()
        self.model_session.close(error)

    def __enter__(self) -> "DistributedOptimizer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            self._stop()
            self.model_session.__exit__(kind, error, trace)

    def _stop(self) -> None:
        self._closed = True
        self._end.over()
        self._sender.close()

    def begin_batch(self, samples: int) -> None:
        """See `ModelSession.begin_batch`. `DataLoader` calls it."""
        self.model_session.begin_batch(samples)

    def end_range(self) -> None:
        """Ends the push in progress, so that the session can lease a range. `DataLoader` calls it."""
        self._sender.cancel()

    def _push(self, gradients: Any) -> PushResult:
        terms = self._terms
        return self.model_session.push_from(
            self._model,
            gradients=gradients,
            updates=terms.updates or None,
            weight=terms.weight,
            samples=terms.samples,
            metrics=self._pushed_metrics,
            learning_rate=terms.rate,
        )

    def _current_terms(self) -> "_Terms":
        given = self.model_session
        return _Terms(self._own_rate(), given.weight, given.batch_samples, given.tensors.updates() or {})

    def _unscale(self) -> bool:
        """Divides the gradients by their scale, and returns whether they are finite."""
        self._sender.cancel()
        self._sender.enabled = False  # PyTorch does not count this change, so what was sent early would count
        if float(self.found_inf):
            return False
        if (scale := self.grad_scale) is not None:  # the user has not called `unscale_`
            gradients = [it.grad for it in self.model_session.tensors.trained.values() if it.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / float(scale))
        return True

    def _take_metrics(self) -> None:
        """Lets the push that begins report the metrics, besides those of a push that ended without a result."""
        self._pushed_metrics, self._metrics = {**self._pushed_metrics, **self._metrics}, {}

    # Learning rates.

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the groups of parameters that have the same settings."""
        found: dict[optim.VariableSettings, list[torch.nn.Parameter]] = {}
        for name, parameter in self.model_session.tensors.trained.items():
            found.setdefault(self._spec.settings_of(name), []).append(parameter)
        rate = self._spec.rate(self.session.updates)
        return [
            {"params": its, "lr": rate * it.rate, "weight_decay": it.weight_decay, "rate": it.rate}
            for it, its in found.items()
        ]

    def _begin_push(self) -> None:
        self._take_metrics()
        with suppress(errors.InvalidOptimizer):  # `step` raises it
            terms = self._current_terms()
            copies = {name: it.copy() for name, it in terms.updates.items()}  # the module may change them in place
            self._terms = replace(terms, updates=copies)

    def _own_rate(self) -> float | None:
        """Returns the learning rate if a user or a scheduler has changed those of the groups; otherwise None."""
        for group, decay in zip(self.param_groups, self._decays, strict=True):
            if group["weight_decay"] != decay:
                raise errors.InvalidOptimizer(
                    f"weight_decay of a group is {group['weight_decay']!r}, and was {decay!r} when the job began; the "
                    "servers keep it, so set it in the optimizer of shoal.optim, and start another job"
                )
        rates = [group["lr"] for group in self.param_groups]
        if rates == self._rates:
            return None
        bases = {group["lr"] / group["rate"] for group in self.param_groups if group["rate"]}
        if not all(math.isclose(base, min(bases), rel_tol=1e-9) for base in bases):
            raise errors.InvalidOptimizer(
                "the learning rates of the groups were changed by different factors, and a job has one learning rate "
                "with fixed factors for groups; change all of them by the same factor"
            )
        return float(min(bases)) if bases else None

    def _show_rates(self) -> None:
        """Shows the rates of the schedule, unless somebody has set others."""
        if not isinstance(self._spec.learning_rate, optim.Schedule):
            return
        if [group["lr"] for group in self.param_groups] == self._rates:
            for group in self.param_groups:
                group["lr"] = self._spec.rate(self.session.updates) * group["rate"]
            self._rates = [group["lr"] for group in self.param_groups]


__all__ = ["DistributedOptimizer"]
