"""Transports: the interface of a client's calls to one server, and of what opens them.

What the messages mean is in `shoal._training.parameters`; which transport is taken, in `shoal._transport.selector`. A
server's half of each transport is in `shoal_server.serving`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from shoal._transport.rpc_calls import RpcCalls
from shoal._wire import Arrival, Load, ShardLayout
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb


class Transport(ABC):
    """A client's half: calls to one server's shards of a job, one at a time, except for `close`.

    Attributes:
        lost: why the memory that was lent is not there any more; empty: it is.
    """

    lost = ""

    @property
    def broken(self) -> bool:
        """Whether no more calls can be made, so that another transport has to be opened."""
        return False

    def memory(self) -> tuple[int, np.ndarray] | None:
        """Returns memory for a load to this server that no call has to copy: its number, from 1, and its bytes.

        It is free again when nobody looks at the array any more. None: there is none, or none is free.
        """
        return None

    @abstractmethod
    def pull(self, request: pb.PullRequest, arrival: Arrival | None) -> list[header_pb2.ShardHeader]:
        """Pulls all shards, when the consistency mode lets it.

        Args:
            request: names the shards, in order; its slot is set here.
            arrival: takes the values; None: only waits.
        """

    @abstractmethod
    def push(self, header: pb.PushHeader, load: Load) -> pb.PushReply:
        """Pushes to all shards.

        Args:
            header: names the shards, in order; its slot is set here.
            load: what is brought, perhaps in `memory` of this transport.
        """

    @abstractmethod
    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        """Makes the second phase of a push."""

    @abstractmethod
    def assign(self, header: pb.PushHeader, load: Load) -> None:
        """Overwrites values."""

    @abstractmethod
    def close(self) -> None:
        """Ends the call in progress with Unreachable or Cancelled. What was lent or pulled stays valid."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server that a transport is opened to.

    Attributes:
        address: of the server.
        layouts: of the job's shards there.
        rpc: calls by gRPC, which every server answers.
        offer: what the server said of its transports; empty unless the factory `attaches`.
    """

    address: str
    layouts: Sequence[ShardLayout]
    rpc: RpcCalls
    offer: pb.AttachReply = field(default_factory=pb.AttachReply)


class Unavailable(Exception):
    """A server has no such transport for this client, which is no fault of anybody.

    Args:
        for_good: it never will have.
    """

    def __init__(self, *, for_good: bool = False) -> None:
        super().__init__()
        self.for_good = for_good


class TransportFactory(ABC):
    """Opens one kind of transport.

    Attributes:
        name: in the registry.
        title: in messages.
        carrier: name of the transport whose connection it uses, which may be its own. If a server refuses a carrier,
            everything on it is refused.
        settings: values of SHOAL_TRANSPORT under which it may be used.
        rank: of the transports that a setting allows, the one with the lowest rank is tried first. Shared memory has
            10, lanes have 20, gRPC has 30.
        attaches: whether `open` needs the server's offer.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    carrier: ClassVar[str]
    settings: ClassVar[frozenset[str]]
    rank: ClassVar[int]
    attaches: ClassVar[bool] = True

    @abstractmethod
    def open(self, target: Target, loads: int) -> Transport:
        """Opens a transport to a server.

        Args:
            target: the server.
            loads: how many loads are held in `memory`, or pulled values, at once.

        Raises:
            Unavailable: the server has none for this client.
            ShoalError: it should have, and does not answer or refuses.
        """


__all__ = ["Target", "Transport", "TransportFactory", "Unavailable"]
