"""Registration of a process as a member."""

from dataclasses import dataclass

from shoal import errors
from shoal._role.identity import MEMBER_ID, check_zone
from shoal._wire import shortened
from shoal.status import Role
from shoal.v1 import coordinator_pb2


@dataclass(frozen=True, slots=True)
class Registration:
    """What a process states about itself when it registers.

    Attributes:
        zone: zone of a server; empty means the host of its address.
        holder: name of the caller that registers, as its token or certificate says. It is not a part of the message.
        has_secret: whether the process gets a secret, which its later calls must show. It is not a part of the message.

    Raises:
        BadRequest: the member id or the zone is invalid, or the process or a server's address is missing.
    """

    role: Role
    member: str
    process: str  # random id of the process; tells a retry from a second process with the same id
    address: str = ""
    device: str = ""
    metrics_address: str = ""
    zone: str = ""
    holder: str = ""
    has_secret: bool = False

    def __post_init__(self) -> None:
        if not MEMBER_ID.fullmatch(self.member):
            raise errors.BadRequest(f"member id {self.member!r:.80} is not 1 to 63 characters of a-z, 0-9 and -")
        if not self.process:
            raise errors.BadRequest(f"{self.member} has no process id; generate a random one when the process starts")
        if self.role is Role.SERVER and not self.address:
            raise errors.BadRequest(f"server {self.member} has no address; workers need one to reach it")
        check_zone(self.member, self.zone)

    def is_repeated_by(self, later: "Registration") -> bool:
        """Returns whether a later registration is made by the same process.

        Processes of one holder tell nobody their process ids. Other holders may have seen them all the same, for
        example in a store. So the caller must be the same, too.
        """
        return (self.process, self.role, self.holder) == (later.process, later.role, later.holder)

    def to_proto(self) -> coordinator_pb2.RegisterRequest:
        """Returns the message that carries this registration."""
        return coordinator_pb2.RegisterRequest(
            role=coordinator_pb2.Role.Value(self.role.name),
            member=self.member,
            process=self.process,
            address=self.address,
            device=self.device,
            metrics_address=self.metrics_address,
            zone=self.zone,
        )

    @classmethod
    def from_proto(cls, message: coordinator_pb2.RegisterRequest) -> "Registration":
        """Returns the registration in a message. Texts in records of earlier versions may be long; they are shortened.

        Raises:
            BadRequest: the message is invalid.
        """
        try:
            role = Role[coordinator_pb2.Role.Name(message.role)]
        except (KeyError, ValueError):
            raise errors.BadRequest(f"role {message.role} is not one of SERVER, WORKER, SESSION") from None
        return cls(
            role=role,
            member=message.member,
            process=shortened(message.process),
            address=shortened(message.address),
            device=shortened(message.device),
            metrics_address=shortened(message.metrics_address),
            zone=message.zone,
        )
