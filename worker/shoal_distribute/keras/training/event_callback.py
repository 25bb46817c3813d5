"""Callback that turns epochs into the events of a job, for the callbacks of `shoal.callbacks`."""

import itertools
import time
from collections.abc import Callable
from typing import Any

from shoal import errors
from shoal.events import EvaluationEnded, Event, MetricsReported, StateChanged
from shoal.status import Evaluation, JobState, Progress
from shoal_distribute.keras.training.callback import VALIDATION, Callback, Logs

_WORKER = "fit"


class EventCallback(Callback):
    """Calls a callback of `shoal.callbacks`, or any function of an event, with what a job's events would say.

    At the end of an epoch, `MetricsReported` has its metrics. `EvaluationEnded` has those of the validation, by their
    names without "val_". The step is the number of updates of the optimizer.

    Args:
        callback: takes an event.

    Raises:
        BadRequest: it is not callable.
    """

    def __init__(self, callback: Callable[[Event], object]) -> None:
        if not callable(callback):
            raise errors.BadRequest(f"callbacks has {callback!r}; give objects of keras.callbacks or shoal.callbacks")
        self._callback, self._numbers = callback, itertools.count(1)

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - there are none yet
        self._send(StateChanged, JobState.RUNNING, "")

    def on_train_end(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - the epochs have sent them
        self._send(StateChanged, JobState.SUCCEEDED, "")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        step = self.model.optimizer.iterations if self.model.optimizer else 0
        found = logs or {}
        values = {name: value for name, value in found.items() if not name.startswith(VALIDATION)}
        progress = Progress(steps=step, epoch=epoch, loss=values.get("loss", 0.0))
        self._send(MetricsReported, _WORKER, step, values, progress)
        held_out = {name.removeprefix(VALIDATION): it for name, it in found.items() if name.startswith(VALIDATION)}
        if held_out:
            evaluation = Evaluation(number=epoch + 1, step=step, values=held_out, time=time.time())
            self._send(EvaluationEnded, _WORKER, evaluation, False)

    def _send(self, kind: Callable[..., Event], *parts: Any) -> None:
        self._callback(kind(next(self._numbers), time.time(), *parts))


__all__ = ["EventCallback"]
