"""The shell around the cluster machine: one lock, a clock, a ticker; what is decided under the lock is done outside."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from shoal import errors
from shoal.events import Event as JobEvent
from shoal_coordinator import events
from shoal_coordinator.cluster import Cluster, ClusterPolicy
from shoal_coordinator.effects import Performer
from shoal_coordinator.events import R

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

    handled: Callable[[str], None] = lambda _event: None
    refused: Callable[[str], None] = lambda _code: None
    performed: Callable[[str, bool], None] = lambda _effect, _done: None


class Coordinator:
    """Owns the cluster's state.

    Args:
        cluster: its id.
        policy: what the operator decides.
        observer: told of events, refusals and effects.
        clock: gives seconds of Unix time that never jump.
    """

    def __init__(
        self,
        cluster: str,
        policy: ClusterPolicy,
        observer: Observer | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock or steady_clock()
        self._observer = observer or Observer()
        # Guards _machine and all within it. Nothing is done under it but to decide: no call, no disk, no waiting.
        self._lock = threading.Lock()
        self._machine = Cluster(cluster, policy, self._clock())
        self._changed = threading.Condition(self._lock)  # a job may have a new event, or the end has come
        self._stopped = threading.Event()
        self._performer = Performer(self._take_outcome, self._observer.performed)
        self._ticker = threading.Thread(target=self._tick, args=(policy.lease_s / 10,), name="ticker", daemon=True)

    def start(self) -> None:
        """Begins to look at leases."""
        self._ticker.start()

    def stop(self) -> None:
        """Ends watchers, the ticker and what is being done."""
        with self._lock:
            self._stopped.set()
            self._changed.notify_all()
        if self._ticker.is_alive():
            self._ticker.join()
        self._performer.stop()

    def handle(self, event: events.Event[R]) -> R:
        """Feeds an event to the machine and has its effects performed.

        Raises:
            ShoalError: the machine refuses it.
        """
        try:
            with self._lock:
                answer, effects = self._machine.handle(event, self._clock())
                # Under the lock, so that effects are in line in the order in which they were decided.
                self._performer.submit(effects)
                if not isinstance(event, _UNWATCHED):
                    self._changed.notify_all()
        except errors.ShoalError as error:
            self._observer.refused(error.code)
            raise
        self._observer.handled(type(event).__name__)
        return answer

    @contextmanager
    def reading(self) -> Iterator[tuple[Cluster, float]]:
        """The machine, to be read inside the block, and the time. The block must be short: it holds the lock."""
        with self._lock:
            yield self._machine, self._clock()

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
            Unreachable: the coordinator stops.
        """
        with self._lock:
            log = self._machine.job(name).log  # outlives the job, should that be forgotten
        while True:
            with self._lock:
                while wait and log.last <= after and not log.ended and not self._stopped.is_set() and not gone():
                    self._changed.wait(_WATCH_POLL_S)
                fresh, ended = log.after(after), log.ended
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

    def _take_outcome(self, outcome: events.Event[None]) -> None:
        if isinstance(outcome, events.EffectFailed):
            _log.warning("effect failed", job=outcome.job.name, reason=outcome.reason)
        self.handle(outcome)

    def _tick(self, every_s: float) -> None:
        while not self._stopped.wait(every_s):
            try:
                for member in self.handle(events.TimePassed()):
                    _log.warning("declared dead", member=member)
            except Exception:  # the ticker must outlive a defect, or nobody would ever be declared dead again
                _log.exception("tick failed")
