"""The shell around the cluster machine: one lock, a clock, a ticker; what is decided under the lock is done outside.

Nothing that follows from a decision is seen or done before the decision is durable: no answer, no event for those who
watch, no call to a server. So this process may be lost at any moment, and the next one goes on as if it were the same.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from shoal import errors
from shoal._checkpoint import CheckpointStorage
from shoal.events import Event as JobEvent
from shoal.status import Role
from shoal_coordinator.cluster import Cluster, ClusterPolicy
from shoal_coordinator.effects import EffectRunner, Report
from shoal_coordinator.messages import CutHeld, Effect, HoldResult, ServerRef, events
from shoal_coordinator.persistence import ClusterRecords, Store, restored

_log = structlog.get_logger(__name__)

# How often one that watches looks whether its caller is still there.
_WATCH_POLL_S = 1.0
# Events that happen all the time and that nobody watches for.
_UNWATCHED = events.HeartbeatReceived | events.LeaseRequested


def steady_clock() -> Callable[[], float]:
    """A clock that shows Unix time when it is made, and from then on neither jumps nor goes back."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


@dataclass(frozen=True, slots=True)
class Observer:
    """Told of what passes through the coordinator, for its metrics; called without the lock, from any thread."""

    handled: Callable[[events.ClusterEvent[Any]], None] = lambda _event: None
    refused: Callable[[str], None] = lambda _code: None
    died: Callable[[Role], None] = lambda _role: None
    performed: Callable[[str, bool], None] = lambda _effect, _done: None
    # A call to a server is repeated.
    retried: Callable[[], None] = lambda: None
    # Seconds that the store took, and how many records.
    written: Callable[[float, int], None] = lambda _seconds, _records: None


class Coordinator:
    """Owns the cluster's state.

    Args:
        store: has the state, or nothing; closed by whoever opened it, after `stop`.
        cluster: id for a cluster that begins now.
        policy: what the operator decides.
        observer: told of events, refusals, deaths, effects and writes.
        clock: gives seconds of Unix time that never jump.
        on_failure: told once, from the thread that writes, that the store has failed; nothing is answered from then on.
        folder: of checkpoints; None: the cluster has none.

    Raises:
        StoreUnreadable: what the store has makes no sense.
    """

    def __init__(
        self,
        store: Store,
        cluster: str,
        policy: ClusterPolicy,
        observer: Observer | None = None,
        clock: Callable[[], float] | None = None,
        on_failure: Callable[[errors.ShoalError], None] = lambda _: None,
        folder: CheckpointStorage | None = None,
    ) -> None:
        self._clock = clock or steady_clock()
        self._observer = observer or Observer()
        self._store = store  # used by this thread, then by the writer
        self._on_failure = on_failure
        # Guards _machine and all within it, and what is said of decisions below. Nothing is done under it but to
        # decide: no call, no disk, no waiting.
        self._lock = threading.Lock()
        now = self._clock()
        found = restored(store.load(), policy, now)
        self._machine = found or Cluster(cluster, policy, now)
        self._records = ClusterRecords(self._machine)  # read with the lock, as the machine is
        self._changed = threading.Condition(self._lock)  # a job may have a new event, or the end has come
        # How many decisions there were that changed something, and how many of the first ones are durable.
        self._decided = self._durable = 0
        self._effects: list[Effect] = []  # of decisions that are not durable yet
        self._to_write = threading.Condition(self._lock)  # there is a decision that is not durable, or the end has come
        self._written = threading.Condition(self._lock)  # more decisions are durable, or the end has come
        self._closed: errors.ShoalError | None = None  # why nothing more is decided
        self._over = False  # nothing more is written either
        self._stopped = threading.Event()
        self._performer = EffectRunner(self, self._observer.performed, folder, self._observer.retried)
        self._ticker = threading.Thread(
            target=self._tick, args=(policy.heartbeat_timeout_s / 10,), name="ticker", daemon=True
        )
        self._writer = threading.Thread(target=self._write_on, name="store", daemon=True)
        with self._lock:
            self._note(self._machine.pending_effects)
        if found:
            self._tell_restored()

    @property
    def has_live_jobs(self) -> bool:
        """Whether there are jobs that have not ended, durable or not; may be asked before the start."""
        with self._lock:
            return any(not job.state.finished for job in self._machine.jobs(self._clock()))

    @property
    def unwritten(self) -> int:
        """Decisions that are not durable yet."""
        with self._lock:
            return self._decided - self._durable

    def start(self) -> None:
        """Begins to write, to do what is left of an earlier life, and to look at leases."""
        self._writer.start()
        self._ticker.start()

    def stop(self) -> None:
        """Ends watchers, the ticker and what is being done, and writes what was decided."""
        with self._lock:
            self._stopped.set()
            self._changed.notify_all()
        if self._ticker.is_alive():
            self._ticker.join()
        self._performer.stop()
        with self._lock:
            self._close(errors.Unreachable("the coordinator is stopping; try again when it is back"))
        if self._writer.is_alive():
            self._writer.join()
        self._over = True

    def handle(self, event: events.ClusterEvent[events.R]) -> events.R:
        """Feeds an event to the machine, makes what follows durable, and has the effects performed.

        Raises:
            ShoalError: the machine refuses it.
            Unreachable: the coordinator stops, or its store has failed: whether this counts, the next one will say.
        """
        decided = 0
        try:
            with self._lock:
                self._check_open()
                effects: list[Effect] = []
                try:
                    answer, effects = self._machine.handle(event, self._clock())
                finally:  # also when it is refused: what came to light on the way stands
                    decided = self._note(effects)
                if not isinstance(event, _UNWATCHED):
                    self._changed.notify_all()
        except errors.ShoalError as error:
            self._observer.refused(error.code)
            self._await(decided)
            raise
        self._await(decided)
        self._observer.handled(event)
        return answer

    @contextmanager
    def reading(self) -> Iterator[tuple[Cluster, float]]:
        """The machine, to be read inside the block, and the time. The block must be short: it holds the lock.

        When it is left, all that was read there is durable.

        Raises:
            Unreachable: the coordinator stops, or its store has failed.
        """
        decided = 0
        try:
            with self._lock:
                self._check_open()
                decided = self._decided
                yield self._machine, self._clock()
        finally:
            self._await(decided)

    def watch(
        self, name: str, after: int, *, wait: bool, gone: Callable[[], bool] = lambda: False
    ) -> Iterator[JobEvent]:
        """Yields a job's events behind the number `after`; with `wait`, as they come, up to the one that ends it.

        Args:
            name: of the job.
            after: a sequence number.
            wait: for more.
            gone: says that nobody listens any more.

        Raises:
            UnknownJob: there is no such job.
            Unreachable: the coordinator stops, or its store has failed.
        """
        with self.reading() as (machine, _):
            log = machine.job(name).log  # outlives the job, should that be forgotten
        while True:
            with self._lock:
                while wait and log.last <= after and not log.ended and not self._stopped.is_set() and not gone():
                    self._changed.wait(_WATCH_POLL_S)
                fresh, ended, decided = log.after(after), log.ended, self._decided
            self._await(decided)
            yield from fresh
            after = fresh[-1].sequence if fresh else after
            if ended or not wait or gone():
                return
            if self._stopped.is_set():
                raise errors.Unreachable("the coordinator is stopping; watch on when it is back")

    def wake(self) -> None:
        """Has those that watch look whether their callers are gone."""
        with self._lock:
            self._changed.notify_all()

    # What performing effects needs: `effects.EffectHost`.

    def report(self, outcome: Report) -> None:
        """Takes in what became of an effect."""
        self.handle(outcome)

    def held(self, event: CutHeld) -> HoldResult:
        """The coordinator's own part of a cut."""
        return self.handle(event)

    def wanted(self, effect: int, server: ServerRef) -> bool:
        """Whether a server lives, and what it is to do was not given up."""
        with self._lock:
            return self._machine.wants(effect, server)

    # What makes decisions durable.

    def _note(self, effects: list[Effect]) -> int:
        """Takes down a decision, and how many there were; called with the lock, which keeps effects in their order."""
        self._effects += effects
        if effects or self._machine.changed:
            self._decided += 1
            self._to_write.notify()
        return self._decided

    def _await(self, decided: int) -> None:
        """Waits until the first so many decisions are durable.

        Raises:
            Unreachable: they may never be.
        """
        with self._lock:
            while self._durable < decided:
                if self._over and self._closed:
                    raise self._closed
                self._written.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed

    def _close(self, why: errors.ShoalError) -> None:
        """Decides nothing any more; called with the lock."""
        self._closed = self._closed or why
        self._stopped.set()
        for condition in (self._to_write, self._written, self._changed):
            condition.notify_all()

    def _write_on(self) -> None:
        """Writes all decisions that wait, at once, again and again: as many as come while the disk is at work."""
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
            while self._durable == self._decided:
                if self._closed:
                    return False
                self._to_write.wait()
            decided, changes = self._decided, self._records.changes()
            effects, self._effects = self._effects, []
        start = time.perf_counter()
        if changes:
            self._store.apply(changes)
        self._observer.written(time.perf_counter() - start, len(changes))
        self._performer.submit(effects)
        with self._lock:
            self._durable = decided
            self._written.notify_all()
        return True

    def _fail(self, error: Exception) -> None:
        """Stops for good: the machine is ahead of the store, and nobody may see where it is.

        Trying again would not do. Once a write has failed, nobody knows what the disk has; the next coordinator
        reads it.
        """
        failure = error if isinstance(error, errors.ShoalError) else errors.StoreFailed(f"cannot write: {error!r}")
        with self._lock:
            self._close(errors.Unreachable(f"the coordinator has stopped: {failure.message}"))
        _log.error("the store has failed; nothing is answered any more", code=failure.code, reason=failure.message)
        self._on_failure(failure)

    # What comes by itself.

    def _tell_restored(self) -> None:
        jobs = self._machine.jobs(self._clock())
        _log.info(
            "restored",
            cluster=self._machine.status(self._clock()).cluster,
            jobs=len(jobs),
            live=sum(not job.state.finished for job in jobs),
            to_do=len(self._machine.pending_effects),
        )

    def _tick(self, every_s: float) -> None:
        while not self._stopped.wait(every_s):
            try:
                for member, role in self.handle(events.TimePassed()).items():
                    _log.warning("declared dead", member=member)
                    self._observer.died(role)
            except errors.Unreachable:  # the end has come
                return
            except Exception:  # the ticker must outlive a defect, or nobody would ever be declared dead again
                _log.exception("tick failed")
