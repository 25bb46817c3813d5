"""Ranges of the samples of one epoch after another, for loops over epochs."""

from collections.abc import Callable, Iterator

from shoal._session.batches import SampleRange


class EpochRanges:
    """Divides the ranges of a session into epochs.

    Attributes:
        epoch: number of the epoch that was read last, from 0.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._ranges: Iterator[SampleRange] | None = None  # of the loop in progress
        self._next: SampleRange | None = None  # the first range of the next epoch

    def of_one(self, ranges: Callable[[], Iterator[SampleRange]]) -> Iterator[SampleRange]:
        """Yields the ranges of the next epoch, or the rest of one whose loop has ended early.

        Args:
            ranges: returns all ranges from the last push on; see `shoal.Session.ranges`.
        """
        following, leased = self._ranges, self._next
        self._ranges = self._next = None  # a loop that ends early continues after its last push
        if following is None:
            following = ranges()
            leased = next(following, None)
        if leased:
            self.epoch = leased.epoch
        while leased and leased.epoch == self.epoch:
            yield leased
            leased = next(following, None)
        if leased:
            self._ranges, self._next = following, leased


__all__ = ["EpochRanges"]
