"""The parameter server's data calls over a lane, through shared memory where both ends have it."""

import enum
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import numpy as np
import structlog
from google.protobuf.message import Message

from shoal import _rpc, errors
from shoal._transport.frames import PARAMETER_SERVER, Frame
from shoal._transport.handshake import TokenSecurity, decoded, greet, sent_error
from shoal._transport.inflow import take_frame
from shoal._transport.lane import Lane
from shoal._transport.segment import Segment, SegmentLost, SegmentUnavailable, Slots
from shoal._wire.arrival import Arrival
from shoal._wire.chunks import encode_push
from shoal._wire.framing import slot_arrays, slot_offsets
from shoal._wire.layout import ShardLayout
from shoal._wire.transfer import Delivery, Load
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

T = TypeVar("T")
M = TypeVar("M", bound=Message)
_log = structlog.get_logger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_WELCOME_TIMEOUT_S = 5.0
# An update of the largest shards is done by then.
_ANSWER_TIMEOUT_S = 120.0
# Below this, shared memory saves less than its bookkeeping costs.
_SHARED_FROM_BYTES = 1 << 18
_PAGE = 4096


class LaneCalls:
    """Calls to one server, one at a time.

    Args:
        address: where the server takes lanes.
        token: of the server.
        layouts: of the shards that the calls are about.
        slots: of shared memory, each large enough for all these shards; 0: share none.

    Raises:
        ShoalError: the server does not take the lane.

    Attributes:
        lost: why what lies in the slots is not there any more; empty: it is.
    """

    def __init__(self, address: str, token: bytes, layouts: Sequence[ShardLayout], slots: int) -> None:
        self._address, self._layouts = address, layouts
        self._segment: Segment | None = None
        self._slots: Slots | None = None
        _, nbytes = slot_offsets(layouts)
        self._slot_bytes = -(-nbytes // _PAGE) * _PAGE
        self._refusal: errors.ShoalError | None = None
        self.lost = ""
        hello = pb.LaneHello()
        # Before the lane: a server waits only so long for what is said first on it, and much memory takes a while.
        if slots and nbytes >= _SHARED_FROM_BYTES:
            self._offer(hello, slots)
        with ExitStack() as undo:
            if self._segment:
                undo.callback(self._segment.close)
            where = _rpc.parse_address(address)
            self._lane = Lane.connect(*where, PARAMETER_SERVER, timeout_s=_CONNECT_TIMEOUT_S)
            undo.callback(self._lane.close)
            self._greet(hello, token)
            undo.pop_all()

    @property
    def broken(self) -> bool:
        """Whether it takes no more calls."""
        return self._lane.closed

    def take(self) -> tuple[int, np.ndarray] | None:
        """A free slot: its number, from 1, and its bytes. It is free again when nobody looks at them any more."""
        slots = self._slots
        if slots and self._look():
            self._not_shared(self.lost)
            self._slots = slots = None
        taken = slots.take() if slots else None
        return (taken[0] + 1, taken[1]) if taken else None

    def pull(self, request: pb.PullRequest, arrival: Arrival | None) -> list[header_pb2.ShardHeader]:
        """Pulls all shards; see `Link.pull`."""
        taken = self.take() if arrival else None
        request.slot = taken[0] if taken else 0
        return self._whole(lambda: self._pull(request, arrival, taken[1] if taken else None), request.slot)

    def push(self, header: pb.PushHeader, load: Load) -> pb.PushReply:
        """Pushes to all shards; see `Link.push`."""
        header.slot = load.slot if load.owner is self else 0
        return self._whole(lambda: self._push(header, load), header.slot)

    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        """The second phase of a push."""

        def call() -> pb.PushReply:
            self._lane.send(Frame.COMMIT, [request.SerializeToString()])
            return self._pushed()

        return self._whole(call)

    def close(self) -> None:
        """Ends the lane. Shared memory stays until nobody looks at it."""
        self._lane.close()
        self._slots = None
        if self._segment:
            self._segment.close()

    # The beginning.

    def _offer(self, hello: pb.LaneHello, slots: int) -> None:
        try:
            segment = Segment.create(slots * self._slot_bytes)
        except SegmentUnavailable as error:
            self._not_shared(str(error))
            return
        self._segment = segment
        hello.segment.name, hello.segment.nonce = segment.name, segment.nonce
        hello.segment.slots, hello.segment.slot_bytes = slots, self._slot_bytes

    def _greet(self, hello: pb.LaneHello, token: bytes) -> None:
        welcome = greet(self._lane, TokenSecurity(token), hello, within_s=_WELCOME_TIMEOUT_S)
        if self._segment is None:
            return
        if welcome.shared:
            self._segment.unlink()  # both have it open: it is gone with the last of the two, however they end
            size = self._slot_bytes
            self._slots = Slots([self._segment.view(slot * size, size) for slot in range(hello.segment.slots)])
        else:
            self._not_shared(welcome.reason)
            self._segment.close()
            self._segment = None

    def _not_shared(self, reason: str) -> None:
        _log.warning("a server of this host shares no memory; its bytes go over TCP", lane=self._address, why=reason)

    # Calls.

    def _whole(self, call: Callable[[], T], slot: int = 0) -> T:
        """Makes one call. If it does not come to its end, nobody knows what is on its way: the lane is given up.

        So it is if the call was refused for a slot that is lost; then the call may be made again on another lane.
        """
        try:
            return call()
        except BaseException as error:
            # Not kept any longer: by its traceback it keeps what the call was about, and memory with it.
            refused, self._refusal = error is self._refusal, None
            if slot and self._look():
                self._lane.close()
                raise self._loss() from None
            if not refused:
                self._lane.close()
            raise

    def _pull(
        self, request: pb.PullRequest, arrival: Arrival | None, slot: np.ndarray | None
    ) -> list[header_pb2.ShardHeader]:
        self._lane.send(Frame.PULL, [request.SerializeToString()])
        if slot is None or arrival is None:
            return self._receive_values(arrival)
        arenas = slot_arrays(slot, self._layouts)
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

    def _push(self, header: pb.PushHeader, load: Load) -> pb.PushReply:
        if not header.slot:
            self._lane.stream(Frame.PUSH, load.requests(header), at_once=not load.complete)
        else:
            self._check_slots()
            self._lane.send(Frame.PUSH, encode_push(header, []), end=True)
        return self._pushed()

    def _pushed(self) -> pb.PushReply:
        return self._answer(Frame.PUSHED, pb.PushReply, within_s=_ANSWER_TIMEOUT_S)

    def _receive_values(self, arrival: Arrival | None) -> list[header_pb2.ShardHeader]:
        delivery = Delivery(self._layouts, arrival)
        while (kind := self._begin(None)) is not Frame.END:
            self._check(Frame.VALUES, kind)
            delivery.add(take_frame(pb.PullReply, self._lane, delivery.assembler)[0])
        self._lane.payload()
        return delivery.finish()

    def _answer(self, wanted: Frame, kind: type[M], *, within_s: float) -> M:
        self._check(wanted, self._begin(within_s))
        return decoded(kind, self._lane)

    def _begin(self, within_s: float | None) -> enum.IntEnum:
        kind = self._lane.begin(within_s=within_s)
        if kind is Frame.ERROR:
            self._refusal = sent_error(self._lane)
            raise self._refusal
        return kind

    def _check(self, wanted: Frame, kind: enum.IntEnum) -> None:
        if kind is not wanted:
            raise errors.BadFrame(f"{self._lane.peer} answered with {kind.name} where {wanted.name} belongs")

    # Shared memory.

    def _look(self) -> str:
        """Why the shared memory is lost; empty if it is not. It is looked at before it is touched."""
        segment = self._segment
        try:
            if segment and not self.lost:
                segment.check()
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
