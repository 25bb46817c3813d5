"""A client's way to one server: by lanes with shared memory, by lanes, or by gRPC, the first of these that works.

What is said is the same on each: the messages of `parameter_server.proto`. What a call means, how often it is repeated
and which servers it goes to is in `shoal._training.parameters`.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeVar, cast

import structlog

from shoal import errors
from shoal._system import host_id
from shoal._transport.inflow import take_message
from shoal._transport.lane_calls import LaneCalls
from shoal._transport.rpc_calls import RpcCalls
from shoal._wire.arrival import Arrival
from shoal._wire.framing import slot_offsets
from shoal._wire.layout import ShardLayout
from shoal._wire.packing import Memory
from shoal._wire.transfer import Delivery, Load
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

T = TypeVar("T")
_log = structlog.get_logger(__name__)

Transport = Literal["auto", "tcp", "grpc"]

# One that the program computes with, one that is being filled, and one that it still holds from the step before.
_VALUE_SLOTS = 3
# One that is on its way, and one that is being written.
_GRADIENT_SLOTS = 2


def chosen_transport() -> Transport:
    """What SHOAL_TRANSPORT in the environment allows: auto, tcp (no shared memory) or grpc (no lanes either).

    Raises:
        BadRequest: it is something else.
    """
    wish = os.environ.get("SHOAL_TRANSPORT") or "auto"
    if wish not in ("auto", "tcp", "grpc"):
        raise errors.BadRequest(f"SHOAL_TRANSPORT is {wish!r}; set it to auto, tcp or grpc, or not at all")
    return cast(Transport, wish)


class Link:
    """The way to one server's shards of a job.

    One thread at a time pulls, and one pushes, both at once if they like; a third may ask for memory meanwhile.

    Args:
        address: of the server.
        layouts: of the job's shards there.
        transport: the best way to take.
    """

    def __init__(self, address: str, layouts: Sequence[ShardLayout], transport: Transport) -> None:
        self.address, self.layouts = address, layouts
        self.indices = [layout.shard for layout in layouts]
        self._nbytes = sum(layout.nbytes for layout in layouts)
        self._calls = RpcCalls(address)
        self._use_lanes, self._share = transport != "grpc", transport == "auto"
        self._opening = threading.Lock()  # guards the next two; held while one is opened, for seconds at most
        self._pulls: LaneCalls | None = None
        self._pushes: LaneCalls | None = None
        self._closed = False

    def pull(self, request: pb.PullRequest, arrival: Arrival | None) -> list[header_pb2.ShardHeader]:
        """Pulls all shards of this link, when the consistency mode lets it.

        Args:
            request: names the shards of this link, in order.
            arrival: takes the values; None: only waits.
        """
        lane = self._for_pulls()
        if lane is None:
            delivery = Delivery(self.layouts, arrival)
            for message in self._calls.pull(request, self._nbytes):
                delivery.add(take_message(pb.PullReply, message, delivery.assembler)[0])
            return delivery.finish()
        return self._unless_closed(lambda: lane.pull(request, arrival))

    def prepare(self, load: Load, memory: Memory | None) -> Load:
        """Makes a load ready for `push`: into shared memory if there is any. It waits for what is still to come there.

        Args:
            load: for the shards of this link.
            memory: for a copy where there is none, so that the arrays may change at once; None: they will not.
        """
        if load.arrays is not None:
            lane = self._for_pushes()
            if lane and (taken := lane.take()):
                return load.copied(taken[1], slot=taken[0], owner=lane, arrays_stay=memory is None)
            if memory:
                return load.copied_to(memory)
        return load

    def lend(self, load: Load, memory: Memory) -> Load:
        """Memory for a load that is still to be written: shared, if there is any.

        Args:
            load: for the shards of this link, with nothing in it.
            memory: where none is shared.
        """
        lane = self._for_pushes()
        if lane and (taken := lane.take()):
            return replace(load, copy=taken[1], slot=taken[0], owner=lane)
        return replace(load, copy=memory(slot_offsets(load.layouts)[1]))

    def push(self, header: pb.PushHeader, load: Load) -> pb.PushReply:
        """Pushes to all shards of this link."""
        lane = self._for_pushes()
        if lane is None:
            load.wait()  # for a call has a deadline
            return self._calls.push(load.requests(header), self._nbytes)
        return self._unless_closed(lambda: lane.push(header, load))

    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        """The second phase of a push."""
        lane = self._for_pushes()
        if lane is None:
            return self._calls.commit(request)
        return self._unless_closed(lambda: lane.commit(request))

    def assign(self, header: pb.PushHeader, load: Load) -> None:
        """Overwrites values."""
        self._calls.assign(load.requests(header), self._nbytes)

    def close(self) -> None:
        """Ends all; calls in progress end with Cancelled."""
        self._closed = True
        for lane in (self._pulls, self._pushes):
            if lane:
                lane.close()
        self._calls.close()

    def _for_pulls(self) -> LaneCalls | None:
        with self._opening:
            self._pulls = self._lane(self._pulls, _VALUE_SLOTS)
            return self._pulls

    def _for_pushes(self) -> LaneCalls | None:
        with self._opening:
            self._pushes = self._lane(self._pushes, _GRADIENT_SLOTS)
            return self._pushes

    def _lane(self, lane: LaneCalls | None, slots: int) -> LaneCalls | None:
        """This lane, or a new one where it is broken or was not opened yet; None: this server has none for us."""
        if self._closed:
            raise self._cancelled()
        if lane and not lane.broken:
            return lane
        if lane:
            lane.close()
        if not self._use_lanes:
            return None
        offer = self._calls.attach()
        if not offer.address:
            self._use_lanes = False
            return None
        try:
            shares = self._share and offer.host == host_id() != ""
            opened = LaneCalls(offer.address, offer.token, self.layouts, slots if shares else 0)
        except errors.ShoalError as error:
            # The server answers by gRPC, so a firewall or its limit of lanes is in the way; that will stay so.
            self._use_lanes = False
            _log.warning("no lane to a server; its calls go by gRPC, slower", server=self.address, why=error.message)
            return None
        if self._closed:  # meanwhile: `close` has not seen this one
            opened.close()
            raise self._cancelled()
        return opened

    def _unless_closed(self, call: Callable[[], T]) -> T:
        if self._closed:  # while a lane was being opened, which `close` then has not seen
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


__all__ = ["Link", "Transport", "chosen_transport"]
