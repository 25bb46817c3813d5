"""Arrays that are sent while others of the same push are still being computed."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from shoal import errors
from shoal._wire.plans import SliceGroup


class PushStream:
    """The arrays of one push, some of which are still to come, in any order.

    One thread adds them. Any number of others send them, each what goes to another server, as soon as it is there.

    Attributes:
        arrays: those that are there, by variable; kept until the push is answered, for it may have to be sent again.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._changed = threading.Condition()  # guards what follows
        self._names: list[str] = []  # in the order in which they came
        self._over = self._failed = False

    @property
    def complete(self) -> bool:
        """Whether no more will come."""
        with self._changed:
            return self._over and not self._failed

    def add(self, name: str, array: np.ndarray) -> None:
        """One more is there."""
        self.arrays[name] = array
        with self._changed:
            self._names.append(name)
            self._changed.notify_all()

    def end(self) -> None:
        """No more will come."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def fail(self) -> None:
        """The rest will never come: whoever sends gives up. Harmless after `end`."""
        with self._changed:
            if not self._over:
                self._failed = self._over = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all are there.

        Raises:
            Cancelled: they never will be.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over)
            self._check()

    def ready(self, groups: Sequence[SliceGroup]) -> Iterator[SliceGroup]:
        """These groups, each once all that it is made of is there.

        Raises:
            Cancelled: the rest will never be.
        """
        lacking = [len(group.names) for group in groups]
        users: dict[str, list[int]] = {}
        for index, group in enumerate(groups):
            for name in group.names:
                users.setdefault(name, []).append(index)
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or len(self._names) > seen)  # noqa: B023 - called at once
                self._check()
                new = self._names[seen:]
            if not new:
                return
            seen += len(new)
            for name in new:
                for index in users.get(name, ()):
                    lacking[index] -= 1
                    if not lacking[index]:
                        yield groups[index]

    def _check(self) -> None:
        if self._failed:
            raise errors.Cancelled("a push was given up: some of its gradients never came")


__all__ = ["PushStream"]
