"""Base class of the callbacks of `fit`, and the list that calls them."""

from collections.abc import Callable, Iterable
from typing import Any

from shoal import errors
from shoal_distribute.keras.training.trained import Trained
from shoal_distribute.strategies import Strategy

Logs = dict[str, float]
# Names of the metrics of a validation begin with it.
VALIDATION = "val_"


class Callback:
    """Callback: `fit`, `evaluate` and `predict` call its methods. `logs` has metrics by name.

    Attributes:
        model: the model.
        params: "epochs", "steps" and "verbose"; of `fit` also "validates": whether it gets validation data.
        sets_state: whether it sets variables or the optimizer's state, which not every strategy allows.
    """

    model: Trained
    params: dict[str, Any]
    sets_state = False

    def set_model(self, model: Trained) -> None:
        """Gets the model, before all other calls."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Gets the numbers of epochs and steps."""
        self.params = params

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Is called before the first epoch."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Is called after the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Is called before an epoch, with its number from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Is called after an epoch and its validation."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Is called before a step of training, with its number in the epoch."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Is called after a step of training, with the metrics of this process since the epoch began."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Is called before an evaluation."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Is called after an evaluation."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Is called before a step of an evaluation."""

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Is called after a step of an evaluation."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Is called before a prediction."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Is called after a prediction."""


class History(Callback):
    """Metrics of each epoch. `fit` returns it.

    Attributes:
        epoch: numbers of the epochs.
        history: values by name, one for each epoch.
    """

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - each call has its own
        self.epoch, self.history = [], {}

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)


class LambdaCallback(Callback):
    """Callback of single functions, by the names of the methods of `Callback`.

    Args:
        on_epoch_begin: see `Callback`; None means nothing.
        on_epoch_end: as `on_epoch_begin`.
        on_train_begin: as `on_epoch_begin`.
        on_train_end: as `on_epoch_begin`.
        on_train_batch_begin: as `on_epoch_begin`.
        on_train_batch_end: as `on_epoch_begin`.
        **functions: other methods of `Callback` by name, such as `on_test_end`.

    Raises:
        BadRequest: `Callback` has no such method.
    """

    def __init__(
        self,
        on_epoch_begin: Callable[..., Any] | None = None,
        on_epoch_end: Callable[..., Any] | None = None,
        on_train_begin: Callable[..., Any] | None = None,
        on_train_end: Callable[..., Any] | None = None,
        on_train_batch_begin: Callable[..., Any] | None = None,
        on_train_batch_end: Callable[..., Any] | None = None,
        **functions: Callable[..., Any] | None,
    ) -> None:
        own = {
            "on_epoch_begin": on_epoch_begin,
            "on_epoch_end": on_epoch_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end,
            "on_train_batch_begin": on_train_batch_begin,
            "on_train_batch_end": on_train_batch_end,
        }
        for name, function in (own | functions).items():
            if function is None:
                continue
            if not name.startswith("on_") or not hasattr(Callback, name):
                raise errors.BadRequest(f"LambdaCallback: there is no method {name!r}; see keras.callbacks.Callback")
            setattr(self, name, function)


class CallbackList:
    """Callbacks that are called one after the other.

    Args:
        callbacks: the callbacks.
        model: the model.
        params: see `Callback`.

    Attributes:
        wants_batches: whether a callback looks at the metrics of single steps.
    """

    def __init__(self, callbacks: Iterable[Callback], model: Trained, params: dict[str, Any]) -> None:
        self.callbacks = list(callbacks)
        for callback in self.callbacks:
            callback.set_params(params)
            callback.set_model(model)
        self.wants_batches = any(_overrides(it, "on_train_batch_end") for it in self.callbacks)

    def call(self, method: str, *args: Any) -> None:
        """Calls a method of all callbacks.

        Args:
            method: its name.
            *args: its arguments.
        """
        for callback in self.callbacks:
            getattr(callback, method)(*args)


def check_callbacks(callbacks: Iterable[Callback], strategy: Strategy) -> None:
    """Raises WrongContext if a callback sets the state of training, but the strategy does not let it.

    Args:
        callbacks: the callbacks of `fit`.
        strategy: the strategy of the model.
    """
    if strategy.restores_by and (names := [type(it).__name__ for it in callbacks if it.sets_state]):
        raise errors.WrongContext(
            f"{names[0]} sets variables, but the servers of a {type(strategy).__name__} have them once training has "
            f"begun; leave it out or do not let it restore. {strategy.restores_by} continues from the job's "
            "checkpoints, and ModelCheckpoint(save_best_only=True) keeps the best model"
        )


def _overrides(callback: Callback, method: str) -> bool:
    """Returns whether a callback has a method of its own: in its class, or as a `LambdaCallback`."""
    return getattr(getattr(callback, method), "__func__", None) is not getattr(Callback, method)


__all__ = ["VALIDATION", "Callback", "CallbackList", "History", "LambdaCallback", "Logs", "check_callbacks"]
