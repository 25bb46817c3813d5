"""Transport interfaces: a client's calls to one server, and the factories that open transports.

`shoal._training.parameters` defines what the messages mean. `shoal._transport.selector` selects a transport.
`shoal_server.serving` has the server's half of each transport.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from shoal._security import Credentials
from shoal._transport.grpc_calls import GrpcCalls
from shoal._wire import CallLayout, PullDecoder, PushPayload
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb


class Transport(ABC):
    """A client's half of a transport: calls to one server's shards of a job, one at a time, except for `close`.

    Attributes:
        lost: why the memory that the transport would lend is lost, or was refused; empty if it is not.
    """

    lost = ""

    @property
    def broken(self) -> bool:
        """Whether no more calls can be made, so that another transport must be opened."""
        return False

    def memory(self) -> tuple[int, np.ndarray] | None:
        """Returns memory for a payload to this server, so that calls do not copy it.

        Returns:
            The number of the region, from 1, and its bytes. It is free again when no array refers to it. None if there
            is none, or none is free.
        """
        return None

    @abstractmethod
    def pull(self, request: pb.PullRequest, pull_decoder: PullDecoder | None) -> list[header_pb2.ShardHeader]:
        """Pulls all shards. The reply waits until the consistency mode allows it.

        Args:
            request: names the shards, in order; this method sets its region.
            pull_decoder: receives the values; None means to wait without them.

        Returns:
            The headers of the shards.
        """

    @abstractmethod
    def push(self, header: pb.PushHeader, payload: PushPayload) -> pb.PushReply:
        """Pushes to all shards.

        Args:
            header: names the shards, in order; this method sets its region.
            payload: the arrays, which may lie in `memory` of this transport.

        Returns:
            The server's reply.
        """

    @abstractmethod
    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        """Commits a staged push."""

    @abstractmethod
    def assign(self, header: pb.PushHeader, payload: PushPayload) -> None:
        """Overwrites values."""

    @abstractmethod
    def close(self) -> None:
        """Ends the call in progress with Unreachable or Cancelled. Lent memory and pulled values stay valid."""


class Closable(Protocol):
    """What any thread may close."""

    def close(self) -> None:
        """Closes it."""


class Opening:
    """What is being opened to a server, so that any thread can end that. Opening may wait for seconds.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self) -> None:
        self._opened: set[Closable] = set()
        self.closed = False

    @property
    def busy(self) -> bool:
        """Whether something is being opened."""
        return bool(self._opened)

    @contextmanager
    def of(self, opened: Closable) -> Iterator[None]:
        """Lets `close` close something for the time of a `with` statement."""
        self._opened.add(opened)
        if self.closed:  # meanwhile: `close` did not see it
            opened.close()
        try:
            yield
        finally:
            self._opened.discard(opened)

    def close(self) -> None:
        """Closes what is being opened, and what will be."""
        self.closed = True
        for opened in self._opened.copy():
            opened.close()


@dataclass(frozen=True, slots=True)
class Target:
    """The server to which a transport is opened.

    Attributes:
        address: address of the server.
        layout: layout of the calls, which name all shards of the job on that server.
        rpc: calls by gRPC, which every server answers.
        offer: the server's offer of transports; empty unless the factory `attaches`.
        credentials: what this process presents to the server.
        opening: the lanes that are being opened to it.
    """

    address: str
    layout: CallLayout
    rpc: GrpcCalls
    offer: pb.AttachReply = field(default_factory=pb.AttachReply)
    credentials: Credentials = field(default_factory=Credentials)
    opening: Opening = field(default_factory=Opening)


class TransportUnavailable(Exception):
    """A server does not offer a transport to this client. This is not an error: the selector tries the next transport.

    Args:
        reason: text for the error that is raised if no other transport works either.
        for_good: the transport need not be tried again while the connection lasts.
        passing: the reason may pass, such as full memory. The transport is tried again while another one is in use.
    """

    def __init__(self, reason: str, *, for_good: bool = False, passing: bool = False) -> None:
        super().__init__(reason)
        self.for_good, self.passing = for_good, passing


class TransportFactory(ABC):
    """Opens one kind of transport.

    Attributes:
        name: unique among transports.
        title: name in messages.
        carrier: name of the transport that makes the connection. Shared memory has `lane` here; a transport that
            connects by itself has its own name. If a server refuses a carrier, it refuses every transport on it.
        settings: values of SHOAL_TRANSPORT that select this transport.
        rank: order of the transports that a setting selects: the lowest rank is tried first. Shared memory has 10,
            lanes have 20, gRPC has 30.
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
            payloads: largest number of payloads or pulled values in use at the same time; `Transport.memory` may lend
                this many regions.

        Returns:
            The transport.

        Raises:
            TransportUnavailable: the server does not offer this transport to this client.
            ShoalError: the server offers it, but does not answer or refuses.
        """


__all__ = ["Opening", "Target", "Transport", "TransportFactory", "TransportUnavailable"]
