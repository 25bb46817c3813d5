"""Transports: the interface of a client's calls to one server, and of what opens them.

What the messages mean is in `shoal._training.parameters`; which transport is taken, in `shoal._transport.selector`. A
server's half of each transport is in `shoal_server.serving`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from shoal._transport.grpc_calls import GrpcCalls
from shoal._wire import PullDecoder, PushPayload, ShardLayout
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
        """Returns memory for a payload to this server that no call has to copy: its number, from 1, and its bytes.

        It is free again when nobody looks at the array any more. None: there is none, or none is free.
        """
        return None

    @abstractmethod
    def pull(self, request: pb.PullRequest, pull_decoder: PullDecoder | None) -> list[header_pb2.ShardHeader]:
        """Pulls all shards, when the consistency mode lets it.

        Args:
            request: names the shards, in order; its slot is set here.
            pull_decoder: takes the values; None: only waits.
        """

    @abstractmethod
    def push(self, header: pb.PushHeader, payload: PushPayload) -> pb.PushReply:
        """Pushes to all shards.

        Args:
            header: names the shards, in order; its slot is set here.
            payload: what is brought, perhaps in `memory` of this transport.
        """

    @abstractmethod
    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        """Makes the second phase of a push."""

    @abstractmethod
    def assign(self, header: pb.PushHeader, payload: PushPayload) -> None:
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
    rpc: GrpcCalls
    offer: pb.AttachReply = field(default_factory=pb.AttachReply)


class TransportUnavailable(Exception):
    """A server does not offer a transport to this client. This is not an error: the next transport is tried.

    Args:
        reason: for the error that is raised if no other transport works either.
        for_good: whether the transport need not be tried again as long as the connection lasts.
    """

    def __init__(self, reason: str, *, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


class TransportFactory(ABC):
    """Opens one kind of transport.

    Attributes:
        name: unique among transports.
        title: what messages call it.
        carrier: name of the transport that makes the connection. Shared memory has `lane` here; a transport that
            connects by itself has its own name. If a server refuses a carrier, it refuses every transport on it.
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
    def open(self, target: Target, payloads: int) -> Transport:
        """Opens a transport to a server.

        Args:
            target: the server.
            payloads: pushes, or pulls, whose memory is in use at the same time; `Transport.memory` may lend that many.

        Raises:
            Unavailable: the server does not offer this transport to this client.
            ShoalError: the server offers it, and does not answer or refuses.
        """


__all__ = ["Target", "Transport", "TransportFactory", "TransportUnavailable"]
