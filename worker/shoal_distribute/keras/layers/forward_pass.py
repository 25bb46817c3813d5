"""Forward passes that can be computed again, for training that keeps no activations and for trials of layers."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# The forward pass that each thread computes.
_here = threading.local()


@dataclass(frozen=True)
class TrainingCall:
    """What one call of a layer in training depends on, apart from its inputs and its trainable variables.

    Attributes:
        context: the context that seeds its random numbers.
        state: the values of the variables that are not trainable, before the call.
    """

    context: Any
    state: Mapping[str, Any]


class ForwardPass:
    """One forward pass of layers. Computed again, it has the same random numbers and leaves the statistics alone.

    Args:
        numbers: the numbers of training calls to use instead of a layer's own count, in order, by the id of the layer.
    """

    def __init__(self, numbers: Mapping[int, Sequence[int]] | None = None) -> None:
        self._numbers = {layer: iter(given) for layer, given in (numbers or {}).items()}
        self._calls: list[TrainingCall] = []
        self._replayed: Iterator[TrainingCall] | None = None

    @property
    def changes_state(self) -> bool:
        """Whether layers count calls and update their statistics."""
        return self._replayed is None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Computes the pass for the first time within the block."""
        with _computing(self):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Computes the pass again within the block, with the same calls in the same order."""
        self._replayed = iter(self._calls)
        try:
            with _computing(self):
                yield
        finally:
            self._replayed = None

    def number(self, layer: object) -> int | None:
        """Returns the number of a layer's next training call; None means that the layer counts."""
        return next(self._numbers[id(layer)]) if id(layer) in self._numbers else None

    def training_call(self, make: Callable[[], TrainingCall]) -> TrainingCall:
        """Returns the call that the pass is at: a new one, or that of the first time."""
        if self._replayed is not None:
            return next(self._replayed)
        self._calls.append(make())
        return self._calls[-1]


class Trial(ForwardPass):
    """A forward pass that leaves no trace: it measures a layer, with random numbers of its own.

    Args:
        context: returns the context of each call.
    """

    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self._context = context

    @property
    def changes_state(self) -> bool:
        return False

    def training_call(self, make: Callable[[], TrainingCall]) -> TrainingCall:  # noqa: ARG002 - it would count the call
        return TrainingCall(self._context(), {})


def current_pass() -> ForwardPass | None:
    """Returns the forward pass that this thread computes; None outside of all."""
    return getattr(_here, "computed", None)


@contextmanager
def _computing(computed: ForwardPass) -> Iterator[None]:
    before, _here.computed = current_pass(), computed
    try:
        yield
    finally:
        _here.computed = before


__all__ = ["ForwardPass", "TrainingCall", "Trial", "current_pass"]
