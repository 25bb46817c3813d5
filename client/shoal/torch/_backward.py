"""Gradients that are sent while the backward pass computes the others."""

import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from shoal import errors
from shoal._training import PushResult
from shoal.torch._tensors import ModelTensors


class _ChangedError(Exception):
    """A gradient has changed after it was sent, so nothing of this push may count."""


class BackwardSender:
    """Sends each gradient as soon as the backward pass has computed it.

    A gradient may change afterwards: by another backward pass before the step, or by `clip_grad_norm_`. What was sent
    then does not count, and all gradients are sent again. This usually happens in every step, so later steps send
    nothing during the backward pass.

    Args:
        tensors: the parameters.
        push: pushes pairs of name and array, on a thread of this sender.
        begin: called on the thread of the backward pass before a push begins.
        enabled: whether to send anything during the backward pass.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        push: Callable[[Iterable[tuple[str, np.ndarray]]], PushResult],
        begin: Callable[[], object] = bool,
        *,
        enabled: bool = True,
    ) -> None:
        self._tensors, self._push, self._begin = tensors, push, begin
        self._ready: queue.SimpleQueue[tuple[str, np.ndarray] | Exception | None] = queue.SimpleQueue()
        self._sent: dict[str, tuple[torch.Tensor, int]] = {}  # by name, the gradient and its version when it was sent
        self._pushed: Future[PushResult] | None = None
        self._changed = False  # whether a second backward pass has changed a gradient that was sent
        self.enabled = enabled
        self._hooks = [it.register_post_accumulate_grad_hook(self._hook(name)) for name, it in tensors.trained.items()]

    def cancel(self) -> None:
        """Ends the push in progress, of which nothing counts."""
        self._changed = True
        self._finish()

    def finish(self) -> PushResult | None:
        """Sends the other gradients, and returns the outcome of the push; None if the caller has to push all itself.

        Raises:
            BadRequest, InvalidVariable: see `ModelTensors.check`. Nothing counts.
            ShoalError: the push has failed.
        """
        try:
            self._tensors.check()
        except errors.ShoalError:
            self.cancel()
            raise
        return self._finish()

    def _finish(self) -> PushResult | None:
        pushed, self._pushed = self._pushed, None
        sent, self._sent = self._sent, {}
        changed, self._changed = self._changed, False
        if pushed is None:
            return None
        try:
            if changed or any(self._differs(name, *it) for name, it in sent.items()):
                self.enabled = False
                self._ready.put(_ChangedError())
            else:
                self._send_others(sent.keys())
            return pushed.result()
        except _ChangedError:
            return None
        finally:
            self._ready = queue.SimpleQueue()

    def _send_others(self, sent: Collection[str]) -> None:
        """Sends the gradients that have not been sent, and the end."""
        trained = self._tensors.trained
        try:
            others = [(name, self._tensors.gradient(name, it)) for name, it in trained.items() if name not in sent]
            self._tensors.finish_copies()
        except BaseException:
            self._ready.put(_ChangedError())  # the push must not take gradients of the next step
            raise
        for item in others:
            self._ready.put(item)
        self._ready.put(None)

    def _differs(self, name: str, gradient: torch.Tensor, version: int) -> bool:
        """Returns whether the gradient of a parameter is another one than that which was sent."""
        return self._tensors.trained[name].grad is not gradient or gradient._version != version

    def _start(self) -> None:
        """Pushes on a daemon thread, so that the program can end without another step."""
        pushed, arriving = Future[PushResult](), self._arriving(self._ready)

        def run() -> None:
            try:
                pushed.set_result(self._push(arriving))
            except BaseException as error:
                pushed.set_exception(error)

        self._pushed = pushed
        threading.Thread(target=run, name="push", daemon=True).start()

    def close(self) -> None:
        """Ends the push in progress."""
        for hook in self._hooks:
            hook.remove()
        self._ready.put(_ChangedError())
        if self._pushed:
            with suppress(BaseException):  # nothing of it counts
                self._pushed.result()

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def computed(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if not self.enabled or gradient is None or gradient.layout is not torch.strided or gradient.is_cuda:
                return
            if name in self._sent:
                self._changed = True
                return
            self._sent[name] = gradient, gradient._version
            self._ready.put((name, self._tensors.gradient(name, parameter)))
            if self._pushed is None:
                self._begin()
                self._start()

        return computed

    @staticmethod
    def _arriving(ready: "queue.SimpleQueue[Any]") -> Iterator[tuple[str, np.ndarray]]:
        while (item := ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


__all__ = ["BackwardSender"]
