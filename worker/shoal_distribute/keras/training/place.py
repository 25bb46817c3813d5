"""Place of `fit`: its epoch and its step, which elastic groups of processes share as the progress of their strategy."""

from weakref import WeakKeyDictionary

from shoal_distribute.strategies import Strategy

# Bits of the numbers of epoch and step in the progress. Above them is the number of the call of `fit`.
_EPOCH_BITS, _STEP_BITS = 20, 28
# The calls of `fit` so far, by strategy.
_calls: "WeakKeyDictionary[Strategy, int]" = WeakKeyDictionary()


class FitPlace:
    """The next step of `fit`. Another process may have taken it already, and even later ones.

    Args:
        strategy: keeps the progress.
        first_epoch: the epoch that this process would begin with.
    """

    def __init__(self, strategy: Strategy, first_epoch: int) -> None:
        self._strategy = strategy
        self._call = _calls[strategy] = _calls.get(strategy, 0) + 1
        if self._of_progress[0] < self._call:
            self._set(first_epoch, 0)

    @property
    def is_over(self) -> bool:
        """Whether the other processes have ended this call of `fit`."""
        return self._of_progress[0] > self._call

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self._of_progress[1]

    @property
    def step(self) -> int:
        """The number of the next step in its epoch, from 0."""
        return self._of_progress[2]

    def end_step(self) -> None:
        """Goes on to the next step."""
        self._set(self.epoch, self.step + 1)

    def end_epoch(self, epoch: int) -> None:
        """Goes on from an epoch to the next one, unless another process has done so."""
        if self.epoch == epoch:
            self._set(epoch + 1, 0)

    @property
    def _of_progress(self) -> tuple[int, int, int]:
        progress = self._strategy.progress
        step, epoch = progress % (1 << _STEP_BITS), (progress >> _STEP_BITS) % (1 << _EPOCH_BITS)
        return progress >> (_EPOCH_BITS + _STEP_BITS), epoch, step

    def _set(self, epoch: int, step: int) -> None:
        self._strategy.progress = (((self._call << _EPOCH_BITS) + epoch) << _STEP_BITS) + step


__all__ = ["FitPlace"]
