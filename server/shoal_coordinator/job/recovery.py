"""Recovery of a job that lost its shards: whether it restarts, from what, and which servers it waits for (no I/O).

`JobMachine` carries out what is decided here. `CheckpointSchedule` knows which checkpoints exist.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.checkpoint_policy import CheckpointChoice
from shoal.job import Job
from shoal.status import JobState, RestartPoint
from shoal.v1 import state_pb2
from shoal_coordinator.job.checkpoints import CheckpointSchedule
from shoal_coordinator.job.ledger import Ledger
from shoal_coordinator.messages import ProgramDescription, RestoredCheckpoint

# Restarts without a new checkpoint in between, after which the job fails instead of restarting endlessly.
MAX_FAILED_RESTARTS = 10
# Seconds until checkpoint storage that cannot be read is tried again: first, doubled each time, up to the maximum.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 2.0, 60.0
# Seconds that a restarted coordinator waits at most for as many servers as a job had, if an earlier version has not
# stored the patience. It is above the time that follows from usual heartbeat timeouts.
_MAX_RETURN_S = 600.0
# Maximum number of names in an event.
_MAX_NAMED = 50


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """How a job continues after its shards were filled from a checkpoint.

    Attributes:
        problem: why it cannot continue; empty if it can.
        note: what its user sees.
        assigned: whether the given values are in place.
        given: the variables with given values that were restored.
        ledger: the restored ledger; None to keep the current one.
    """

    problem: str = ""
    note: str = ""
    assigned: bool = False
    given: frozenset[str] = frozenset()
    ledger: Ledger | None = None


class Recovery:
    """Decides how one job recovers from a loss of its shards.

    Args:
        spec: the job, as its user submitted it.
        checkpoints: the job's checkpoints.
    """

    def __init__(self, spec: Job, checkpoints: CheckpointSchedule) -> None:
        self._spec, self._checkpoints = spec, checkpoints
        self._restarts = self._failed_restarts = 0  # in total; since the last new checkpoint
        self._server_return_deadline, self._servers = 0.0, 0  # until when to wait for how many servers
        self._patience_s = 0.0  # how long that was
        self._restart_point: RestartPoint | None = None  # of the latest restart; None while the job restarts
        self._source: CheckpointChoice | None = None  # the checkpoint that it began with, with its number
        self._restore_note = ""  # see `restore_note`
        self._read_failure = ""  # why its checkpoints could not be read at the last attempt; empty: no failure
        self._next_read_at, self._read_backoff_s = 0.0, 0.0  # time of the next attempt; pause before it

    @property
    def possible(self) -> bool:
        """Whether the job restarts when its shards are lost. Otherwise it fails: a session's program cannot restart."""
        return self._checkpoints.possible and not self._spec.is_session

    @property
    def advice(self) -> str:
        """What the user should do when the job fails because of lost shards; empty if it restarts."""
        if self.possible:
            return ""
        again = "open the session again" if self._spec.is_session else "submit the job again"
        if not self._checkpoints.possible:
            return (
                f"; the cluster has no checkpoint storage, so the work is lost: {again}. To save jobs, start the "
                "cluster with --checkpoints (from Python: LocalCluster(checkpoints=...))"
            )
        newest = self._checkpoints.newest
        if newest is None:
            return f"; it has no checkpoint yet, so the work is lost: {again}"
        saved = f"{self._spec.name}/{newest.number}"
        return f"; it was saved as {saved}: {again} with restore={saved!r}, or with restore='auto' in every run"

    def not_placed(self, state: JobState, *, had_values: bool) -> str:
        """Returns why the variables cannot be read while they are not on servers.

        Args:
            state: the state of the job.
            had_values: whether the job has ever run.
        """
        name, newest = self._spec.name, self._checkpoints.newest
        if not (state.finished and had_values):
            return f"the variables of job {name} are not on servers; it is {state.value}"
        advice = "it has no checkpoint, so submit it again"
        if newest:
            advice = f"`shoal export {name}/{newest.number} FILE` writes the values of its newest checkpoint"
        return f"job {name} is {state.value}, and its values were lost with a server; {advice}"

    @property
    def restarts(self) -> int:
        """How often the job has restarted."""
        return self._restarts

    @property
    def restart_point(self) -> RestartPoint | None:
        """The checkpoint that the job continued from at its latest restart; None if there is none."""
        return self._restart_point

    @property
    def restore_note(self) -> str:
        """The checkpoint that the job continues from, and how it differs from the job; empty if it does not."""
        return self._restore_note

    @property
    def sources(self) -> tuple[CheckpointChoice, ...]:
        """The checkpoints to fill new shards from, best first: its own, or the requested one if it has none yet."""
        # The user may have asked for another job's newest checkpoint, which changes: use the one that was found first.
        first = self._source or self._spec.source
        return self._own or ((first,) if first else ())

    @property
    def _own(self) -> tuple[CheckpointChoice, ...]:
        return tuple(CheckpointChoice(self._spec.name, it.number) for it in reversed(self._checkpoints.saved))

    def lose(
        self, reason: str, servers: int, patience_s: float, now: float, *, announced: bool = False
    ) -> tuple[bool, str]:
        """Decides whether the job restarts after a loss of shards.

        Args:
            reason: why the shards are lost.
            servers: how many servers held them.
            patience_s: seconds to wait for as many servers.
            now: seconds of Unix time.
            announced: whether the server was draining, so that the loss does not count towards `MAX_FAILED_RESTARTS`.

        Returns:
            Whether the job restarts, and what its user sees.
        """
        if not self.possible or (self._failed_restarts >= MAX_FAILED_RESTARTS and not announced):
            times = self._failed_restarts + 1
            often = f" ({times} times in a row without a new checkpoint in between)" if times > 1 else ""
            return False, f"{reason}{often}"
        self._restarts += 1
        self._restart_point = None
        self._failed_restarts += not announced
        self._server_return_deadline = now + patience_s if patience_s else 0.0
        self._servers, self._patience_s = servers, patience_s
        newest = self._checkpoints.newest
        first = f"its beginning, {self._source}" if self._source else "its beginning"
        return True, f"{reason}; the job continues from {f'checkpoint {newest.number}' if newest else first}"

    def waits_for_servers(self, alive: int, now: float, *, expected: bool = False) -> bool:
        """Returns whether it is too early to place the shards, because more servers may return.

        Args:
            alive: number of servers that can take shards.
            now: seconds of Unix time.
            expected: whether a drained server is expected back.

        Returns:
            Whether to wait.
        """
        return alive < self._servers and (expected or now < self._server_return_deadline)

    @property
    def waiting_for(self) -> str:
        """What the job needs to read its checkpoints; empty if nothing."""
        return f"waiting for the storage of its checkpoints: {self._read_failure}" if self._read_failure else ""

    def defer_restore(self, reason: str, now: float) -> None:
        """Sets the time at which to read the checkpoints again, after a failure."""
        self._read_failure = reason
        self._read_backoff_s = min(2 * self._read_backoff_s or _FIRST_PAUSE_S, _MAX_PAUSE_S)
        self._next_read_at = now + self._read_backoff_s

    def waits_for_storage(self, now: float) -> bool:
        """Returns whether it is too early to read the checkpoints again."""
        return now < self._next_read_at

    def checkpointed(self) -> None:
        """Resets the count of failed restarts, after a new checkpoint."""
        self._failed_restarts = 0

    def resume(
        self, restored: RestoredCheckpoint, program: ProgramDescription, changed: Callable[[str], None]
    ) -> ResumePlan:
        """Decides how the job continues from a checkpoint that is on the servers now.

        Args:
            restored: the checkpoint.
            program: what the job's program trains.
            changed: called with the name of a record of the returned ledger that has changed.

        Returns:
            How the job continues.
        """
        self._read_failure, self._next_read_at, self._read_backoff_s = "", 0.0, 0.0
        if restored.source not in self._own:
            self._source = restored.source
        if self._restarts:
            self._restart_point = RestartPoint(restored.source.job, restored.source.number, restored.step)
        spec, given = self._spec, program.given & restored.variables
        data, ledger, problem = restored.data, None, ""
        # The sessions of a job tell the number of their samples later, with their first lease.
        samples = data.samples if data is not None and spec.is_session else program.samples
        if data is not None and data.samples == samples and restored.seed == spec.seed:
            ledger = Ledger.resumed(data, epochs=spec.epochs, workers=spec.workers, changed=changed)
            if ledger.finished and not spec.is_session and restored.source not in self._own:
                done = "1 epoch is" if data.epoch == 1 else f"{data.epoch} epochs are"
                problem = (
                    f"nothing is left to do: {done} done in {restored.source}; ask for at least {data.epoch + 1} epochs"
                )
        own = restored.source in self._own  # a rate that was set at run time is then an argument that differs
        differences = _differences(
            restored,
            frozenset(program.variables),
            data_restarted=data is not None and ledger is None,
            optimizer_changes=() if own else restored.optimizer_changes,
        )
        note = f"continues from {restored.source}, step {restored.step}"
        note += f" ({differences})" if differences else ""
        self._restore_note = note if differences else ""
        return ResumePlan(problem, note, given == program.given, given, ledger)

    def write_to(self, record: state_pb2.JobRecord) -> None:
        """Writes this state into the job's record."""
        record.restarts, record.failed_restarts = self._restarts, self._failed_restarts
        record.server_return_deadline, record.servers = self._server_return_deadline, self._servers
        record.server_return_patience_s = self._patience_s
        record.read_failure, record.next_read_at, record.read_backoff_s = (
            self._read_failure,
            self._next_read_at,
            self._read_backoff_s,
        )
        record.restore_note = self._restore_note
        if self._restart_point:
            record.restart_point.CopyFrom(self._restart_point.to_proto())
        if self._source:
            record.source.CopyFrom(self._source.to_proto())

    def restore_from(self, record: state_pb2.JobRecord, now: float) -> None:
        """Restores this state from the job's record. The job waits at most as long as if it began to wait now."""
        self._restarts, self._failed_restarts = record.restarts, record.failed_restarts
        self._servers, self._patience_s = record.servers, record.server_return_patience_s
        self._server_return_deadline = min(record.server_return_deadline, now + (self._patience_s or _MAX_RETURN_S))
        self._read_failure, self._read_backoff_s = record.read_failure, record.read_backoff_s
        self._next_read_at = min(record.next_read_at, now + record.read_backoff_s)
        self._restore_note = record.restore_note
        point = record.restart_point if record.HasField("restart_point") else None
        self._restart_point = RestartPoint.from_proto(point) if point else None
        self._source = CheckpointChoice.from_proto(record.source) if record.HasField("source") else None

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert 0 <= self._failed_restarts <= self._restarts
        assert self._restart_point is None or self._restarts
        assert bool(self._read_failure) == bool(self._next_read_at) == bool(self._read_backoff_s)


def _differences(
    restored: RestoredCheckpoint,
    variables: frozenset[str],
    *,
    data_restarted: bool,
    optimizer_changes: Sequence[str],
) -> str:
    """Returns what differs between the job and its checkpoint, for a note; empty if nothing does."""
    lists = {
        "not restored": sorted(variables - restored.variables),
        "left out": sorted(restored.variables - variables),
        "skipped": restored.skipped,
        "the optimizer's arguments differ from the checkpoint's, and the job's count": optimizer_changes,
        "its data starts from the beginning": ["the seed or the number of samples differs"] if data_restarted else [],
    }
    notes = [f"{what}: {', '.join(found[:_MAX_NAMED])}" for what, found in lists.items() if found]
    return "; ".join(notes)
