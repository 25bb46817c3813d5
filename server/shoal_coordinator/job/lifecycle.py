"""The state of one job: which it is in, since when and why, and what its users are told of it. Pure: no clock, no I/O.

A job is pending until a worker has a part in it, starting until its shards have a place, placing until they are on
servers and its workers may train, then running. It becomes pending again when it loses its shards and goes back. From
every state it may end: succeeded, failed or cancelled, and no other state follows. When each of these happens,
`JobMachine` says.
"""

from collections.abc import Callable

from shoal.events import StateChanged
from shoal.status import JobState
from shoal.v1 import state_pb2
from shoal_coordinator.job.counters import JobCounters
from shoal_coordinator.job.event_log import EventLog
from shoal_coordinator.messages import state_code


class Lifecycle:
    """The state of one job. Only `JobMachine` changes it.

    Args:
        now: seconds of Unix time, as in every method: when the job was submitted.
        log: of the job; each change of the state is an event there.
        changed: told that the record of the job's state has changed.
        counters: of the cluster, which counts the ends of jobs.

    Attributes:
        state: the state.
        closing: all workers are through, and the last checkpoint is being taken, or was.
    """

    def __init__(self, now: float, log: EventLog, changed: Callable[[], None], counters: JobCounters) -> None:
        self._log, self._changed, self._counters = log, changed, counters
        self.state = JobState.PENDING
        self.closing = False
        self._reason = ""  # why it failed
        self._waiting_for = ""  # what it waits for
        self.submitted_at, self.started_at, self.finished_at = now, 0.0, 0.0  # 0: not yet

    @property
    def ended(self) -> bool:
        """Whether no other state follows."""
        return self.state.finished

    @property
    def running(self) -> bool:
        """Whether its workers may train."""
        return self.state is JobState.RUNNING

    @property
    def started(self) -> bool:
        """Whether it has ever run."""
        return bool(self.started_at)

    @property
    def reason(self) -> str:
        """What its user is told: why it ended, or else what it waits for."""
        return self._reason or self._waiting_for

    def seconds(self, now: float) -> float:
        """Returns how long it has run, up to its end; 0 if it never ran."""
        return (self.finished_at or now) - self.started_at if self.started_at else 0.0

    def enter(self, state: JobState, reason: str, now: float) -> None:
        """Enters a state, and tells those who watch."""
        self.state = state
        self._changed()
        self._log.append(StateChanged(self._log.next, now, state, reason))

    def note(self, reason: str, now: float) -> None:
        """Tells those who watch of something that leaves the state as it is."""
        self.enter(self.state, reason, now)

    def wait_for(self, what: str, now: float) -> None:
        """Tells the user what the job lacks, once when that changes; "" is nothing."""
        if what == self._waiting_for:
            return
        if what:
            self.note(what, now)
        self._waiting_for = what
        self._changed()

    def run(self, now: float) -> None:
        """Its workers may train; it may have run before."""
        self.started_at = self.started_at or now
        self.enter(JobState.RUNNING, "", now)

    def close(self, now: float) -> None:
        """All workers are through, and the last checkpoint is to be taken."""
        self.closing = True
        self.note("all workers are through; the last checkpoint is taken", now)

    def reopen(self) -> None:
        """Work is left, or will come; no last checkpoint is taken now. The state that is entered next is recorded."""
        self.closing = False

    def end(self, state: JobState, reason: str, now: float) -> None:
        """Enters its last state."""
        self.finished_at, self._reason, self._waiting_for = now, reason, ""
        self.enter(state, reason, now)
        self._counters.count_end(state)

    def write_to(self, record: state_pb2.JobRecord) -> None:
        """Writes it down, as part of the job's record."""
        record.state, record.reason, record.lack = state_code(self.state), self._reason, self._waiting_for
        record.submitted_at, record.started_at = self.submitted_at, self.started_at
        record.finished_at, record.closing = self.finished_at, self.closing

    def restore_from(self, record: state_pb2.JobRecord) -> None:
        """Goes on from a record."""
        self.state = JobState.from_proto(record.state)
        self._reason, self._waiting_for = record.reason, record.lack
        self.submitted_at, self.started_at = record.submitted_at, record.started_at
        self.finished_at, self.closing = record.finished_at, record.closing

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self.ended == bool(self.finished_at) == self._log.ended
        assert self.started_at or not self.running
