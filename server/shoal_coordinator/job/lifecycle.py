"""The state of one job, with the time and the reason of its last change, and the status that users see.

Pure: no clock, no I/O.

A job is pending until it has a worker. It is starting until the placement of its shards is decided, and placing until
servers hold the shards and its workers may train. Then it is running. It returns to pending when it loses its shards
and restarts. From every state it can succeed, fail or be cancelled. These three states are final. `JobMachine` decides
when the state changes.
"""

from collections.abc import Callable

from shoal.events import StateChanged
from shoal.status import JobState
from shoal.v1 import state_pb2
from shoal_coordinator.job.counters import JobCounters
from shoal_coordinator.job.event_log import EventLog
from shoal_coordinator.messages import state_code

_MAX_WHY = 300  # characters of an error in the reason of a job


def first_line(error: str) -> str:
    """Returns the first line of an error's text, shortened; the last line of a traceback comes first there."""
    return error.partition("\n")[0][:_MAX_WHY]


class Lifecycle:
    """The state of one job. Only `JobMachine` changes it.

    Args:
        now: when the job was submitted, in seconds of Unix time, as in every method.
        log: the job's log; each change of the state is an event there.
        changed: called when the record of the job's state has changed.
        counters: the cluster's counters; the end of a job is counted there.

    Attributes:
        state: the state.
        all_workers_finished: whether all workers have finished and the final checkpoint is taken; stays True
            afterwards.
        submitted_at: when the job was submitted, in seconds of Unix time.
        started_at: when it first ran; 0 if never.
        finished_at: when it ended; 0 if it has not.
    """

    def __init__(self, now: float, log: EventLog, changed: Callable[[], None], counters: JobCounters) -> None:
        self._log, self._changed, self._counters = log, changed, counters
        self.state = JobState.PENDING
        self.all_workers_finished = False
        self._reason = ""  # why it ended
        # What it waits for, as stored, and with numbers and names as of the latest decision; empty: nothing.
        self._waiting_for = self._waiting_words = ""
        self.submitted_at, self.started_at, self.finished_at = now, 0.0, 0.0
        # Seconds of earlier times in which workers trained; since when they train now, 0 if none does.
        self._trained_s, self._training_since = 0.0, 0.0

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state.finished

    @property
    def running(self) -> bool:
        """Whether the job's workers may train."""
        return self.state is JobState.RUNNING

    @property
    def started(self) -> bool:
        """Whether the job has ever run."""
        return bool(self.started_at)

    @property
    def reason(self) -> str:
        """Why the job ended, or else what it waits for."""
        return self._reason or self._waiting_words

    def seconds(self, now: float) -> float:
        """Returns the seconds from its first run to its end or `now`; 0 if it never ran."""
        return (self.finished_at or now) - self.started_at if self.started_at else 0.0

    def trained_s(self, now: float) -> float:
        """Returns the seconds in which it ran and had workers, without work that was lost with the shards."""
        return self._trained_s + ((self.finished_at or now) - self._training_since if self._training_since else 0.0)

    def pause(self, now: float) -> None:
        """Records that no worker is left, although the job may run."""
        self._trained_s, self._training_since = self.trained_s(now), 0.0

    def go_on(self, now: float) -> None:
        """Records that a worker may train, if the job runs."""
        if self.running:
            self._training_since = self._training_since or now
            self._changed()

    def rewind(self, saved_at: float) -> None:
        """Records that the shards are lost: work after `saved_at` is repeated. Also takes `close` back.

        Args:
            saved_at: the time of the checkpoint from which the job continues; 0 if it starts again.
        """
        self.reopen()
        if self._training_since:
            self._trained_s += max(0.0, saved_at - self._training_since)
        self._trained_s, self._training_since = self._trained_s if saved_at else 0.0, 0.0

    def enter(self, state: JobState, reason: str, now: float) -> None:
        """Enters a state and logs it.

        Args:
            state: the new state.
            reason: shown to watchers; may be empty.
            now: seconds of Unix time.
        """
        self.state = state
        self._changed()
        self._log.append(StateChanged(self._log.next, now, state, reason))

    def note(self, reason: str, now: float) -> None:
        """Logs something that does not change the state."""
        self.enter(self.state, reason, now)

    def wait_for(self, what: str, now: float, words: str = "") -> None:
        """Sets what the job waits for, and logs and stores it when `what` changes.

        Args:
            what: the kind of thing; empty means nothing.
            now: seconds of Unix time.
            words: the same for users, with what changes while other jobs and workers come and go; empty: `what`.
        """
        self._waiting_words = words or what
        if what == self._waiting_for:
            return
        if what:
            self.note(self._waiting_words, now)
        self._waiting_for = what
        self._changed()

    def run(self, now: float) -> None:
        """Enters the running state, for the first time or after a restart."""
        self.started_at, self._training_since = self.started_at or now, now
        self.enter(JobState.RUNNING, "", now)

    def close(self, now: float) -> None:
        """Records that all workers have finished, and that the final checkpoint is taken."""
        self.all_workers_finished = True
        self.note("all workers have finished; the last checkpoint is being taken", now)

    def reopen(self) -> None:
        """Takes `close` back, because work is left. The state entered next writes the record."""
        self.all_workers_finished = False

    def end(self, state: JobState, reason: str, now: float) -> None:
        """Enters a final state and counts it.

        Args:
            state: succeeded, failed or cancelled.
            reason: why.
            now: seconds of Unix time.
        """
        self.finished_at, self._reason, self._waiting_for = now, reason, ""
        self._waiting_words = ""
        self.enter(state, reason, now)
        self._counters.count_end(state)

    def write_to(self, record: state_pb2.JobRecord) -> None:
        """Writes this state into the job's record."""
        record.state, record.reason, record.waiting_for = state_code(self.state), self._reason, self._waiting_for
        record.submitted_at, record.started_at = self.submitted_at, self.started_at
        record.finished_at, record.all_workers_finished = self.finished_at, self.all_workers_finished
        record.trained_s, record.training_since = self._trained_s, self._training_since

    def restore_from(self, record: state_pb2.JobRecord, now: float) -> None:
        """Restores this state from the job's record. Times after `now` become `now`: the clock may have gone back.

        Earlier versions of Shoal did not store the time of training. They counted it from the job's first run.
        """
        self.state = JobState.from_proto(record.state)
        self._reason, self._waiting_for = record.reason, record.waiting_for
        self._waiting_words = self._waiting_for
        self.submitted_at, self.started_at = min(record.submitted_at, now), min(record.started_at, now)
        self.finished_at = min(record.finished_at, now)
        since = record.training_since if record.HasField("trained_s") else record.started_at
        self._trained_s, self._training_since = record.trained_s, min(since, now)
        self.all_workers_finished = record.all_workers_finished

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self.ended == bool(self.finished_at) == self._log.ended
        assert self.started_at or not self.running
