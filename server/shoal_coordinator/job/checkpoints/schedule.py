"""Schedule of one job's checkpoints: when the next one is due, and which are in progress or complete. Pure: no I/O."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.checkpoint_policy import NEVER, CheckpointPolicy
from shoal.status import SavedCheckpoint
from shoal.v1 import state_pb2

# Seconds from the start of a failed attempt to the next: short at first, so that a brief failure does not cost a whole
# interval, then doubled each time, so that a lasting failure costs little.
_RETRY_S, _MAX_RETRY_S = 10.0, 600.0
_DOUBLED = 6  # doublings until the maximum is reached
# Attempts at an important checkpoint, such as the final one.
_TRIES = 3
# Number of complete checkpoints that are remembered; the storage may have more.
_MAX_SAVED = 1_000
NO_STORAGE = (
    "this cluster has no checkpoint storage: start its coordinator and its servers with --checkpoints (from Python: "
    "LocalCluster(checkpoints=...))"
)


class CheckpointSchedule:
    """The state machine of one job's checkpoints. At most one is in progress.

    Args:
        policy: when checkpoints are due.
        now: when the job began to run, in seconds of Unix time, as in every method.
        changed: called when the record has changed.
        possible: whether the cluster has checkpoint storage. Without it no checkpoint is due, but earlier ones are
            remembered, since the storage may be configured again.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        now: float,
        changed: Callable[[], None] = lambda: None,
        *,
        possible: bool = True,
    ) -> None:
        self._policy = policy if possible else NEVER
        self._possible = possible
        self._changed = changed
        self._saved: list[SavedCheckpoint] = []  # oldest first
        # The checkpoint in progress, once it can be restored. It is not stored: a restart publishes it again.
        self._in_progress: SavedCheckpoint | None = None
        self._attempts, self._busy = 0, False
        self._wanted_from = 0.0  # earliest start of a requested checkpoint; 0: none is requested
        self._number = 0  # the largest number used, complete or not
        self._began_at, self._began_step = now, 0
        self._failure, self._failures = "", 0

    @property
    def possible(self) -> bool:
        """Whether the cluster has checkpoint storage."""
        return self._possible

    @property
    def at_end(self) -> bool:
        """Whether a checkpoint is taken when all workers have finished."""
        return self._policy.at_end

    @property
    def saved(self) -> Sequence[SavedCheckpoint]:
        """The complete checkpoints of this job, oldest first."""
        return self._saved

    @property
    def newest(self) -> SavedCheckpoint | None:
        """The newest complete checkpoint of this job; None if there is none."""
        return self._saved[-1] if self._saved else None

    @property
    def failure(self) -> str:
        """Why the latest attempt failed; empty if it did not."""
        return self._failure

    @property
    def began_at(self) -> float:
        """When the latest attempt began."""
        return self._began_at

    @property
    def attempt(self) -> int:
        """The number of the latest attempt; 0 if there was none."""
        return self._attempts

    @property
    def busy(self) -> bool:
        """Whether an attempt is in progress."""
        return self._busy

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is in progress, or requested and possible."""
        return self._busy or (self._possible and bool(self._wanted_from))

    @property
    def requested(self) -> bool:
        """Whether a further checkpoint is requested, besides one in progress."""
        return bool(self._wanted_from)

    @property
    def in_progress(self) -> SavedCheckpoint | None:
        """The checkpoint in progress, if it can be restored already; otherwise None."""
        return self._in_progress

    @property
    def pending_attempt(self) -> int:
        """The number of the last attempt that is in progress or requested."""
        return self._attempts + bool(self._wanted_from)

    def restart(self, now: float, step: int) -> None:
        """Ends the attempt in progress, because the shards are lost. The job continues at `step`."""
        self._busy, self._wanted_from, self._in_progress = False, 0.0, None
        self._began_at, self._began_step = now, step
        self._changed()

    def request(self, now: float) -> int:
        """Requests a checkpoint of the state from `now` on; returns the number of its attempt."""
        if not self._wanted_from or now < self._wanted_from:
            self._wanted_from = now
            self._changed()
        return self._attempts + 1

    def request_again(self, now: float) -> bool:
        """Requests a checkpoint after a pause, since the last one failed; returns False after too many failures."""
        if not self._possible or self._failures >= _TRIES:
            return False
        self.request(now + self._retry_s)
        return True

    def due(self, now: float, step: int) -> bool:
        """Returns whether the next checkpoint is due; `step` is that of the fastest worker."""
        if self._busy or not self._possible:
            return False
        if self._wanted_from:
            return now >= self._wanted_from
        since, policy = now - self._began_at, self._policy
        by_time = 0 < policy.every_s <= since
        by_steps = 0 < policy.every_steps <= step - self._began_step
        if self._failures:
            return bool(policy.every_s or policy.every_steps) and since >= self._retry_s
        return by_time or by_steps

    def begin(self, now: float, step: int) -> None:
        """Begins a checkpoint."""
        self._attempts += 1
        self._busy, self._wanted_from = True, 0.0
        self._began_at = now
        every = self._policy.every_steps
        # A multiple of `every_steps`, however late it was noticed; otherwise the checkpoints would drift.
        self._began_step = step - step % every if every else step
        self._changed()

    def take_number(self, *, above: int) -> int:
        """Returns a number for the checkpoint in progress. No other checkpoint of this job ever has this number.

        Args:
            above: the largest number in the storage, from imports or earlier jobs of this name. The scan of the storage
                may miss files of this job's failed cuts, so the record also keeps the largest number of this job.
        """
        self._number = max(self._number, above) + 1
        self._changed()
        return self._number

    def published(self, checkpoint: SavedCheckpoint) -> None:
        """Records that the checkpoint in progress can be restored; its attempt ends with `committed`."""
        kept = [it for it in self._saved if it.number != checkpoint.number]
        self._saved = [*kept, checkpoint][-_MAX_SAVED:]
        self._in_progress = checkpoint
        self._changed()

    def removed(self, numbers: Sequence[int]) -> None:
        """Records that the storage no longer has these checkpoints."""
        self._saved = [it for it in self._saved if it.number not in numbers]
        self._changed()

    def committed(self, checkpoint: SavedCheckpoint, removed: Sequence[int]) -> None:
        """Records that the checkpoint in progress is complete, and that older ones were removed."""
        self.published(checkpoint)
        self.removed(removed)
        self._busy, self._failure, self._failures = False, "", 0
        self._in_progress = None

    def failed(self, reason: str) -> None:
        """Records that the attempt in progress has failed."""
        self._busy, self._failure, self._in_progress = False, reason, None
        self._failures += 1
        self._changed()

    @property
    def _retry_s(self) -> float:
        return min(_RETRY_S * 2.0 ** min(self._failures - 1, _DOUBLED), _MAX_RETRY_S)

    def to_proto(self) -> state_pb2.CheckpointsRecord:
        """Returns the record of these checkpoints."""
        return state_pb2.CheckpointsRecord(
            saved=[it.to_proto() for it in self._saved],
            attempts=self._attempts,
            busy=self._busy,
            began_at=self._began_at,
            began_step=self._began_step,
            wanted_from=self._wanted_from,
            number=self._number,
            failure=self._failure,
            failures=self._failures,
        )

    def restore_from(self, record: state_pb2.CheckpointsRecord, now: float) -> None:
        """Restores the schedule from a record.

        Times that are still to come are moved to `now`: the clock may have gone back, and no checkpoint would be due
        until it has caught up.
        """
        found = [SavedCheckpoint.from_proto(it) for it in record.saved]
        self._saved = [replace(it, time=min(it.time, now)) for it in found]
        self._attempts, self._busy = record.attempts, record.busy
        self._number = record.number
        self._began_at, self._began_step = min(record.began_at, now), record.began_step
        self._failure, self._failures = record.failure, record.failures
        self._wanted_from = min(record.wanted_from, now + (self._retry_s if self._failures else _MAX_RETRY_S))

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        numbers = [it.number for it in self._saved]
        assert numbers == sorted(set(numbers)), "checkpoints are out of order"
        assert self._attempts or not self._busy
        assert bool(self._failures) == bool(self._failure)
        assert self._busy or self._in_progress is None
