"""The prefetcher: a thread that reads an iterator a few items ahead."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

# Time that `close` waits for the current item. If the source blocks for longer, the daemon thread continues.
_CLOSE_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Raised:
    """The end of the iterator, with its error if it failed."""

    error: BaseException | None


class Prefetcher(Generic[T]):
    """An iterator over the items of another one, which a thread reads ahead.

    If an item cannot be read, its error is raised after all items before it. Only the thread uses and closes the other
    iterator.

    Args:
        items: the other iterator.
        ahead: largest number of items read ahead, >= 1, including the current one.
        prepare: called on the thread before the first item.
    """

    def __init__(self, items: Iterator[T], ahead: int, *, prepare: Callable[[], object] = lambda: None) -> None:
        self._items = items
        self._prepare = prepare
        self._room = threading.Semaphore(ahead)
        self._ready: queue.SimpleQueue[T | _Raised] = queue.SimpleQueue()  # bounded by _room
        self._closed = threading.Event()
        self._over = False  # whether the end was reached
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
        """Stops the thread after its current item. The iterator then has no more items."""
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
        except BaseException as error:  # also SystemExit: the consumer of the item raises it
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
