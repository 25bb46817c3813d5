"""The transport through shared memory: a lane's calls, whose bytes lie in a segment that both ends have mapped."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import numpy as np
import structlog

from shoal import errors
from shoal._system import host_id
from shoal._transport.connection import Connection
from shoal._transport.frames import Frame
from shoal._transport.lane_transport import LaneFactory, LaneTransport
from shoal._transport.segment import Regions, Segment, SegmentLost, SegmentUnavailable
from shoal._transport.transport import Target, TransportUnavailable
from shoal._wire import PullDecoder, PushPayload, encode_push, region_arrays, region_offsets
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

T = TypeVar("T")
_log = structlog.get_logger(__name__)

# Below this, shared memory saves less than its bookkeeping costs.
_SHARED_FROM_BYTES = 1 << 18
_PAGE = 4096


class SharedMemoryTransport(LaneTransport):
    """Calls on one lane with a segment. Where no slot is free, or the segment is lost, bytes go over the lane.

    Args:
        lane: open; owned from now on.
        target: the server.
        segment: shared with it; owned from now on.
        slots: of the segment, each large enough for all the target's shards.
    """

    def __init__(self, lane: Connection, target: Target, segment: Segment, slots: Regions) -> None:
        super().__init__(lane, target)
        self._segment = segment
        self._slots: Regions | None = slots
        self._address = target.offer.address

    def memory(self) -> tuple[int, np.ndarray] | None:
        slots = self._slots
        if slots and self._look():
            _not_shared(self._address, self.lost)
            self._slots = slots = None
        taken = slots.take() if slots else None
        return (taken[0] + 1, taken[1]) if taken else None

    def pull(self, request: pb.PullRequest, arrival: PullDecoder | None) -> list[header_pb2.ShardHeader]:
        taken = self.memory() if arrival else None
        if taken is None or arrival is None:
            return super().pull(request, arrival)
        request.slot, slot = taken
        return self._with_slot(lambda: self._pull_into(request, arrival, slot))

    def push(self, header: pb.PushHeader, load: PushPayload) -> pb.PushReply:
        if not load.slot or load.owner is not self:
            return super().push(header, load)
        header.slot = load.slot
        return self._with_slot(lambda: self._push_from_slot(header))

    def close(self) -> None:
        """Ends the lane. Shared memory stays until nobody looks at it."""
        super().close()
        self._slots = None
        self._segment.close()

    def _pull_into(
        self, request: pb.PullRequest, arrival: PullDecoder, slot: np.ndarray
    ) -> list[header_pb2.ShardHeader]:
        self._ask(request)
        arenas = region_arrays(slot, self._layouts)
        try:
            for key, elements in arenas.items():
                arrival.expect(key, elements)  # while the server writes them
            headers = self._receive_values(None)
            self._check_slots()
        except BaseException:
            arrival.forget()
            raise
        for key, elements in arenas.items():
            arrival.adopt(key, elements)
        return headers

    def _push_from_slot(self, header: pb.PushHeader) -> pb.PushReply:
        self._check_slots()
        self._lane.send(Frame.PUSH, encode_push(header, []), end=True)
        return self._pushed()

    def _with_slot(self, call: Callable[[], T]) -> T:
        """Makes a call that uses a slot.

        If the call was refused because the slot is lost, the lane is given up: the call may be made again on another.
        """
        try:
            return self._whole(call)
        except BaseException:
            if self._look():
                self._lane.close()
                raise self._loss() from None
            raise

    def _look(self) -> str:
        """Why the shared memory is lost; empty if it is not. It is looked at before it is touched."""
        try:
            if not self.lost:
                self._segment.check()
        except SegmentLost as error:
            self.lost = str(error)
        except SegmentUnavailable:
            pass  # closed: what is in use is still there
        return self.lost

    def _check_slots(self) -> None:
        """Raises Unreachable if the shared memory is lost."""
        if self._look():
            raise self._loss()

    def _loss(self) -> errors.Unreachable:
        return errors.Unreachable(f"the memory shared with {self._lane.peer} is lost: {self.lost}")


class SharedMemoryFactory(LaneFactory):
    """Opens lanes with a segment, to servers of this host."""

    name = "shared_memory"
    title = "shared memory"
    settings = frozenset({"auto"})
    rank = 10

    def open(self, target: Target, loads: int) -> LaneTransport:
        if not target.offer.address or not target.offer.host or target.offer.host != host_id():
            raise TransportUnavailable("the server is not on this host")
        _, nbytes = region_offsets(target.layouts)
        if nbytes < _SHARED_FROM_BYTES:
            raise TransportUnavailable(f"{nbytes} bytes are too few")
        size = -(-nbytes // _PAGE) * _PAGE
        # Before the lane: a server waits only so long for what is said first on it, and much memory takes a while.
        try:
            segment = Segment.create(loads * size)
        except SegmentUnavailable as error:
            _not_shared(target.offer.address, str(error))
            raise TransportUnavailable(str(error)) from None
        hello = pb.LaneHello()
        hello.segment.name, hello.segment.nonce = segment.name, segment.nonce
        hello.segment.slots, hello.segment.region_bytes = loads, size
        with ExitStack() as undo:
            undo.callback(segment.close)
            lane, welcome = self.connect(target, hello)
            if not welcome.shared:
                _not_shared(target.offer.address, welcome.reason)
                return LaneTransport(lane, target)
            undo.callback(lane.close)
            segment.unlink()  # both have it open: it is gone with the last of the two, however they end
            slots = Regions([segment.view(slot * size, size) for slot in range(loads)])
            undo.pop_all()
        return SharedMemoryTransport(lane, target, segment, slots)


def _not_shared(address: str, reason: str) -> None:
    _log.warning("a server of this host shares no memory; its bytes go over TCP", lane=address, why=reason)


__all__ = ["SharedMemoryFactory", "SharedMemoryTransport"]
