"""Interface of a transport's server half, and its configuration."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shoal._limits import catalogue
from shoal._rpc import OnOutcome
from shoal._security import NO_CREDENTIALS, Authorizer, Credentials, open_authorizer
from shoal._transport import STALL_S
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.serving.service import DataService


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """Configuration that a server gives to its endpoints.

    Attributes:
        host: host to listen on.
        advertise: host by which clients reach the server; empty means the bound one.
        lane_port: port for lanes; 0 means any free one.
        lanes: maximum number of connections of each framed transport; 0 disables framed transports.
        host_lanes: maximum number of connections of one host, of each framed transport.
        credentials: with TLS settings, endpoints accept TLS only.
        senders: threads that send pulled values; a waiting pull holds none of them.
        receivers: threads that receive pushes; a stalled push blocks no other kind of call.
        committers: threads that commit pushes; a commit that waits holds none of them.
        stall_s: seconds without progress after which a pull or push is ended.
        clock: monotonic clock by which `stall_s` is measured, in seconds.
        authorizer: decides which clients may connect.
        on_outcome: called with each call, of a transport that is not gRPC, that is refused because of its caller's
            identity. It does not wait.
    """

    host: str
    advertise: str = ""
    lane_port: int = 0
    lanes: int = catalogue.LANES.default
    host_lanes: int = catalogue.HOST_LANES.default
    credentials: Credentials = NO_CREDENTIALS
    senders: ThreadPoolExecutor
    receivers: ThreadPoolExecutor
    committers: ThreadPoolExecutor
    stall_s: float = STALL_S
    clock: Callable[[], float] = time.monotonic
    authorizer: Authorizer = field(default_factory=open_authorizer)
    on_outcome: OnOutcome = lambda _: None


class Endpoint:
    """A transport's server half: takes calls from its clients and passes them to the service.

    Every method has a default that does nothing. An endpoint that cannot work on this host (a path is too long, a
    device is missing) logs the reason and offers nothing, so that the server starts without it.
    """

    def contribute(self, offer: pb.AttachReply) -> None:
        """Adds to the offer how clients reach this transport. Clients get it before they open a transport."""

    def handlers(self) -> Mapping[str, Callable[..., Any]]:
        """Returns handlers of RPCs of the parameter server's service, by method."""
        return {}

    def start(self, address: str) -> None:
        """Starts to take calls. The server calls it once, when its own port is bound.

        Args:
            address: the address by which clients know the server.
        """

    def end_stalled(self) -> None:
        """Ends calls whose callers stall. The server calls it periodically."""

    def end_refused(self) -> None:
        """Closes connections of callers whose tokens have expired or were revoked. The server calls it periodically.

        Calls in progress check their callers themselves, so that they end with an error that says so.
        """

    def stop(self) -> None:
        """Ends all calls and frees all resources. May be called without `start`, if the server fails to start.

        A killed server does not call it. The next server on the host must be able to find and remove what an endpoint
        leaves outside its process, such as a file.
        """


class EndpointFactory(ABC):
    """Makes the server half of one transport.

    Attributes:
        name: unique among endpoints; names its entry in `AttachReply.transports` and labels its bytes in metrics.
    """

    name: ClassVar[str]

    @abstractmethod
    def make(self, service: DataService, config: EndpointConfig) -> Endpoint:
        """Returns the endpoint for one server. It binds ports, but takes no call before `Endpoint.start`.

        Raises:
            PortInUse: its port is taken.
        """


__all__ = ["Endpoint", "EndpointConfig", "EndpointFactory"]
