"""Plan of one job: its variables, their placement, and whether they have their initial values (no I/O)."""

from collections.abc import Callable
from functools import partial

from shoal._wire import Placement
from shoal.optim import Schedule
from shoal.v1 import state_pb2, tensor_pb2
from shoal_coordinator.job.copies import CopyTable
from shoal_coordinator.messages import JobRecordKind, ProgramDescription, ServerRef, digest_of, servers_of


class Plan:
    """The variables of one job. Only methods of this class change its attributes.

    Args:
        changed: called with the name of a record that has changed.
        replicated: whether the job has several copies of each shard.

    Attributes:
        description: what the program trains; None until a worker has described it.
        copies: where the shards are, or will be, with their copies.
        previous_servers: by shard, the server of its last placement; kept when the shards are dropped.
        created: whether the shards are on the servers.
        assigned: whether the given values are in place.
        restored: the variables with given values that were restored from a checkpoint instead.
        learning_rate: set while the job ran; None means that of the specification.
    """

    def __init__(self, changed: Callable[[str], None], *, replicated: bool = False) -> None:
        self._changed, self._replicated = changed, replicated
        self.description: ProgramDescription | None = None
        self.copies = CopyTable(changed)
        self.previous_servers: tuple[str, ...] = ()
        self._servers: tuple[Placement | None, tuple[ServerRef, ...]] = None, ()  # of a placement
        self.created = self.assigned = False
        self.restored: frozenset[str] = frozenset()
        self.learning_rate: Schedule | None = None

    @property
    def placement(self) -> Placement | None:
        """Where the shards are, or will be; None if they are not placed, or were dropped."""
        return self.copies.placement

    @property
    def servers(self) -> tuple[ServerRef, ...]:
        """The servers that serve the shards, or will: the primaries."""
        if self.placement is not self._servers[0]:  # found once: each of a thousand workers needs them
            self._servers = self.placement, servers_of(self.placement) if self.placement else ()
        return self._servers[1]

    @property
    def created_placement(self) -> Placement | None:
        """The placement, if the shards are on the servers; otherwise None."""
        return self.placement if self.created else None

    @property
    def has_values(self) -> bool:
        """Whether the shards are on the servers, with all their values."""
        return self.created and not self.lacks_values

    @property
    def lacks_values(self) -> bool:
        """Whether the program has given values that are not in place yet."""
        return bool(self.description and self.description.given) and not self.assigned

    def describe(self, description: ProgramDescription) -> None:
        """Records the description of the program."""
        self.description = description
        self._changed(JobRecordKind.PLAN)

    def place(self, placement: Placement) -> None:
        """Records where the shards will be."""
        self.copies.begin(placement, replicated=self._replicated)
        self.previous_servers = tuple(shard.server for shard in placement.shards)
        self._changed(JobRecordKind.PLAN)

    def set_learning_rate(self, learning_rate: Schedule) -> None:
        """Records the learning rate of later updates."""
        self.learning_rate = learning_rate
        self._changed(JobRecordKind.STATE)

    def create(self) -> None:
        """Records that all servers hold the shards."""
        self.created = True
        self._changed(JobRecordKind.STATE)

    def fill(self) -> None:
        """Records that the given values are in place."""
        self.assigned = True
        self._changed(JobRecordKind.STATE)

    def resume_from(self, given: frozenset[str], *, assigned: bool) -> None:
        """Records that the shards were filled from a checkpoint.

        Args:
            given: the variables with given values that were in it.
            assigned: whether these are all variables with given values.
        """
        self.assigned, self.restored = self.assigned or assigned, given
        self._changed(JobRecordKind.STATE)

    def drop(self) -> tuple[ServerRef, ...]:
        """Records that the shards are dropped or lost; returns the servers that had anything of them."""
        servers, self.created = self.copies.holders, False
        self.copies.begin(None, replicated=self._replicated)
        self._changed(JobRecordKind.PLAN)
        self._changed(JobRecordKind.STATE)
        return servers

    def restart(self, *, keeps_rate: bool = True) -> None:
        """Records that no variable has its values any more.

        Args:
            keeps_rate: whether the learning rate stays. Otherwise that of the checkpoint counts, or of the optimizer.
        """
        self.assigned, self.restored = False, frozenset()
        self.learning_rate = self.learning_rate if keeps_rate else None
        self._changed(JobRecordKind.STATE)

    def to_proto(self) -> state_pb2.PlanRecord | None:
        """Returns the record of this plan; None if there is no description."""
        return self.record_later()()

    def record_later(self) -> Callable[[], state_pb2.PlanRecord | None]:
        """Returns a function that makes the record of this plan as it is now, at any time and on any thread."""
        return partial(_record, self.description, self.copies.planned, self.previous_servers)

    def write_to(self, record: state_pb2.JobRecord) -> None:
        """Writes the state of the shards into the job's record."""
        record.assigned, record.created = self.assigned, self.created
        record.restored.extend(sorted(self.restored))
        if self.learning_rate:
            record.learning_rate.CopyFrom(self.learning_rate.to_proto())

    def restore_from(
        self,
        record: state_pb2.JobRecord,
        plan: state_pb2.PlanRecord | None,
        copies: state_pb2.CopiesRecord | None = None,
    ) -> None:
        """Restores the plan from its records.

        Args:
            record: the job's record.
            plan: the record of the plan; None if there is none.
            copies: the record of the copies of its shards; None if there is none.
        """
        self.assigned, self.created = record.assigned, record.created
        self.restored = frozenset(record.restored)
        self.learning_rate = Schedule.from_proto(record.learning_rate) if record.HasField("learning_rate") else None
        if plan is None:
            return
        self.description = ProgramDescription.from_proto(plan.variables, plan.samples, digest_of(plan.variables))
        self.previous_servers = tuple(plan.previous_servers)
        if plan.HasField("placement"):
            placement = tensor_pb2.Placement()
            placement.CopyFrom(plan.placement)
            placement.variables.extend(plan.variables)
            self.copies.begin(Placement.from_proto(placement), replicated=self._replicated)
        self.copies.restore_from(copies)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert not self.created or self.placement is not None
        assert self.description is None or self.description.variables, "there is nothing to train"


def _record(
    description: ProgramDescription | None, placement: Placement | None, previous_servers: tuple[str, ...]
) -> state_pb2.PlanRecord | None:
    if description is None:
        return None
    record = state_pb2.PlanRecord(
        variables=tensor_pb2.Placement.FromString(description.encoded).variables,
        samples=description.samples,
        placement=placement.to_proto() if placement else None,
        previous_servers=previous_servers,
    )
    if placement:
        record.placement.ClearField("variables")
    return record
