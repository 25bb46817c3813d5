"""Items that a thread takes from an iterator, a few before they are wanted. What they are is not known here."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

# How long `close` waits for the item that is being read. A source that hangs longer keeps its thread, which ends with
# the process at the latest.
_CLOSE_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Raised:
    """What the iterator ended with: nothing, or an error."""

    error: BaseException | None


class Prefetcher(Generic[T]):
    """An iterator over what another one gives, which is read in a thread, at most so many items before they are taken.

    An error comes at the place of the item that could not be read, after all items before it. The other iterator is
    used, and closed, on the thread alone.

    Args:
        items: what to read.
        ahead: items that are read and not taken yet, >= 1, the one that is being read among them.
        prepare: called on the thread before anything is read.
    """

    def __init__(self, items: Iterator[T], ahead: int, *, prepare: Callable[[], object] = lambda: None) -> None:
        self._items = items
        self._prepare = prepare
        self._room = threading.Semaphore(ahead)
        self._ready: queue.SimpleQueue[T | _Raised] = queue.SimpleQueue()  # bounded by _room
        self._closed = threading.Event()
        self._over = False  # the end was taken
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._over or self._closed.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, _Raised):
            self._over = True
            self._thread.join(_CLOSE_GRACE_S)
            if item.error is not None:
                raise item.error
            raise StopIteration
        self._room.release()
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread after the item that it is reading; nothing is given any more."""
        self._closed.set()
        self._room.release()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_GRACE_S)

    def _run(self) -> None:
        end = _Raised(None)
        try:
            self._prepare()
            while self._may_read():
                self._ready.put(next(self._items))
        except StopIteration:
            pass
        except BaseException as error:  # also SystemExit: it is for whoever takes the item, not for this thread
            end = _Raised(error)
        finally:
            self._ready.put(end)
            close: Any = getattr(self._items, "close", None)
            if close is not None:
                with suppress(Exception):
                    close()

    def _may_read(self) -> bool:
        self._room.acquire()
        return not self._closed.is_set()


__all__ = ["Prefetcher"]
