"""Transport through shared memory: a lane's calls, with their arrays in a segment that both ends have mapped."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import numpy as np

from shoal import errors
from shoal._system import host_id
from shoal._system.logs import Log
from shoal._transport.connection import Connection
from shoal._transport.frames import Frame
from shoal._transport.lane_transport import LaneFactory, LaneTransport
from shoal._transport.segment import Regions, Segment, SegmentLost, SegmentUnavailable
from shoal._transport.transport import Target, TransportUnavailable
from shoal._wire import PullDecoder, PushPayload, encode_push
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

T = TypeVar("T")
_log = Log(__name__)

# Minimum size of a call; for smaller ones, shared memory costs more than it saves.
SHARED_FROM_BYTES = 1 << 18
_PAGE = 4096


class SharedMemoryTransport(LaneTransport):
    """Transport over one lane and a segment. If no region is free, or the segment is lost, it sends bytes on the lane.

    Args:
        lane: an open lane; the transport owns it.
        target: the server.
        segment: segment that the server has mapped; the transport owns it.
        regions: regions of the segment, each large enough for all the target's shards.

    Attributes:
        segment: the segment.
    """

    def __init__(self, lane: Connection, target: Target, segment: Segment, regions: Regions) -> None:
        super().__init__(lane, target)
        self.segment = segment
        self._regions: Regions | None = regions
        self._address = target.offer.address

    def memory(self) -> tuple[int, np.ndarray] | None:
        regions = self._regions
        if regions and self._look():
            _not_shared(self._address, self.lost)
            self._regions = regions = None
        taken = regions.take() if regions else None
        return (taken[0] + 1, taken[1]) if taken else None

    def pull(self, request: pb.PullRequest, pull_decoder: PullDecoder | None) -> list[header_pb2.ShardHeader]:
        taken = self.memory() if pull_decoder else None
        if taken is None or pull_decoder is None:
            return super().pull(request, pull_decoder)
        request.region, region = taken
        return self._with_region(lambda: self._pull_into(request, pull_decoder, region))

    def push(self, header: pb.PushHeader, payload: PushPayload) -> pb.PushReply:
        if not payload.region or payload.owner is not self:
            return super().push(header, payload)
        header.region = payload.region
        return self._with_region(lambda: self._push_from_region(header))

    def close(self) -> None:
        """Closes the lane. Shared memory stays until no array uses it."""
        super().close()
        self._regions = None
        self.segment.close()

    def _pull_into(
        self, request: pb.PullRequest, pull_decoder: PullDecoder, region: np.ndarray
    ) -> list[header_pb2.ShardHeader]:
        self._ask(request)
        slabs = self._layout.arrays(region)
        try:
            for slab, elements in slabs.items():
                pull_decoder.expect(slab, elements)  # while the server writes them
            headers = self._receive_values(None)
            self._check_regions()
        except BaseException:
            pull_decoder.forget()
            raise
        for slab, elements in slabs.items():
            pull_decoder.adopt(slab, elements)
        return headers

    def _push_from_region(self, header: pb.PushHeader) -> pb.PushReply:
        self._check_regions()
        self._lane.send(Frame.PUSH, encode_push(header, []), end=True)
        return self._pushed()

    def _with_region(self, call: Callable[[], T]) -> T:
        """Makes a call that uses a region.

        If the segment is lost, closes the lane and raises Unreachable, so that the call can be repeated on another
        lane.
        """
        try:
            return self._whole(call)
        except BaseException:
            if self._look():
                self._lane.close()
                raise self._loss() from None
            raise

    def _look(self) -> str:
        """Returns why the shared memory is lost; empty if it is not. Called before each access."""
        try:
            if not self.lost:
                self.segment.check()
        except SegmentLost as error:
            self.lost = str(error)
        except SegmentUnavailable:
            pass  # closed: memory in use stays valid
        return self.lost

    def _check_regions(self) -> None:
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

    def open(self, target: Target, payloads: int) -> LaneTransport:
        if not target.offer.address or not target.offer.host or target.offer.host != host_id():
            raise TransportUnavailable("the server is not on this host")
        nbytes = target.layout.region_bytes
        if nbytes < SHARED_FROM_BYTES:
            raise TransportUnavailable(f"{nbytes} bytes of arenas are too few for a segment")
        size = -(-nbytes // _PAGE) * _PAGE
        # Before the lane, because allocation can take longer than a server waits for the hello.
        try:
            segment = Segment.create(payloads * size)
        except SegmentUnavailable as error:
            _not_shared(target.offer.address, str(error))
            raise TransportUnavailable(str(error), passing=True) from None
        hello = pb.LaneHello()
        hello.segment.name, hello.segment.nonce = segment.name, segment.nonce
        hello.segment.regions, hello.segment.region_bytes = payloads, size
        with ExitStack() as undo:
            undo.callback(segment.close)
            lane, welcome = self.connect(target, hello)
            if not welcome.shared:
                _not_shared(target.offer.address, welcome.reason)
                transport = LaneTransport(lane, target)
                transport.lost = welcome.reason
                return transport
            undo.callback(lane.close)
            segment.unlink()  # both have mapped it: it disappears with the last of the two, even after a crash
            regions = Regions([segment.view(region * size, size) for region in range(payloads)])
            undo.pop_all()
        return SharedMemoryTransport(lane, target, segment, regions)


def _not_shared(address: str, reason: str) -> None:
    _log.warning("no shared memory with a server on this host; its bytes go over TCP", lane=address, why=reason)


__all__ = ["SharedMemoryFactory", "SharedMemoryTransport"]
