"""What one job trains: its variables, where they are, and whether they have their first values. Pure."""

from collections.abc import Callable

from shoal._wire import Placement
from shoal.v1 import state_pb2, tensor_pb2
from shoal.variables import from_proto as variable_from_proto
from shoal_coordinator.job.parts import ProgramDescription
from shoal_coordinator.messages import JobRecordKind, ServerRef, servers_of


class Plan:
    """The variables of one job. Its attributes are to be read; methods of this class change them.

    Args:
        changed: told the name of a record that has changed.

    Attributes:
        description: what the program trains; None until a worker has described it.
        placement: where the shards are, or are to be; None: they have no place, or were dropped.
        home: by shard, the server that had it when it was placed last; it stays when the shards are dropped.
        created: the shards are on the servers.
        assigned: the values that the program gives are in place.
        restored: of the variables whose values the program gives, those that have them from a checkpoint.
    """

    def __init__(self, changed: Callable[[str], None]) -> None:
        self._changed = changed
        self.description: ProgramDescription | None = None
        self.placement: Placement | None = None
        self.home: tuple[str, ...] = ()
        self.created = self.assigned = False
        self.restored: frozenset[str] = frozenset()

    @property
    def servers(self) -> tuple[ServerRef, ...]:
        """Who holds the shards, or is asked to."""
        return servers_of(self.placement) if self.placement else ()

    @property
    def created_placement(self) -> Placement | None:
        """Where the variables are; None: they are not on servers yet, or no more."""
        return self.placement if self.created else None

    @property
    def lacks_values(self) -> bool:
        """Whether the program gives initial values, which are not in place yet."""
        return bool(self.description and self.description.given) and not self.assigned

    def describe(self, description: ProgramDescription) -> None:
        """The program is known."""
        self.description = description
        self._changed(JobRecordKind.PLAN)

    def place(self, placement: Placement) -> None:
        """The shards are to be allocated there."""
        self.placement = placement
        self.home = tuple(shard.server for shard in placement.shards)
        self._changed(JobRecordKind.PLAN)

    def create(self) -> None:
        """All servers hold the shards."""
        self.created = True
        self._changed(JobRecordKind.STATE)

    def fill(self) -> None:
        """The values that the program gives are in place."""
        self.assigned = True
        self._changed(JobRecordKind.STATE)

    def resume_from(self, given: frozenset[str], *, assigned: bool) -> None:
        """The shards have the values of a checkpoint.

        Args:
            given: of the variables whose values the program gives, those that were in it.
            assigned: these are all of them.
        """
        self.assigned, self.restored = self.assigned or assigned, given
        self._changed(JobRecordKind.STATE)

    def drop(self) -> tuple[ServerRef, ...]:
        """The shards are to be freed, or lost; the servers that had them."""
        servers, self.placement, self.created = self.servers, None, False
        self._changed(JobRecordKind.PLAN)
        self._changed(JobRecordKind.STATE)
        return servers

    def restart(self) -> None:
        """No variable has its value any more."""
        self.assigned, self.restored = False, frozenset()
        self._changed(JobRecordKind.STATE)

    def to_proto(self) -> state_pb2.PlanRecord | None:
        """The record of this plan; None: there is nothing to tell."""
        if self.description is None:
            return None
        record = state_pb2.PlanRecord(
            variables=[variable.to_proto(name) for name, variable in self.description.variables.items()],
            samples=self.description.samples,
            placement=self.placement.to_proto() if self.placement else None,
            home=self.home,
        )
        if self.placement:
            record.placement.ClearField("variables")
        return record

    def write_to(self, record: state_pb2.JobRecord) -> None:
        """Writes down how far it is, as part of the job's record."""
        record.assigned, record.created = self.assigned, self.created
        record.restored.extend(sorted(self.restored))

    def restore_from(self, record: state_pb2.JobRecord, plan: state_pb2.PlanRecord | None) -> None:
        """Goes on from the job's record, and its own if there is one."""
        self.assigned, self.created = record.assigned, record.created
        self.restored = frozenset(record.restored)
        if plan is None:
            return
        variables = dict(variable_from_proto(variable) for variable in plan.variables)
        self.description = ProgramDescription(variables, plan.samples)
        self.home = tuple(plan.home)
        if plan.HasField("placement"):
            placement = tensor_pb2.Placement()
            placement.CopyFrom(plan.placement)
            placement.variables.extend(plan.variables)
            self.placement = Placement.from_proto(placement)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert not self.created or self.placement is not None
        assert self.description is None or self.description.variables, "there is nothing to train"
