"""A job that loses its shards: whether it goes back, to what, which servers it waits for, and how it goes on. Pure.

What is decided here `JobMachine` carries out. Which checkpoints there are is for `CheckpointSchedule` to know.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.checkpoint_policy import CheckpointChoice
from shoal.job import Job
from shoal.v1 import state_pb2
from shoal_coordinator.job.checkpoint_schedule import CheckpointSchedule
from shoal_coordinator.job.ledger import Ledger
from shoal_coordinator.job.parts import ProgramDescription
from shoal_coordinator.messages import RestoredCheckpoint

# A job that loses its shards so often without a new checkpoint in between would do so for ever.
MAX_FAILED_RESTARTS = 10
# A storage that cannot be read is tried again after so long, and each time after twice as long, up to the latter.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
# Variables, or checkpoints that could not be read, that an event lists.
_MAX_NAMED = 50


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """How a job goes on once its shards were filled with a checkpoint.

    Attributes:
        problem: why it cannot; empty: it can.
        note: what its user is told.
        assigned: the values that the program gives are in place.
        given: of the variables whose values it gives, those that have them from the checkpoint.
        ledger: where its data had come; None: as it is.
    """

    problem: str = ""
    note: str = ""
    assigned: bool = False
    given: frozenset[str] = frozenset()
    ledger: Ledger | None = None


class Recovery:
    """The state machine of one job's losses.

    Args:
        spec: the job, as its user asked for it.
        checkpoints: the job's, to which it can go back.
    """

    def __init__(self, spec: Job, checkpoints: CheckpointSchedule) -> None:
        self._spec, self._checkpoints = spec, checkpoints
        self._restarts = self._failed_restarts = 0  # times that shards were lost: altogether, since a new checkpoint
        self._patience, self._servers = 0.0, 0  # until when to wait for how many servers, which it had before
        self._source: CheckpointChoice | None = None  # the one that it began with, as it was found: with its number
        self._unread = ""  # why its checkpoints could not be read at the last try; empty: they could, or none was tried
        self._read_at, self._read_pause = 0.0, 0.0  # when they are tried again, and how long after the last try

    @property
    def possible(self) -> bool:
        """Whether the job goes back when its shards are lost; else it fails, as a session's users would not know."""
        return self._checkpoints.possible and not self._spec.is_session

    @property
    def advice(self) -> str:
        """What a job's user is told to do when it fails because its shards are lost; empty: it goes back."""
        if self.possible:
            return ""
        if not self._spec.is_session:
            return "; submit the job again"
        newest = self._checkpoints.newest
        if newest is None:
            return "; open the session again"
        saved = f"{self._spec.name}/{newest.number}"
        return f"; it was saved as {saved}: open the session again with restore={saved!r}"

    @property
    def restarts(self) -> int:
        """How often it went back."""
        return self._restarts

    @property
    def sources(self) -> tuple[CheckpointChoice, ...]:
        """The checkpoints to fill new shards with, best first: its own, or, before there are any, the one asked for."""
        # What its user named may be the newest of a job that has gone on since: it goes back to what it began with.
        first = self._source or self._spec.source
        return self._own or ((first,) if first else ())

    @property
    def _own(self) -> tuple[CheckpointChoice, ...]:
        return tuple(CheckpointChoice(self._spec.name, it.number) for it in reversed(self._checkpoints.saved))

    def lose(self, reason: str, servers: int, patience: float, *, announced: bool = False) -> tuple[bool, str]:
        """The shards are lost.

        Args:
            reason: why.
            servers: how many had them.
            patience: seconds of Unix time until when to wait for as many.
            announced: a server said so before, so that it has no bearing on whether the job would do so for ever.

        Returns:
            Whether the job goes back, and what its user is told.
        """
        if not self.possible or (self._failed_restarts >= MAX_FAILED_RESTARTS and not announced):
            times = self._failed_restarts + 1
            often = f" ({times} times in a row without a new checkpoint in between)" if times > 1 else ""
            return False, f"{reason}{often}"
        self._restarts += 1
        self._failed_restarts += not announced
        self._patience, self._servers = patience, servers
        newest = self._checkpoints.newest
        first = f"its beginning, {self._source}" if self._source else "its beginning"
        return True, f"{reason}; it goes on from {f'checkpoint {newest.number}' if newest else first}"

    def waits_for_servers(self, alive: int, now: float, *, expected: bool = False) -> bool:
        """Whether more servers may come back, with which its shards were, so that it is too early to place them.

        Args:
            alive: servers that there are.
            now: the time.
            expected: some have said that they were going, and may be back.
        """
        return alive < self._servers and (expected or now < self._patience)

    @property
    def waiting_for(self) -> str:
        """What is lacking to read its checkpoints; empty: nothing."""
        return f"waiting for the storage of its checkpoints: {self._unread}" if self._unread else ""

    def defer_restore(self, reason: str, now: float) -> None:
        """Its checkpoints cannot be read for now."""
        self._unread = reason
        self._read_pause = min(2 * self._read_pause or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._read_at = now + self._read_pause

    def waits_for_storage(self, now: float) -> bool:
        """Whether it is too early to read its checkpoints again."""
        return now < self._read_at

    def checkpointed(self) -> None:
        """There is a new checkpoint, so the losses from now on count anew."""
        self._failed_restarts = 0

    def resume(
        self, restored: RestoredCheckpoint, program: ProgramDescription, changed: Callable[[], None]
    ) -> ResumePlan:
        """How the job goes on from a checkpoint, which has been read.

        Args:
            restored: the checkpoint, which is on the servers now.
            program: what the job's program trains.
            changed: told that the ledger's record is another one, later.
        """
        self._unread, self._read_at, self._read_pause = "", 0.0, 0.0
        if restored.source not in self._own:
            self._source = restored.source
        spec, given = self._spec, program.given & restored.variables
        data, ledger, problem = restored.data, None, ""
        if data is not None and data.samples == program.samples and restored.seed == spec.seed:
            ledger = Ledger.resumed(data, epochs=spec.epochs, workers=spec.workers, changed=changed)
            if ledger.finished and restored.source not in self._own:
                problem = f"nothing is left to do: {restored.source} has done {spec.epochs} epochs; ask for more"
        note = _note(restored, frozenset(program.variables), data_restarted=data is not None and ledger is None)
        return ResumePlan(problem, note, given == program.given, given, ledger)

    def write_to(self, record: state_pb2.JobRecord) -> None:
        """Writes it down, as part of the job's record."""
        record.restarts, record.fruitless = self._restarts, self._failed_restarts
        record.patience, record.servers = self._patience, self._servers
        record.unread, record.read_at, record.read_pause = self._unread, self._read_at, self._read_pause
        if self._source:
            record.source.CopyFrom(self._source.to_proto())

    def restore_from(self, record: state_pb2.JobRecord) -> None:
        """Goes on from a record."""
        self._restarts, self._failed_restarts = record.restarts, record.fruitless
        self._patience, self._servers = record.patience, record.servers
        self._unread, self._read_at, self._read_pause = record.unread, record.read_at, record.read_pause
        self._source = CheckpointChoice.from_proto(record.source) if record.HasField("source") else None

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert 0 <= self._failed_restarts <= self._restarts
        assert bool(self._unread) == bool(self._read_at) == bool(self._read_pause)


def _note(restored: RestoredCheckpoint, variables: frozenset[str], *, data_restarted: bool) -> str:
    """What a job goes on from, and what was not as one might expect."""
    lists = {
        "not restored": sorted(variables - restored.variables),
        "left out": sorted(restored.variables - variables),
        "passed by": restored.skipped,
        "its data begins anew": ["another seed, or another number of samples"] if data_restarted else [],
    }
    notes = [f"{what}: {', '.join(found[:_MAX_NAMED])}" for what, found in lists.items() if found]
    return f"goes on from {restored.source}, step {restored.step}" + (f" ({'; '.join(notes)})" if notes else "")
