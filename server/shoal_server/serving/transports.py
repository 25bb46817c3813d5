"""The interface of a transport's server half, and what a server gives it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal._transport import STALL_S
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.serving.service import DataService


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """What a server gives the server halves of its transports.

    Attributes:
        host: to listen on.
        advertise: host that clients reach it by; empty: the one bound.
        lane_port: for lanes; 0: any free one.
        lanes: how many connections each framed transport accepts; more are refused. 0: no framed transport is offered.
        senders: threads that send what is pulled; a pull that waits holds none of them.
        receivers: threads that receive what is pushed; a push that stalls holds one, and no other kind of call.
        committers: threads that commit what was pushed; a cut holds commits back, and must be reached meanwhile.
        stall_s: seconds after which a pull or push that does not move is ended.
    """

    host: str
    advertise: str = ""
    lane_port: int = 0
    lanes: int = 1024
    senders: ThreadPoolExecutor
    receivers: ThreadPoolExecutor
    committers: ThreadPoolExecutor
    stall_s: float = STALL_S


class Endpoint:
    """A transport's server half: takes calls from its clients and makes them on the service.

    Each method may be left as it is here. An endpoint that cannot work on this host (a path is too long, a device is
    missing) logs why and offers nothing, so that the server starts without it.
    """

    def contribute(self, offer: pb.AttachReply) -> None:
        """Adds to what clients are told, before they open a transport: how to reach this one."""

    def handlers(self) -> Mapping[str, Callable[..., Any]]:
        """Returns handlers of RPCs of the parameter server's service, by method."""
        return {}

    def start(self, address: str) -> None:
        """Begins to take calls. The server calls it once, when its own port is bound.

        Args:
            address: of the server, by which clients know it.
        """

    def end_stalled(self) -> None:
        """Ends calls whose callers stall; called once in a while."""

    def stop(self) -> None:
        """Ends all calls, and frees what is held. It may be called without `start`, if the server fails to start.

        A server that is killed calls nothing. What an endpoint leaves outside its process, such as a file, the next
        server on the host must be able to find and remove.
        """


class EndpointFactory(ABC):
    """Makes the server half of one transport.

    Attributes:
        name: unique among endpoints. `AttachReply.transports` has what it offers under this name, and metrics count
            its bytes by it.
    """

    name: ClassVar[str]

    @abstractmethod
    def make(self, service: DataService, config: EndpointConfig) -> Endpoint:
        """Returns the endpoint for one server; binds ports, but takes no call before `Endpoint.start`.

        Raises:
            PortInUse: its port is taken.
        """


__all__ = ["Endpoint", "EndpointConfig", "EndpointFactory"]
