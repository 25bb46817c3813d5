"""Places of `fit` and `evaluate` in a script, which elastic groups of processes share through the strategy.

The place of `fit` is its epoch and its step: the progress of the strategy. The place of `evaluate` is its number among
the calls before any training and after `fit`.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from shoal_distribute.strategies import Strategy

# Bits of the numbers of epoch and step in the progress. Above them is the number of the call of `fit`.
_EPOCH_BITS, _STEP_BITS = 20, 28
# The epoch after the end of `fit`, even if it has ended early.
_AFTER = (1 << _EPOCH_BITS) - 1


@dataclass(slots=True)
class _Calls:
    """Calls of this process.

    Attributes:
        fits: calls of `fit` so far.
        evaluations: calls of `evaluate` so far: those before any training, and after `fit`.
    """

    fits: int = 0
    evaluations: int = 0


_calls: "WeakKeyDictionary[Strategy, _Calls]" = WeakKeyDictionary()


class FitPlace:
    """The next step of `fit`. Another process may have taken it already, and even later ones.

    Args:
        strategy: keeps the progress.
        first_epoch: the epoch that this process would begin with.
    """

    def __init__(self, strategy: Strategy, first_epoch: int) -> None:
        self._strategy = strategy
        strategy.share_state()
        calls = _calls.setdefault(strategy, _Calls())
        self._call = calls.fits = calls.fits + 1
        if _of_progress(strategy)[0] < self._call:
            self._set(first_epoch, 0)

    @property
    def is_over(self) -> bool:
        """Whether the other processes have ended this call of `fit`."""
        return _of_progress(self._strategy)[0] > self._call

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return _of_progress(self._strategy)[1]

    @property
    def step(self) -> int:
        """The number of the next step in its epoch, from 0."""
        return _of_progress(self._strategy)[2]

    def end_step(self) -> None:
        """Goes on to the next step."""
        self._set(self.epoch, self.step + 1)

    def end_epoch(self, epoch: int) -> None:
        """Goes on from an epoch to the next one, unless another process has done so."""
        if self.epoch == epoch:
            self._set(epoch + 1, 0)

    def end(self) -> None:
        """Ends this call of `fit`: a process that joins later does not train."""
        if not self.is_over and self.epoch != _AFTER:
            self._set(_AFTER, 0)

    def _set(self, epoch: int, step: int) -> None:
        self._strategy.progress = _progress(self._call, epoch, step)


class EvaluationPlace:
    """The place of a call of `evaluate` among those of a script. Another process may have ended it already.

    Args:
        strategy: keeps the number of calls that have ended.

    Attributes:
        is_known: whether the call is before any training or after `fit`, so that a process that joins comes to it, too.
            Within `fit` or a loop, a process that joins may have begun later, so that its calls have other numbers.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        strategy.share_state()
        calls = _calls.setdefault(strategy, _Calls())
        self._number, place = calls.evaluations, _of_progress(strategy)
        outside = place[:2] >= (calls.fits, _AFTER) if calls.fits else place == (0, 0, 0)
        self.is_known = outside or strategy.evaluations > self._number
        calls.evaluations += self.is_known

    @property
    def is_over(self) -> bool:
        """Whether the other processes have ended this call of `evaluate`."""
        return self.is_known and self._strategy.evaluations > self._number

    def end(self) -> None:
        """Ends this call of `evaluate`."""
        if self.is_known:
            self._strategy.evaluations = self._number + 1


def _progress(call: int, epoch: int, step: int) -> int:
    return (((call << _EPOCH_BITS) + epoch) << _STEP_BITS) + step


def _of_progress(strategy: Strategy) -> tuple[int, int, int]:
    """Returns the number of the call of `fit`, the epoch and the step."""
    progress = strategy.progress
    step, epoch = progress % (1 << _STEP_BITS), (progress >> _STEP_BITS) % (1 << _EPOCH_BITS)
    return progress >> (_EPOCH_BITS + _STEP_BITS), epoch, step


__all__ = ["EvaluationPlace", "FitPlace"]
