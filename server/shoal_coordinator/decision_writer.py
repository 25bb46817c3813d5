"""Durability of a coordinator's decisions: the thread that writes them, and the waits until they are written.

One write has all decisions that were made during the previous write. Their effects are carried out after it.
"""

import threading
import time
from collections.abc import Callable, Mapping

import structlog

from shoal import errors
from shoal_coordinator.cluster import Cluster
from shoal_coordinator.messages import Effect
from shoal_coordinator.persistence import ClusterRecords, Store, encode_records

_log = structlog.get_logger(__name__)


class DecisionWriter:
    """The decisions of one coordinator, in order, and how many of them are durable.

    Args:
        lock: Guards the machine and the state of this class. The methods say whether the caller holds it.
        machine: The machine, whose changed records are written.
        store: The store, which only the writer's thread uses after `start`.
        submit: Takes the effects of decisions that are durable.
        written: Called after each write, with its seconds and the number of changed records.
        on_close: Called with the lock, whenever `close` is.
        on_failure: Called once from the writer's thread when the store has failed.

    Attributes:
        decided: The number of decisions that changed something. Read it with the lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        machine: Cluster,
        store: Store,
        submit: Callable[[list[Effect]], None],
        written: Callable[[float, int], None],
        on_close: Callable[[], None],
        on_failure: Callable[[errors.ShoalError], None],
    ) -> None:
        self._lock, self._machine, self._store = lock, machine, store
        self._submit, self._report_write = submit, written
        self._on_close, self._on_failure = on_close, on_failure
        self._records = ClusterRecords(machine)  # read with the lock, as the machine is
        self.decided = self._durable = 0
        self._effects: list[Effect] = []  # of decisions that are not yet durable
        self._other_changes: dict[str, bytes | None] = {}  # of records that the machine does not know, not yet durable
        self._to_write = threading.Condition(lock)  # there is a decision to write, or the coordinator stops
        self._written = threading.Condition(lock)  # more decisions are durable, or the coordinator stops
        self._closed: errors.ShoalError | None = None  # why the coordinator makes no more decisions
        self._over = False  # no more decisions will be written
        self._thread = threading.Thread(target=self._write_on, name="store", daemon=True)

    @property
    def unwritten(self) -> int:
        """The number of decisions that are not yet durable. Read it with the lock."""
        return self.decided - self._durable

    def start(self) -> None:
        """Starts the thread, which first submits the effects that are noted already."""
        self._thread.start()

    def stop(self, why: errors.ShoalError) -> None:
        """Ends decisions, and writes all of them. It is called without the lock."""
        with self._lock:
            self.close(why)
        if self._thread.is_alive():
            self._thread.join()
        self._over = True

    def check_open(self) -> None:
        """Checks, with the lock, that a decision may be made.

        Raises:
            Unreachable: The coordinator stops, or its store has failed.
        """
        if self._closed:
            raise self._closed

    def note(self, effects: list[Effect]) -> int:
        """Notes a decision, with the lock, which keeps the effects in order. Returns the number of decisions so far."""
        self._effects += effects
        if effects or self._machine.changed:
            self.decided += 1
            self._to_write.notify()
        return self.decided

    def note_others(self, changes: Mapping[str, bytes | None]) -> int:
        """Notes, with the lock, changes of records that the machine does not know; returns as `note`."""
        self._other_changes |= changes
        self.decided += 1
        self._to_write.notify()
        return self.decided

    def wait_for(self, decided: int) -> None:
        """Waits, without the lock, until the first `decided` decisions are durable.

        Raises:
            Unreachable: The decisions may never become durable.
        """
        if self._durable >= decided:  # without the lock, as for most heartbeats and reports: it only grows
            return
        with self._lock:
            while self._durable < decided:
                if self._over and self._closed:
                    raise self._closed
                self._written.wait()

    def close(self, why: errors.ShoalError) -> None:
        """Ends decisions. It is called with the lock."""
        self._closed = self._closed or why
        self._to_write.notify_all()
        self._written.notify_all()
        self._on_close()

    def _write_on(self) -> None:
        """Writes decisions until the end."""
        try:
            while self._write_once():
                pass
        except Exception as error:
            self._fail(error)
        finally:
            with self._lock:
                self._over = True
                self._written.notify_all()

    def _write_once(self) -> bool:
        with self._lock:
            while self._durable == self.decided:
                if self._closed:
                    return False
                self._to_write.wait()
            decided, changed = self.decided, self._records.changes_later()
            others, self._other_changes = self._other_changes, {}
            effects, self._effects = self._effects, []
        changes = encode_records(changed) | others  # without the lock: a placement of 10,000 variables takes 0.1 s
        start = time.perf_counter()
        if changes:
            self._store.apply(changes)
        self._report_write(time.perf_counter() - start, len(changes))
        self._submit(effects)
        with self._lock:
            self._durable = decided
            self._written.notify_all()
        return True

    def _fail(self, error: Exception) -> None:
        """Stops for good, because the machine is ahead of the store and its state must not become visible.

        A retry would not help: after a failed write the state of the disk is unknown until the next coordinator reads
        it.
        """
        failure = error if isinstance(error, errors.ShoalError) else errors.StoreFailed(f"cannot write: {error!r}")
        with self._lock:
            self.close(errors.Unreachable(f"the coordinator has stopped: {failure.message}"))
        _log.error("the store has failed; the coordinator refuses all calls", code=failure.code, reason=failure.message)
        self._on_failure(failure)
