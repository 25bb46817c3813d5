"""One member of a cluster, and its stored record. Pure: no clock, no I/O."""

from dataclasses import dataclass, field, replace

from shoal import errors
from shoal.status import MemberStatus, Role, ServerLoad
from shoal.v1 import state_pb2
from shoal_coordinator.messages import DrainOrder, JobRef, Registration


@dataclass(slots=True)
class Member:
    """One incarnation of a member.

    Attributes:
        registration: what the process stated about itself.
        incarnation: number of the incarnation, unique in the cluster.
        last_seen: time of the last heartbeat, in seconds of Unix time.
        alive: False after the incarnation has ended. It never becomes True again.
        enrolled: whether a session has had its assignment. Each incarnation of a session gets one.
        draining: whether the member was asked to stop and finishes what others depend on. It never becomes False again.
        order: the order of a user that a server drains; None if there is none.
        drained: whether no live job needs a draining server any more. It never becomes False again.
        shards: number of shards that a server holds.
        bytes: bytes that a server holds.
        load: load of a server.
        drains_since: when a draining server asked this coordinator first, in seconds of Unix time; 0 if it has not.
        hands_over_until: until when jobs with replicas may move off a draining server, in seconds of Unix time; 0
            means that it is not known.
        absent: whether the call ended by which a session attends. It may have died, or lost its connection.
        stays_with: jobs that cannot move off a draining server, so they are saved in a checkpoint.
    """

    registration: Registration
    incarnation: int
    last_seen: float
    alive: bool = True
    enrolled: bool = False
    draining: bool = False
    order: DrainOrder | None = None
    drained: bool = False
    shards: int = 0
    bytes: int = 0
    load: ServerLoad = field(default_factory=ServerLoad)
    # Not stored: the next coordinator tries again.
    drains_since: float = 0.0
    hands_over_until: float = 0.0
    absent: bool = False
    stays_with: set[JobRef] = field(default_factory=set)

    @property
    def id(self) -> str:
        """The member id."""
        return self.registration.member

    @property
    def role(self) -> Role:
        """The member's role."""
        return self.registration.role

    @property
    def zone(self) -> str:
        """The zone of a server. Servers of one zone may be lost together."""
        return self.registration.zone or self.registration.address.rpartition(":")[0]

    @property
    def may_return(self) -> bool:
        """Whether this is a server that drains, or has drained, without an order of a user."""
        return self.draining and not self.order and self.role is Role.SERVER

    def is_free_for(self, other: Registration | None) -> bool:
        """Returns whether another process may take the id of this member, or (None) its place in a job."""
        mine = self.registration
        may_have_it = other is None or (other.holder == mine.holder and not mine.is_repeated_by(other))
        return self.alive and self.absent and may_have_it

    @property
    def has_to_leave(self) -> bool:
        """Whether a server has to end now, because it has drained as a user has ordered."""
        return self.drained and self.order is not None and not self.order.stay

    @property
    def group(self) -> str:
        """The group with which `ExpiryBreaker` judges it."""
        holder = self.registration.holder
        return (f"sessions of {holder}" if holder else "sessions") if self.role is Role.SESSION else "members"

    def check_repeated_by(self, registration: Registration, now: float, heartbeat_timeout_s: float) -> None:
        """Checks that a registration repeats the one of this live member.

        Args:
            registration: the registration of a process with the same id.
            now: seconds of Unix time.
            heartbeat_timeout_s: seconds without a heartbeat after which this member is lost.

        Raises:
            DuplicateMember: another process registers.
        """
        if self.registration.is_repeated_by(registration):
            return
        left_s = max(0.0, self.last_seen + heartbeat_timeout_s - now)
        where = f" at {self.registration.address}" if self.registration.address else ""
        raise errors.DuplicateMember(
            f"a live process{where} has the member id {self.id}: give each process its own id, or stop that one; "
            f"if that process is dead, try again in {left_s:.1f} s, when its heartbeat timeout expires",
            member=self.id,
            address=self.registration.address,
            retry_in_s=f"{left_s:.3f}",
        )

    def status(self, now: float, job: str) -> MemberStatus:
        """Returns the member's status; `job` is the name of the job that it works on, or empty."""
        return MemberStatus(
            member=self.id,
            role=self.role,
            incarnation=self.incarnation,
            address=self.registration.address,
            device=self.registration.device,
            metrics_address=self.registration.metrics_address,
            alive=self.alive,
            silent_s=max(0.0, now - self.last_seen),
            shards=self.shards,
            bytes=self.bytes,
            job=job,
            load=self.load,
            draining=self.draining,
            drained=self.drained and self.order is not None,
            zone=self.registration.zone,
        )

    def to_proto(self) -> state_pb2.MemberRecord:
        """Returns the record of this member."""
        return state_pb2.MemberRecord(
            registration=self.registration.to_proto(),
            incarnation=self.incarnation,
            enrolled=self.enrolled,
            dead=not self.alive,
            last_seen=0.0 if self.alive else self.last_seen,
            draining=self.draining,
            holder=self.registration.holder,
            has_secret=self.registration.has_secret,
            drain_order=self.order.to_proto() if self.order else None,
            drained=self.drained,
        )

    @classmethod
    def from_proto(cls, record: state_pb2.MemberRecord) -> "Member":
        """Returns the member of a record. The caller sets `last_seen` of a live member."""
        return cls(
            replace(Registration.from_proto(record.registration), holder=record.holder, has_secret=record.has_secret),
            record.incarnation,
            record.last_seen,
            alive=not record.dead,
            enrolled=record.enrolled,
            draining=record.draining,
            order=DrainOrder.from_proto(record.drain_order) if record.HasField("drain_order") else None,
            drained=record.drained,
        )
