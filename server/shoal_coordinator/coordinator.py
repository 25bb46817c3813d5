"""The shell around the cluster machine: a lock, a clock, a ticker, and the writer that makes decisions durable.

A decision has no visible consequence before it is durable: no reply, no event for watchers, no call to a server. So
this process can fail at any moment, and the next coordinator continues where this one stopped.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from shoal import errors
from shoal._checkpoint import CheckpointStorage
from shoal.events import Event as JobEvent
from shoal_coordinator.cluster import Cluster, ClusterPolicy, ExpiryHold, ListedJob, listed
from shoal_coordinator.decision import Check, Decision, allow
from shoal_coordinator.decision_writer import DecisionWriter
from shoal_coordinator.effect_host import MachineHost
from shoal_coordinator.effects import CredentialsFor, EffectRunner, GrantFor, no_credentials, no_grant
from shoal_coordinator.job_waits import EntryWait, JobWaits, Wake, wake_all
from shoal_coordinator.messages import Effect, ProgramDescription, events, record_keys
from shoal_coordinator.observer import ClusterLog, Observer
from shoal_coordinator.persistence import Store, restored
from shoal_coordinator.ticker import Ticker, steady_clock

# Seconds between two checks of a watcher whether its caller is still there.
_WATCH_POLL_S = 1.0
# Jobs whose status is read with the lock at a time.
_LISTED_AT_A_TIME = 50


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
        credentials_for: Returns what the coordinator presents to a server, by its member id.
        grant_for: Signs the copies that servers make.

    Raises:
        StoreUnreadable: The store's records are invalid.

    Attributes:
        access_records: The stored records of access, by key.
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
        credentials_for: CredentialsFor = no_credentials,
        grant_for: GrantFor = no_grant,
    ) -> None:
        self._clock = clock or steady_clock()
        self._observer = observer or Observer()
        # Guards _machine with all its state, the waits, and what the writer has noted. Under it the coordinator only
        # decides: it makes no call, touches no disk and does not wait.
        self._lock = threading.Lock()
        now = self._clock()
        records = store.load()
        self.access_records = {key: records.pop(key) for key in [*records] if key.startswith(record_keys.ACCESS)}
        found = restored(records, policy, now)
        self._machine = found or Cluster(cluster, policy, now)
        self._waits = JobWaits(self._lock)
        self._stopped = threading.Event()
        host = MachineHost(self, self._machine, self._lock)
        self._effect_runner = EffectRunner(
            host,
            self._observer.performed,
            storage,
            self._observer.retried,
            credentials_for=credentials_for,
            grant_for=grant_for,
        )
        self._ticker = Ticker(self, policy.heartbeat_timeout_s, self._observer.died, self._clock)
        self._writer = DecisionWriter(
            self._lock,
            self._machine,
            store,
            self._effect_runner.submit,
            self._observer.written,
            self._end_waits,
            on_failure,
        )
        with self._lock:
            self._writer.note(self._machine.pending_effects)
        self._log = ClusterLog(self._machine, now if found else None)

    @property
    def has_live_jobs(self) -> bool:
        """Whether any job has not ended. It can be read before `start`."""
        with self._lock:
            return bool(self._machine.listing.live_jobs)

    @property
    def heartbeat_interval_s(self) -> float:
        """The seconds from one heartbeat or report of a member to the next, as members are told now."""
        return self._machine.members.heartbeat_interval_s  # without the lock: one count, and numbers that never change

    @property
    def unwritten(self) -> int:
        """The number of decisions that are not yet durable."""
        with self._lock:
            return self._writer.unwritten

    @property
    def waiting_workers(self) -> int:
        """The number of workers whose call waits for their entry into a job."""
        with self._lock:
            return self._waits.entries

    def start(
        self,
        heartbeat_delays: Callable[[], tuple[float, int]] = lambda: (0.0, 0),
        each_second: Callable[[], object] = bool,
    ) -> None:
        """Starts the writer, which submits pending effects of an earlier coordinator, and the ticker, as it says."""
        self._writer.start()
        self._ticker.start(heartbeat_delays, each_second)

    def stop(self) -> None:
        """Ends all waits, the ticker and the effect runner, and writes all decisions."""
        with self._lock:
            self._stopped.set()
            wakes = self._waits.end()
        wake_all(wakes)
        self._ticker.stop()
        self._effect_runner.stop()
        self._writer.stop(errors.Unreachable("the coordinator is stopping; try again after its restart"))

    def handle(self, event: events.ClusterEvent[events.R], check: Check = allow) -> events.R:
        """Feeds an event to the machine, and waits until the decision is durable. The effect runner gets its effects.

        Args:
            event: The event.
            check: Raises an error if the caller may not cause the event. It runs with the lock.

        Returns:
            The result of the event.

        Raises:
            ShoalError: The machine or the check refuses the event.
            Unreachable: The coordinator stops, or its store has failed. The event may or may not count.
        """
        decision = Decision()
        try:
            try:
                with self._lock:
                    result = self._decide(event, decision, check)
            finally:
                wake_all(decision.wakes)
        except errors.ShoalError as error:
            self._observer.refused(error.code)
            self._writer.wait_for(decision.number)
            raise
        self._writer.wait_for(decision.number)
        self._observer.handled(event)
        self._log.handled(event)
        return result

    def join(self, event: events.JoinRequested, wait_s: float, wake: Wake, check: Check = allow) -> Callable[[], None]:
        """Feeds a worker's Join to the machine, and lets the worker wait without a thread.

        Args:
            event: The request.
            wait_s: Seconds to wait at most.
            wake: Called once, on any thread, when it is time to `handle` the event and to answer: the worker may train,
                has to send the given values or has no assignment any more, the job has ended, the time is over, the
                event is refused, the worker has called again, or the coordinator stops. It must not block.
            check: As for `handle`.

        Returns:
            A function that ends the wait early. It may be called at any time, and more than once.
        """
        decision, wait = Decision(), None
        try:
            with self._lock:
                result = self._decide(event, decision, check)
                if not (result.ends_wait or self._stopped.is_set()):
                    job = self._machine.job(event.job)
                    wait = EntryWait(job.ref.submission, event.worker, self._clock() + wait_s, wake)
                    decision.wakes += self._waits.add(job, wait)
        except errors.ShoalError:  # `handle` meets the same error, and reports it
            wait = None
        if wait is None:
            decision.wakes.append(wake)
        wake_all(decision.wakes)

        def end() -> None:
            if wait:
                with self._lock:
                    wakes = self._waits.discard(wait)
                wake_all(wakes)

        return end

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
                self._writer.check_open()
                decided = self._writer.decided
                yield self._machine, self._clock()
        finally:
            self._writer.wait_for(decided)

    def plan_shards(self, job: str, description: ProgramDescription) -> None:
        """Plans the shards of a job that is about to be described, so that the decision finds the plan."""
        with self._lock:
            plan = self._machine.shard_plan(job)
        if plan:
            with suppress(errors.InvalidJob):  # the decision meets the same error, and reports it
                plan.layouts(description)

    def list_jobs(self, count: int, before: int | None = None, ended: int | None = None) -> list[ListedJob]:
        """Returns the status of jobs, newest first. It takes the lock for a few jobs at a time.

        Args:
            count: Maximum number of jobs.
            before: Only jobs with an earlier submission than this one. None means all.
            ended: Only this many of the newest ended jobs, on all pages together. None means all.

        Raises:
            Unreachable: The coordinator stops, or its store has failed.
        """
        with self.reading() as (machine, _):
            jobs = machine.listing.newest(count, before, ended)
        found: list[ListedJob] = []
        while len(found) < len(jobs):
            with self.reading() as (_, now):
                found += [listed(job, now) for job in jobs[len(found) : len(found) + _LISTED_AT_A_TIME]]
        return found

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
            job = machine.job(name)
            log, submission = job.log, job.ref.submission  # these stay valid if the job is dropped
            changed = self._waits.watch(submission)
        try:
            while True:
                with self._lock:
                    while wait and log.last <= after and not log.ended and not self._stopped.is_set() and not gone():
                        changed.wait(_WATCH_POLL_S)
                    newer, ended, decided = log.copied_after(after), log.ended, self._writer.decided
                self._writer.wait_for(decided)
                yield from (fresh := newer())
                after = fresh[-1].sequence if fresh else after
                if ended or not wait or gone():
                    return
                if self._stopped.is_set():
                    raise errors.Unreachable("the coordinator is stopping; watch again after its restart")
        finally:
            with self._lock:
                self._waits.unwatch(submission)

    def wake(self) -> None:
        """Makes watchers check whether their callers have gone."""
        with self._lock:
            self._waits.wake_watchers()

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Writes records that the machine does not know. They are durable when the method returns.

        Raises:
            Unreachable: The coordinator stops, or its store has failed.
        """
        with self._lock:
            self._writer.check_open()
            decided = self._writer.note_others(changes)
        self._writer.wait_for(decided)

    def end_expired_waits(self) -> ExpiryHold | None:
        """Ends the waits of workers whose time is over. Returns the hold of expiry in progress."""
        with self._lock:
            wakes, hold = self._waits.expired(self._clock()), self._machine.members.breaker.hold
        wake_all(wakes)
        return hold

    def close_unused_channels(self) -> None:
        """Closes the channels to servers that are gone."""
        with self._lock:
            live = self._machine.members.live_servers
        self._effect_runner.keep_channels(live)

    def _decide(self, event: events.ClusterEvent[events.R], decision: Decision, check: Check = allow) -> events.R:
        """Feeds an event to the machine. It is called with the lock.

        Args:
            event, check: As for `handle`.
            decision: Receives the decision's number, and whom to wake after the lock is released, also if this raises.

        Returns:
            The result of the event.

        Raises:
            ShoalError: As for `handle`.
        """
        self._writer.check_open()
        effects: list[Effect] = []
        try:
            check(self._machine)
            result, effects = self._machine.handle(event, self._clock())
        finally:  # a refused event may have changed the state too
            decision.number = self._writer.note(effects)
            changed = self._machine.take_changed_jobs()
            decision.wakes += [*self._waits.changed(changed), *self._log.lines(changed)]
        return result

    def _end_waits(self) -> None:
        """Ends all waits, when no more decisions are made. It is called with the lock."""
        self._stopped.set()
        wake_all(self._waits.end())  # with the lock, for once: a wake does not block
