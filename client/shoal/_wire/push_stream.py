"""Push streams: arrays that are sent while others of the same push are still being computed."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from shoal import errors
from shoal._wire.plans import SliceGroup


class PushStream:
    """The arrays of one push, which become available one by one, in any order.

    One thread adds arrays. Any number of other threads send them, each to another server, as soon as they are
    available.

    Attributes:
        arrays: the available arrays, by variable. They are kept until the push is answered, because it may be repeated.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._changed = threading.Condition()  # guards the fields below
        self._names: list[str] = []  # in order of arrival
        self._over = self._failed = False

    @property
    def complete(self) -> bool:
        """Whether all arrays are available."""
        with self._changed:
            return self._over and not self._failed

    def add(self, name: str, array: np.ndarray) -> None:
        """Adds an array."""
        self.arrays[name] = array
        with self._changed:
            self._names.append(name)
            self._changed.notify_all()

    def end(self) -> None:
        """Marks the stream as complete."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def fail(self) -> None:
        """Marks the stream as failed, so that senders stop waiting. Has no effect after `end`."""
        with self._changed:
            if not self._over:
                self._failed = self._over = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits until all arrays are available.

        Raises:
            Cancelled: the stream failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over)
            self._check()

    def ready(self, groups: Sequence[SliceGroup]) -> Iterator[SliceGroup]:
        """Yields each of these groups once all its arrays are available.

        Raises:
            Cancelled: the stream failed.
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
            raise errors.Cancelled("a push was abandoned: some of its gradients were never computed")


__all__ = ["PushStream"]
