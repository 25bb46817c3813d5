"""The shell around the cluster machine: a lock, a clock, a ticker, and the thread that makes decisions durable.

A decision has no visible consequence before it is durable: no reply, no event for watchers, no call to a server. So
this process can fail at any moment, and the next coordinator continues where it was.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from shoal import errors
from shoal._checkpoint import CheckpointStorage
from shoal.events import Event as JobEvent
from shoal.status import Role
from shoal_coordinator.cluster import Cluster, ClusterPolicy, ExpiryHold
from shoal_coordinator.effects import EffectRunner, Report
from shoal_coordinator.messages import CheckpointPublished, CutHeld, Effect, HoldResult, JobRef, ServerRef, events
from shoal_coordinator.persistence import ClusterRecords, Store, restored

_log = structlog.get_logger(__name__)

# Seconds between two checks of a watcher whether its caller is still there.
_WATCH_POLL_S = 1.0
# Seconds between two checks for members to declare dead, at most, so that one is out of every barrier within a second
# after its heartbeat timeout, whatever that is. And the number of checks after which unused channels are closed.
_TICK_S, _CHANNELS_EVERY = 0.25, 4
# Frequent events that do not concern watchers.
_UNWATCHED = events.HeartbeatReceived | events.LeaseRequested


def steady_clock() -> Callable[[], float]:
    """Returns a clock that starts at the current Unix time, and never jumps or goes back."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


@dataclass(frozen=True, slots=True)
class Observer:
    """Callbacks for the coordinator's metrics. Any thread may call them, and never under the lock.

    Attributes:
        handled: Called with each handled event.
        refused: Called with the error code of each refused event.
        died: Called with the role of each member that is declared dead.
        performed: Called with the kind of each finished effect, and whether it succeeded.
        retried: Called for each repeated call to a server.
        written: Called for each write with the seconds that it took and the number of records.
    """

    handled: Callable[[events.ClusterEvent[Any]], None] = lambda _event: None
    refused: Callable[[str], None] = lambda _code: None
    died: Callable[[Role], None] = lambda _role: None
    performed: Callable[[str, bool], None] = lambda _effect, _done: None
    retried: Callable[[], None] = lambda: None
    written: Callable[[float, int], None] = lambda _seconds, _records: None


class Coordinator:
    """The owner of the cluster's state.

    Args:
        store: The store with the state, or an empty one. The caller closes it after `stop`.
        cluster: The id for a new cluster.
        policy: The operator's settings.
        observer: Callbacks for metrics.
        clock: Returns seconds of Unix time that never jump.
        on_failure: Called once from the writer's thread when the store has failed. The coordinator then answers no
            further calls.
        storage: The checkpoint storage. None means that the cluster has none.

    Raises:
        StoreUnreadable: The store's records are invalid.
    """

    def __init__(
        self,
        store: Store,
        cluster: str,
        policy: ClusterPolicy,
        observer: Observer | None = None,
        clock: Callable[[], float] | None = None,
        on_failure: Callable[[errors.ShoalError], None] = lambda _: None,
        storage: CheckpointStorage | None = None,
    ) -> None:
        self._clock = clock or steady_clock()
        self._observer = observer or Observer()
        self._store = store  # used by this thread, then by the writer's thread
        self._on_failure = on_failure
        # Guards _machine with all its state, and the state of decisions below. Under it the coordinator only decides:
        # it makes no call, touches no disk and does not wait.
        self._lock = threading.Lock()
        now = self._clock()
        found = restored(store.load(), policy, now)
        self._machine = found or Cluster(cluster, policy, now)
        self._records = ClusterRecords(self._machine)  # read with the lock, as the machine is
        self._changed = threading.Condition(self._lock)  # a job may have a new event, or the coordinator stops
        # The number of decisions that changed something, and the number of them that are durable.
        self._decided = self._durable = 0
        self._effects: list[Effect] = []  # of decisions that are not yet durable
        self._to_write = threading.Condition(self._lock)  # there is a decision to write, or the coordinator stops
        self._written = threading.Condition(self._lock)  # more decisions are durable, or the coordinator stops
        self._closed: errors.ShoalError | None = None  # why the coordinator makes no more decisions
        self._over = False  # no more decisions will be written
        self._stopped = threading.Event()
        self._heartbeat_delays: Callable[[], tuple[float, int]] = lambda: (0.0, 0)
        self._effect_runner = EffectRunner(self, self._observer.performed, storage, self._observer.retried)
        self._ticker = threading.Thread(
            target=self._tick, args=(min(policy.heartbeat_timeout_s / 10, _TICK_S),), name="ticker", daemon=True
        )
        self._writer = threading.Thread(target=self._write_on, name="store", daemon=True)
        with self._lock:
            self._note(self._machine.pending_effects)
        if found:
            self._tell_restored()

    @property
    def has_live_jobs(self) -> bool:
        """Whether any job has not ended. It can be read before `start`."""
        with self._lock:
            return any(not job.state.finished for job in self._machine.jobs(self._clock()))

    @property
    def unwritten(self) -> int:
        """The number of decisions that are not yet durable."""
        with self._lock:
            return self._decided - self._durable

    def start(self, heartbeat_delays: Callable[[], tuple[float, int]] = lambda: (0.0, 0)) -> None:
        """Starts the writer, which submits pending effects of an earlier coordinator, and the ticker.

        Args:
            heartbeat_delays: Returns the longest wait of a heartbeat in the server's queue since its last call, in
                seconds, and the number of refused ones.
        """
        self._heartbeat_delays = heartbeat_delays
        self._writer.start()
        self._ticker.start()

    def stop(self) -> None:
        """Ends watchers, the ticker and the effect runner, and writes all decisions."""
        with self._lock:
            self._stopped.set()
            self._changed.notify_all()
        if self._ticker.is_alive():
            self._ticker.join()
        self._effect_runner.stop()
        with self._lock:
            self._close(errors.Unreachable("the coordinator is stopping; try again after its restart"))
        if self._writer.is_alive():
            self._writer.join()
        self._over = True

    def handle(self, event: events.ClusterEvent[events.R]) -> events.R:
        """Feeds an event to the machine, and waits until the decision is durable. The effect runner gets its effects.

        Returns:
            The result of the event.

        Raises:
            ShoalError: The machine refuses the event.
            Unreachable: The coordinator stops, or its store has failed. The event may or may not count.
        """
        decided = 0
        try:
            with self._lock:
                self._check_open()
                effects: list[Effect] = []
                try:
                    result, effects = self._machine.handle(event, self._clock())
                finally:  # a refused event may have changed the state too
                    decided = self._note(effects)
                if not isinstance(event, _UNWATCHED):
                    self._changed.notify_all()
        except errors.ShoalError as error:
            self._observer.refused(error.code)
            self._await(decided)
            raise
        self._await(decided)
        self._observer.handled(event)
        return result

    @contextmanager
    def reading(self) -> Iterator[tuple[Cluster, float]]:
        """Yields the machine, for reading inside the block, and the time. The block must be short: it holds the lock.

        On exit it waits until the state that was read is durable.

        Raises:
            Unreachable: The coordinator stops, or its store has failed.
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
        """Yields a job's events after a sequence number.

        Args:
            name: The job.
            after: A sequence number.
            wait: Whether to wait for more events, up to the one that ends the job.
            gone: Returns whether the caller has gone.

        Raises:
            UnknownJob: The job does not exist.
            Unreachable: The coordinator stops, or its store has failed.
        """
        with self.reading() as (machine, _):
            log = machine.job(name).log  # stays valid if the job is dropped
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
                raise errors.Unreachable("the coordinator is stopping; watch again after its restart")

    def wake(self) -> None:
        """Makes watchers check whether their callers have gone."""
        with self._lock:
            self._changed.notify_all()

    # The methods of `effects.EffectHost`.

    def report(self, outcome: Report) -> None:
        """Handles the outcome of an effect."""
        self.handle(outcome)

    def report_all(self, outcomes: Sequence[Report]) -> None:
        """Handles the outcomes of effects that ran together, as one event."""
        self.handle(events.OutcomesReceived(tuple(outcomes)))

    def incarnation(self, server: ServerRef) -> int:
        """Returns the incarnation of a live server at this address, or 0."""
        with self._lock:
            return self._machine.members.incarnation_at(server)

    def is_live(self, job: JobRef) -> bool:
        """Returns whether a job has not ended."""
        with self._lock:
            return self._machine.is_live(job)

    def published(self, event: CheckpointPublished) -> bool:
        """Records a complete checkpoint, and returns whether older ones may be removed."""
        return self.handle(event)

    def held(self, event: CutHeld) -> HoldResult:
        """Returns the coordinator's own part of a cut."""
        return self.handle(event)

    def wanted(self, effect: int, server: ServerRef) -> bool:
        """Returns whether a server is alive and the effect is still pending."""
        with self._lock:
            return self._machine.wants(effect, server)

    # The methods that make decisions durable.

    def _note(self, effects: list[Effect]) -> int:
        """Notes a decision, and returns the number of decisions so far.

        It is called with the lock, which keeps the effects in order.
        """
        self._effects += effects
        if effects or self._machine.changed:
            self._decided += 1
            self._to_write.notify()
        return self._decided

    def _await(self, decided: int) -> None:
        """Waits until the first `decided` decisions are durable.

        Raises:
            Unreachable: They may never be.
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
        """Ends decisions. It is called with the lock."""
        self._closed = self._closed or why
        self._stopped.set()
        for condition in (self._to_write, self._written, self._changed):
            condition.notify_all()

    def _write_on(self) -> None:
        """Writes decisions until the end. One write has all decisions that came during the last one."""
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
        self._effect_runner.submit(effects)
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
            self._close(errors.Unreachable(f"the coordinator has stopped: {failure.message}"))
        _log.error("the store has failed; the coordinator refuses all calls", code=failure.code, reason=failure.message)
        self._on_failure(failure)

    # The ticker.

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
        held: ExpiryHold | None = None
        ticks = 0
        while not self._stopped.wait(every_s):
            ticks += 1
            try:
                for member, role in self.handle(events.TimePassed(*self._heartbeat_delays())).items():
                    _log.warning("declared dead", member=member)
                    self._observer.died(role)
                held = self._tell_hold(held)
                if ticks % _CHANNELS_EVERY == 0:
                    self._effect_runner.keep_channels(self._live_servers())
            except errors.Unreachable:  # the coordinator stops
                return
            except Exception:  # the ticker must survive a defect, since it declares members dead
                _log.exception("tick failed")

    def _live_servers(self) -> dict[ServerRef, int]:
        with self._lock:
            return self._machine.members.live_servers

    def _tell_hold(self, told: ExpiryHold | None) -> ExpiryHold | None:
        """Logs the beginning and the end of a hold of expiry. Returns the hold in progress."""
        with self._lock:
            hold = self._machine.members.breaker.hold
        if hold and not told:
            _log.warning("declaring no member dead for a while", silent=hold.silent, reason=hold.why)
        elif told and not hold:
            _log.warning("silent members are declared dead again", held_s=round(self._clock() - told.since, 1))
        return hold
