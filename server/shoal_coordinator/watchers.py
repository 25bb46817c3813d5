"""Watchers: the count of open streams, with a limit for all callers together and a share for each caller."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shoal._limits import Limit
from shoal._security import Principal


class Watchers:
    """The open streams of one kind. Thread-safe.

    The share of a caller is less than the limit, so one caller cannot keep all others from watching. Callers whose
    tokens have one name are one caller. A cluster that asks for no tokens does not know its callers, so they have no
    shares.

    Args:
        limit: The limit of streams.
        share: The limit of streams of one caller.
        what: What the streams do, for messages, such as "calls watch jobs".
        most: The number of streams, if it is not the default of `limit`.
    """

    def __init__(self, limit: Limit, share: Limit, what: str, *, most: int | None = None) -> None:
        self._limit, self._share, self._what = limit, share, what
        self.most = limit.default if most is None else most
        self._lock = threading.Lock()  # guards _open
        self._open: Counter[str] = Counter()  # by the name of the caller; empty if it is not known

    @property
    def open(self) -> int:
        """The number of open streams."""
        with self._lock:
            return self._open.total()

    def check(self, caller: Principal | None) -> None:
        """Raises Overloaded if the limit, or the share of the caller, is reached."""
        with self._lock:
            self._check(caller.name if caller else "")

    @contextmanager
    def one_more(self, caller: Principal | None) -> Iterator[None]:
        """Counts a stream inside the block; raises as `check`."""
        name = caller.name if caller else ""
        with self._lock:
            self._check(name)
            self._open[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[name] -= 1
                if not self._open[name]:
                    del self._open[name]

    def _check(self, name: str) -> None:
        if name and self._open[name] >= self._share.default:
            raise self._share.refusal(f"for {name!r}, {self._open[name]} {self._what}", "end one, or try again later")
        if self._open.total() >= self.most:
            raise self._limit.refusal(
                f"{self._open.total()} {self._what}", "end one, or try again later", limit=self.most
            )


__all__ = ["Watchers"]
