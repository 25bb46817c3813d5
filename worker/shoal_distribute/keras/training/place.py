"""Places of `fit` and `evaluate` in a script, which elastic groups of processes share through the strategy.

The place of `fit` is its epoch and its step. In an elastic group it is the progress of the strategy; otherwise each
call has its own, so that models of one strategy can be trained at the same time. The place of `evaluate` is its number
among the calls before any training and after `fit`.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from shoal import errors
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
    """The next step of `fit`. In an elastic group, another process may have taken it already, and even later ones.

    Args:
        strategy: keeps the progress of an elastic group.
        first_epoch: the epoch that this process would begin with.
    """

    def __init__(self, strategy: Strategy, first_epoch: int) -> None:
        self._shared = strategy if strategy.may_grow else None
        self._own, self._calls = 0, _calls.setdefault(strategy, _Calls())
        strategy.share_state()
        self._call = self._calls.fits = self._calls.fits + 1
        if self._parts[0] < self._call:
            self._set(first_epoch, 0)

    @property
    def is_over(self) -> bool:
        """Whether the other processes have ended this call of `fit`."""
        return self._parts[0] > self._call

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self._parts[1]

    @property
    def step(self) -> int:
        """The number of the next step in its epoch, from 0."""
        return self._parts[2]

    def end_step(self) -> None:
        """Goes on to the next step.

        Raises:
            WrongContext: another call of `fit` has begun in this process, and the group is elastic.
        """
        self._check_alone()
        self._set(self.epoch, self.step + 1)

    def end_epoch(self, epoch: int) -> None:
        """Goes on from an epoch to the next one, unless another process has done so.

        Raises:
            WrongContext: see `end_step`.
        """
        self._check_alone()
        if self.epoch == epoch:
            self._set(epoch + 1, 0)

    def end(self) -> None:
        """Ends this call of `fit`: a process that joins later does not train."""
        if not self.is_over and self.epoch != _AFTER:
            self._set(_AFTER, 0)

    def _check_alone(self) -> None:
        if self._shared and self._calls.fits > self._call:
            raise errors.WrongContext(
                "fit was called while another fit of the same elastic strategy was in progress, but its processes "
                "share one place in training; let one fit end before the next"
            )

    @property
    def _parts(self) -> tuple[int, int, int]:
        return _split(self._shared.progress if self._shared else self._own)

    def _set(self, epoch: int, step: int) -> None:
        progress = _progress(self._call, epoch, step)
        if self._shared:
            self._shared.progress = progress
        else:
            self._own = progress


class EvaluationPlace:
    """The place of a call of `evaluate` among those of a script. Another process may have ended it already.

    Args:
        strategy: keeps the number of calls that have ended.

    Attributes:
        is_known: whether the group is elastic, and the call is before any training or after `fit`, so that a process
            that joins comes to it, too. Within `fit` or a loop, a process that joins may have begun later, so that its
            calls have other numbers.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        strategy.share_state()
        calls = _calls.setdefault(strategy, _Calls())
        self._number, place = calls.evaluations, _split(strategy.progress)
        outside = place[:2] >= (calls.fits, _AFTER) if calls.fits else place == (0, 0, 0)
        self.is_known = strategy.may_grow and (outside or strategy.evaluations > self._number)
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


def _split(progress: int) -> tuple[int, int, int]:
    """Returns the number of the call of `fit`, the epoch and the step."""
    step, epoch = progress % (1 << _STEP_BITS), (progress >> _STEP_BITS) % (1 << _EPOCH_BITS)
    return progress >> (_EPOCH_BITS + _STEP_BITS), epoch, step


__all__ = ["EvaluationPlace", "FitPlace"]
