"""Chunk frames: the frames of a push on a lane after the first one."""

from collections.abc import Iterator

from shoal import errors
from shoal._transport import STALL_S, Connection, Frame, read_frame
from shoal._wire import Assembler
from shoal._wire.limits import transfer_s
from shoal.v1 import parameter_server_pb2 as pb


class ChunkFrames:
    """The remaining frames of a push: chunks, then an END."""

    def __init__(self, lane: Connection) -> None:
        self._lane = lane
        self._ended = False

    def take(self, assembler: Assembler) -> Iterator[tuple[pb.PushRequest, int]]:
        """Feeds each message's chunks to an assembler; yields the message without them, and their bytes."""
        self._lane.limit(transfer_s(assembler.nbytes))  # in all, because single bytes are progress
        while self._more():
            yield read_frame(pb.PushRequest, self._lane, assembler)

    def drain(self) -> None:
        """Reads the remaining frames, so that the lane is ready for the next call."""
        if self._lane.closed:
            return
        if not self._ended:
            self._lane.limit(transfer_s(0))
            while self._more():
                self._lane.payload()
        self._lane.limit(None)

    def _more(self) -> bool:
        kind = self._lane.begin(within_s=STALL_S)
        self._ended = kind is Frame.END
        if kind not in (Frame.PUSH, Frame.END):
            self._lane.close()
            raise errors.BadFrame(f"{self._lane.peer} sent {kind.name} in the middle of a push")
        if self._ended:
            self._lane.payload()
        return not self._ended


__all__ = ["ChunkFrames"]
