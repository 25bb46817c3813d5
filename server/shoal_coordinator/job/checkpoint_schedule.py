"""One job's checkpoints: when the next is due, which is under way, which are whole. Pure: no clock, no I/O."""

from collections.abc import Callable, Sequence

from shoal.checkpoint_policy import NEVER, CheckpointPolicy
from shoal.status import SavedCheckpoint
from shoal.v1 import state_pb2

# From the beginning of an attempt that fails to that of the next: at first no longer than this, so that a short trouble
# does not cost a whole interval; then twice as long each time, so that a lasting one does not cost much.
_RETRY_S, _MAX_RETRY_S = 10.0, 600.0
_DOUBLED = 6  # times until that is the most
# How often the last one of a job is tried.
_TRIES = 3
# So many whole ones are remembered; the folder may have more.
_MAX_SAVED = 1_000
NO_STORAGE = "this cluster has no folder of checkpoints: start its coordinator and its servers with --checkpoints"


class CheckpointSchedule:
    """The state machine of one job's checkpoints: at most one is under way.

    Args:
        policy: when they are due.
        now: seconds of Unix time, as in every method: when the job began to run.
        changed: told that the record is another one now.
        possible: whether the cluster has a folder of them; while it has none, none is due, and those that there
            were are remembered, for the folder may come back.
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
        self._attempts, self._busy = 0, False
        self._wanted_from = 0.0  # one more was asked for, to begin then at the earliest; 0: none
        self._number = 0  # the largest that any was given, whole or not
        self._began_at, self._began_step = now, 0
        self._failure, self._failures = "", 0

    @property
    def possible(self) -> bool:
        """Whether any can be taken: the cluster has a folder of them."""
        return self._possible

    @property
    def at_end(self) -> bool:
        """Whether one is to be taken when all workers are through."""
        return self._policy.at_end

    @property
    def saved(self) -> Sequence[SavedCheckpoint]:
        """Those of this job that are whole, oldest first."""
        return self._saved

    @property
    def newest(self) -> SavedCheckpoint | None:
        """The newest of this job that is whole; None: there is none."""
        return self._saved[-1] if self._saved else None

    @property
    def failure(self) -> str:
        """Why the latest attempt failed; empty: it did not."""
        return self._failure

    @property
    def began_at(self) -> float:
        """When the latest attempt began."""
        return self._began_at

    @property
    def attempt(self) -> int:
        """The latest attempt's number; 0: there was none."""
        return self._attempts

    @property
    def busy(self) -> bool:
        """Whether an attempt is under way."""
        return self._busy

    @property
    def pending(self) -> bool:
        """Whether one is under way, or asked for where it can be had."""
        return self._busy or (self._possible and bool(self._wanted_from))

    @property
    def pending_attempt(self) -> int:
        """The number of the last one that is under way or asked for."""
        return self._attempts + bool(self._wanted_from)

    def restart(self, now: float, step: int) -> None:
        """The job goes on from a step, or from its beginning: what was under way is lost with the shards."""
        self._busy, self._wanted_from = False, 0.0
        self._began_at, self._began_step = now, step
        self._changed()

    def request(self, now: float) -> int:
        """Asks for one more, of the state from then on; the attempt that it will be."""
        if not self._wanted_from or now < self._wanted_from:
            self._wanted_from = now
            self._changed()
        return self._attempts + 1

    def request_again(self, now: float) -> bool:
        """Asks for one more in a while, after a failure; False: it was tried often enough."""
        if not self._possible or self._failures >= _TRIES:
            return False
        self.request(now + self._retry_s)
        return True

    def due(self, now: float, step: int) -> bool:
        """Whether the next one is to begin; `step` is that of the worker that is ahead."""
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
        """One begins."""
        self._attempts += 1
        self._busy, self._wanted_from = True, 0.0
        self._began_at = now
        every = self._policy.every_steps
        # On the marks of every so many steps, however late each was noticed, or they would drift apart.
        self._began_step = step - step % every if every else step
        self._changed()

    def take_number(self, *, above: int) -> int:
        """A number for the one that is under way, which no other of this job has or will have, even if it fails.

        Args:
            above: the largest in the folder, which earlier jobs of the name may have left, or imports. Those of this
                job are in its record: what a cut that failed has left may be seen later than the next one is counted.
        """
        self._number = max(self._number, above) + 1
        self._changed()
        return self._number

    def committed(self, checkpoint: SavedCheckpoint, removed: Sequence[int]) -> None:
        """The one that was under way is whole; older ones were removed."""
        kept = [it for it in self._saved if it.number not in removed]
        self._saved = [*kept, checkpoint][-_MAX_SAVED:]
        self._busy, self._failure, self._failures = False, "", 0
        self._changed()

    def failed(self, reason: str) -> None:
        """The one that was under way was given up."""
        self._busy, self._failure = False, reason
        self._failures += 1
        self._changed()

    @property
    def _retry_s(self) -> float:
        return min(_RETRY_S * 2.0 ** min(self._failures - 1, _DOUBLED), _MAX_RETRY_S)

    def to_proto(self) -> state_pb2.CheckpointsRecord:
        """The record of these checkpoints."""
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

    def restore_from(self, record: state_pb2.CheckpointsRecord) -> None:
        """Goes on from a record."""
        self._saved = [SavedCheckpoint.from_proto(it) for it in record.saved]
        self._attempts, self._busy = record.attempts, record.busy
        self._wanted_from, self._number = record.wanted_from, record.number
        self._began_at, self._began_step = record.began_at, record.began_step
        self._failure, self._failures = record.failure, record.failures

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        numbers = [it.number for it in self._saved]
        assert numbers == sorted(set(numbers)), "checkpoints are out of order"
        assert self._attempts or not self._busy
        assert bool(self._failures) == bool(self._failure)
