"""A client's connection to one server's shards of a job, over whatever transports the selector opens.

What is said is the same on each: the messages of `parameter_server.proto`. What a call means, how often it is repeated
and which servers it goes to is in `shoal._training.parameters`.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from shoal import errors
from shoal._transport.grpc_calls import GrpcCalls
from shoal._transport.selector import Selector
from shoal._transport.transport import Target, Transport
from shoal._wire import Memory, PullDecoder, PushPayload, ShardLayout, region_offsets
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

T = TypeVar("T")

# One that the program computes with, one that is being filled, and one that it still holds from the step before.
_VALUE_REGIONS = 3
# One that is on its way, and one that is being written.
_GRADIENT_REGIONS = 2


class ServerConnection:
    """The way to one server's shards of a job.

    One thread at a time pulls, and one pushes, both at once if they like, so each has a transport of its own; a third
    may ask for memory meanwhile.

    Args:
        address: of the server.
        layouts: of the job's shards there.
        setting: allows some transports, as SHOAL_TRANSPORT does.
    """

    def __init__(self, address: str, layouts: Sequence[ShardLayout], setting: str) -> None:
        self.address, self.layouts = address, layouts
        self.indices = [layout.shard for layout in layouts]
        self._rpc = GrpcCalls(address)
        self._target = Target(address, layouts, self._rpc)
        self._opening = threading.Lock()  # guards the next three; held while one is opened, for seconds at most
        self._selector = Selector(setting)
        self._pulls: Transport | None = None
        self._pushes: Transport | None = None
        self._closed = False

    def pull(self, request: pb.PullRequest, pull_decoder: PullDecoder | None) -> list[header_pb2.ShardHeader]:
        """Pulls all shards of this server, when the consistency mode lets it.

        Args:
            request: names the shards of this server, in order.
            pull_decoder: takes the values; None: only waits.
        """
        transport = self._for_pulls()
        return self._unless_closed(lambda: transport.pull(request, pull_decoder))

    def prepare(self, payload: PushPayload, memory: Memory | None) -> PushPayload:
        """Makes a payload ready for `push`: in the transport's memory if it has any. It waits for what is still to come.

        Args:
            payload: for the shards of this server.
            memory: for a copy where there is none, so that the arrays may change at once; None: they will not.
        """
        if payload.arrays is not None:
            transport = self._for_pushes()
            if taken := transport.memory():
                return payload.copied(taken[1], region=taken[0], owner=transport, arrays_stay=memory is None)
            if memory:
                return payload.copied_to(memory)
        return payload

    def lend(self, payload: PushPayload, memory: Memory) -> PushPayload:
        """Memory for a payload that is still to be written: the transport's, if it has any.

        Args:
            payload: for the shards of this server, with nothing in it.
            memory: where the transport has none.
        """
        transport = self._for_pushes()
        if taken := transport.memory():
            return replace(payload, copy=taken[1], region=taken[0], owner=transport)
        return replace(payload, copy=memory(region_offsets(payload.layouts)[1]))

    def push(self, header: pb.PushHeader, payload: PushPayload) -> pb.PushReply:
        """Pushes to all shards of this server."""
        transport = self._for_pushes()
        return self._unless_closed(lambda: transport.push(header, payload))

    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        """The second phase of a push."""
        transport = self._for_pushes()
        return self._unless_closed(lambda: transport.commit(request))

    def assign(self, header: pb.PushHeader, payload: PushPayload) -> None:
        """Overwrites values."""
        transport = self._for_pulls()  # which is there: who assigns has pulled before
        self._unless_closed(lambda: transport.assign(header, payload))

    def close(self) -> None:
        """Ends all; calls in progress end with Cancelled."""
        self._closed = True
        for transport in (self._pulls, self._pushes):
            if transport:
                transport.close()
        self._rpc.close()

    def _for_pulls(self) -> Transport:
        with self._opening:
            self._pulls = self._usable(self._pulls, _VALUE_REGIONS)
            return self._pulls

    def _for_pushes(self) -> Transport:
        with self._opening:
            self._pushes = self._usable(self._pushes, _GRADIENT_REGIONS)
            return self._pushes

    def _usable(self, transport: Transport | None, payloads: int) -> Transport:
        """Returns this transport, or a new one where it is broken or was not opened yet."""
        if self._closed:
            raise self._cancelled()
        if transport is not None:
            if not self._selector.due(transport):
                return transport
            transport.close()
        opened = self._selector.open(self._target, payloads)
        if self._closed:  # meanwhile: `close` has not seen this one
            opened.close()
            raise self._cancelled()
        return opened

    def _unless_closed(self, call: Callable[[], T]) -> T:
        if self._closed:  # while a transport was being opened, which `close` then has not seen
            self.close()
            raise self._cancelled()
        try:
            return call()
        except errors.Unreachable:
            if self._closed:
                raise self._cancelled() from None
            raise

    def _cancelled(self) -> errors.Cancelled:
        return errors.Cancelled(f"the connection to {self.address} was closed on this side", address=self.address)


__all__ = ["ServerConnection"]
