"""Connection of a client to one lock group of a job, over the transports that the selector opens.

A lock group may move to another server, and the connection goes with it: see `ServerConnection.move`. All transports
carry the messages of `parameter_server.proto`. `shoal._training.parameters` defines what a call means, how often it is
repeated and which servers it goes to.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from shoal import errors
from shoal._security import NO_CREDENTIALS, Credentials
from shoal._system.logs import Log
from shoal._transport.grpc_calls import GrpcCalls
from shoal._transport.grpc_transport import GrpcTransport
from shoal._transport.selector import Selector
from shoal._transport.transport import Target, Transport, TransportFactory
from shoal._wire import CallLayout, Memory, PullDecoder, PushPayload
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

T = TypeVar("T")
_log = Log(__name__)

# One that the program computes with, one that is being filled, and one that it still holds from the previous step.
_VALUE_REGIONS = 3
# One that is being sent, and one that is being written.
_GRADIENT_REGIONS = 2
# Attempts in this process at a time to open a transport that was refused. Each has a thread for a few seconds.
_attempts = threading.BoundedSemaphore(4)


class _Route:
    """The transports to one server. `ServerConnection` has another route after a move.

    Args:
        address, layout, setting, credentials: as for `ServerConnection`.

    Attributes:
        address: as given.
        pull_transport, push_transport: as for `ServerConnection`.
        closed: whether `close` was called. Any thread may call it. It ends the opening of a transport, too: a server
            that was stopped accepts a connection, and says nothing on it.
    """

    def __init__(self, address: str, layout: CallLayout, setting: str, credentials: Credentials) -> None:
        self.address = address
        self._rpc = GrpcCalls(address, credentials)
        self._target = Target(address, layout, self._rpc, credentials=credentials)
        self._opening = threading.Lock()  # guards the next five; held while one is opened, for seconds at most
        self._selector = Selector(setting)
        self._trying = False  # whether a thread tries to open a better transport
        self._better: dict[Transport, Transport] = {}  # opened beside the calls, by the transport that they replace
        self.pull_transport: Transport | None = None
        self.push_transport: Transport | None = None
        self.closed = False

    def pull(self, request: pb.PullRequest, pull_decoder: PullDecoder | None) -> list[header_pb2.ShardHeader]:
        transport = self.for_pulls()
        return self._unless_closed(lambda: transport.pull(request, pull_decoder))

    def push(self, header: pb.PushHeader, payload: PushPayload) -> pb.PushReply:
        transport = self.for_pushes()
        return self._unless_closed(lambda: transport.push(header, payload))

    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        transport = self.for_pushes()
        return self._unless_closed(lambda: transport.commit(request))

    def assign(self, header: pb.PushHeader, payload: PushPayload) -> None:
        transport = self.for_pulls()  # already open, because a pull precedes an assign
        self._unless_closed(lambda: transport.assign(header, payload))

    def pull_slot(
        self, request: pb.PullRequest, pull_decoder: PullDecoder, layout: CallLayout
    ) -> list[header_pb2.ShardHeader]:
        transport = GrpcTransport(replace(self._target, layout=layout))
        return self._unless_closed(lambda: transport.pull(request, pull_decoder))

    def reopen(self) -> None:
        with self._opening:
            for transport in (self.pull_transport, self.push_transport):
                if transport:
                    transport.close()
            self.pull_transport = self.push_transport = None

    def close(self) -> None:
        self.closed = True
        self._target.opening.close()
        for transport in (self.pull_transport, self.push_transport, *self._better.copy().values()):
            if transport:
                transport.close()
        self._rpc.close()

    def for_pulls(self) -> Transport:
        with self._opening:
            self.pull_transport = self._usable(self.pull_transport, _VALUE_REGIONS)
            return self.pull_transport

    def for_pushes(self) -> Transport:
        with self._opening:
            self.push_transport = self._usable(self.push_transport, _GRADIENT_REGIONS)
            return self.push_transport

    def _usable(self, transport: Transport | None, payloads: int) -> Transport:
        """Returns this transport, or a new one if it is broken or was not opened yet, or if a better one is open."""
        if self.closed:
            raise self._cancelled()
        if transport is not None:
            better = self._better.pop(transport, None) if self._better else None
            if better is None and not self._selector.due(transport):
                self._try_again(transport, payloads)
                return transport
            transport.close()
            if better is not None and not better.broken:
                _log.info("a better transport to a server is open again", server=self.address)
                return better
        opened = self._selector.open(self._target, payloads)
        if self.closed:  # meanwhile: `close` did not see this transport
            opened.close()
            raise self._cancelled()
        return opened

    def _try_again(self, current: Transport, payloads: int) -> None:
        """Tries to open a better transport that was refused, beside the calls, if it is time for that."""
        if self._trying or self._selector.is_content(current) or not _attempts.acquire(blocking=False):
            return
        if not (factories := self._selector.again(current)):
            _attempts.release()
            return
        self._trying = True
        attempt = threading.Thread(
            target=self._attempt, args=(current, factories, payloads), name="transport", daemon=True
        )
        try:
            attempt.start()
        except RuntimeError:  # the system does not allow this process another thread: later
            self._trying = False
            _attempts.release()

    def _attempt(self, current: Transport, factories: Sequence[TransportFactory], payloads: int) -> None:
        try:
            opened = self._selector.open_first(factories, self._target, payloads)
            if opened is None:
                return
            if self._selector.place(opened) >= self._selector.place(current):
                opened.close()
                return
            self._better[current] = opened  # the next call takes it
            if self.closed:  # meanwhile: `close` did not see it
                opened.close()
        except Exception:
            _log.exception("an attempt to open a better transport failed", server=self.address)
        finally:
            self._trying = False
            _attempts.release()

    def _unless_closed(self, call: Callable[[], T]) -> T:
        if self.closed:  # while a transport was being opened, which `close` did not see
            self.close()
            raise self._cancelled()
        try:
            return call()
        except errors.Unreachable:
            if self.closed:
                raise self._cancelled() from None
            raise

    def _cancelled(self) -> errors.Cancelled:
        return errors.Cancelled(f"the connection to {self.address} was closed by this client", address=self.address)


class ServerConnection:
    """Connection to one lock group of a job, on the server that has it.

    One thread may pull while another one pushes, so each direction has a transport of its own. A third
    thread may ask for memory meanwhile, and any thread may `move` or `close` the connection.

    Args:
        address: address of the server.
        layout: layout of the calls, which name all shards of the group.
        setting: selects transports, as SHOAL_TRANSPORT does.
        credentials: what this process presents to the server.

    Attributes:
        layout, setting: as given.
        indices: numbers of the shards.
        moves: how often the connection was moved.
        closed: whether `close` was called.
    """

    def __init__(
        self, address: str, layout: CallLayout, setting: str, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        self.layout = layout
        self.indices = [shard.shard for shard in layout.shards]
        self.moves, self.closed = 0, False
        self.setting, self._credentials = setting, credentials
        self._route = _Route(address, layout, setting, credentials)

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._route.address

    @property
    def group(self) -> int:
        """Name of the lock group."""
        return self.indices[0]

    @property
    def pull_transport(self) -> Transport | None:
        """Transport of pulls; None before the first one."""
        return self._route.pull_transport

    @property
    def push_transport(self) -> Transport | None:
        """Transport of pushes; None before the first one."""
        return self._route.push_transport

    def move(self, address: str) -> None:
        """Continues on another server. Calls in progress end with Unreachable, and are repeated there.

        Memory that the old transports have lent keeps its content: its payloads are sent to the new server as bytes.
        No call waits for the old server, not even to open a transport.
        """
        left, self._route = self._route, _Route(address, self.layout, self.setting, self._credentials)
        self.moves += 1
        left.close()
        if self.closed:  # meanwhile: `close` did not see the new route
            self._route.close()

    def pull(self, request: pb.PullRequest, pull_decoder: PullDecoder | None) -> list[header_pb2.ShardHeader]:
        """Pulls all shards of the group. The reply waits until the consistency mode allows it.

        Args:
            request: names the shards of the group, in order.
            pull_decoder: receives the values; None means to wait without them.

        Returns:
            The headers of the shards.
        """
        return self._on_route(lambda route: route.pull(request, pull_decoder))

    def pull_slot(
        self, request: pb.PullRequest, pull_decoder: PullDecoder, layout: CallLayout
    ) -> list[header_pb2.ShardHeader]:
        """Pulls an optimizer slot of all shards of the group, by gRPC: a call that is made a few times for each job.

        Args:
            request: names the slot, and the shards of the group, in order.
            pull_decoder: receives the slot.
            layout: layout of the slots of these shards.

        Returns:
            The headers of the shards.
        """
        return self._on_route(lambda route: route.pull_slot(request, pull_decoder, layout))

    @property
    def pushes_open(self) -> bool:
        """Whether a transport for pushes is open."""
        return self.push_transport is not None and not self.push_transport.broken

    def open_for_pushes(self) -> None:
        """Opens a transport for pushes, unless one is open."""
        self._on_route(_Route.for_pushes)

    def prepare(self, payload: PushPayload, memory: Memory | None) -> PushPayload:
        """Makes a payload ready for `push`, in the transport's memory if any. Waits until all arrays are available.

        Args:
            payload: payload for the shards of the group.
            memory: allocates memory for a copy if the transport has none, so that the arrays may change at once. None
                means that the arrays will not change.

        Returns:
            The payload to push.
        """
        if payload.arrays is not None:
            transport = self._on_route(_Route.for_pushes)
            if taken := transport.memory():
                return payload.copied(taken[1], region=taken[0], owner=transport, arrays_stay=memory is None)
            if memory:
                return payload.copied_to(memory)
        return payload

    def lend(self, payload: PushPayload, memory: Memory) -> PushPayload:
        """Adds memory to a payload without arrays: the transport's, if there is any.

        Args:
            payload: payload for the shards of the group.
            memory: allocates memory if the transport has none.

        Returns:
            The payload with its memory.
        """
        transport = self._on_route(_Route.for_pushes)
        if taken := transport.memory():
            return replace(payload, copy=taken[1], region=taken[0], owner=transport)
        return replace(payload, copy=memory(payload.layout.region_bytes))

    def push(self, header: pb.PushHeader, payload: PushPayload) -> pb.PushReply:
        """Pushes to all shards of the group."""
        return self._on_route(lambda route: route.push(header, payload))

    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        """Commits a staged push."""
        return self._on_route(lambda route: route.commit(request))

    def assign(self, header: pb.PushHeader, payload: PushPayload) -> None:
        """Overwrites values."""
        self._on_route(lambda route: route.assign(header, payload))

    def reopen(self) -> None:
        """Closes the transports, so that the next calls open others, with the present credentials.

        A call in progress in the other direction ends with Unreachable, and is repeated.
        """
        self._route.reopen()

    def close(self) -> None:
        """Closes all transports. Calls in progress end with Cancelled."""
        self.closed = True
        self._route.close()

    def _on_route(self, call: Callable[[_Route], T]) -> T:
        route = self._route
        try:
            return call(route)
        except errors.Cancelled:
            if self.closed or not route.closed:
                raise
        raise errors.Unreachable(f"the shards on {route.address} have moved to {self.address}", address=route.address)


__all__ = ["ServerConnection"]
