"""What a process says of itself when it registers as a member."""

from dataclasses import dataclass

from shoal import errors
from shoal._role.identity import MEMBER_ID
from shoal.status import Role
from shoal.v1 import coordinator_pb2


@dataclass(frozen=True, slots=True)
class Registration:
    """What a process says of itself when it wants to be a member."""

    role: Role
    member: str
    process: str  # drawn by each process: the same id from two of them is a clash, from one a retry
    address: str = ""
    device: str = ""
    metrics_address: str = ""

    def __post_init__(self) -> None:
        if not MEMBER_ID.fullmatch(self.member):
            raise errors.BadRequest(f"member id {self.member!r} is not 1 to 63 characters of a-z, 0-9 and -")
        if not self.process:
            raise errors.BadRequest(f"{self.member} names no process; draw a random one when the process starts")
        if self.role is Role.SERVER and not self.address:
            raise errors.BadRequest(f"server {self.member} gives no address; workers could not reach it")

    def to_proto(self) -> coordinator_pb2.RegisterRequest:
        """The message that carries this registration."""
        return coordinator_pb2.RegisterRequest(
            role=coordinator_pb2.Role.Value(self.role.name),
            member=self.member,
            process=self.process,
            address=self.address,
            device=self.device,
            metrics_address=self.metrics_address,
        )

    @classmethod
    def from_proto(cls, message: coordinator_pb2.RegisterRequest) -> "Registration":
        """The registration that a message carries.

        Raises:
            BadRequest: it makes no sense.
        """
        try:
            role = Role[coordinator_pb2.Role.Name(message.role)]
        except (KeyError, ValueError):
            raise errors.BadRequest(f"role {message.role} is none of SERVER, WORKER, SESSION") from None
        return cls(
            role=role,
            member=message.member,
            process=message.process,
            address=message.address,
            device=message.device,
            metrics_address=message.metrics_address,
        )
