"""Shared gradients: regions of memory by which gradients reach a backup on the same host."""

import threading

import numpy as np

from shoal._transport import Regions, Segment, SegmentUnavailable
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.optimizers import conversions
from shoal_server.replication.pieces import RegionLayout
from shoal_server.shards import Payload

# Gradients below this size go over the lane.
SHARED_FROM_BYTES = 1 << 18
# One that the backup copies, and one that is being written.
_REGIONS = 2


class SharedGradients:
    """Regions of a segment, each with one gradient until the backup has copied it. Any thread may use it.

    Args:
        layout: the places of slabs in a region.

    Raises:
        SegmentUnavailable: there is no memory to share.
    """

    def __init__(self, layout: RegionLayout) -> None:
        self._layout = layout
        self._segment = Segment.create(_REGIONS * layout.nbytes)
        views = [self._segment.view(index * layout.nbytes, layout.nbytes) for index in range(_REGIONS)]
        self._regions = Regions(views)
        self._lock = threading.Lock()  # guards _unnamed and _named; no lock is taken under it
        # The memory of a region is free again when no array refers to it.
        self._unnamed: dict[int, np.ndarray] = {}  # by gradient that no input has named yet
        self._named: dict[int, np.ndarray] = {}  # by input

    def offer(self) -> pb.Segment:
        """Returns what the backup's server needs to map the memory."""
        segment = self._segment
        return pb.Segment(name=segment.name, nonce=segment.nonce, regions=_REGIONS, region_bytes=self._layout.nbytes)

    def shared(self) -> None:
        """Removes the segment's name, because both ends have mapped it."""
        self._segment.unlink()

    def put(self, gradient: int, payload: Payload) -> int:
        """Copies a gradient into a region.

        Args:
            gradient: its number.
            payload: its arrays by slab.

        Returns:
            The number of the region, from 1; 0 if none is free, or if the memory is lost.
        """
        try:
            self._segment.check()
        except SegmentUnavailable:
            return 0
        taken = self._regions.take()
        if taken is None:
            return 0
        index, region = taken
        conversions.send_all([(self._layout.array(region, slab), array) for slab, array in payload.items()])
        with self._lock:
            self._unnamed[gradient] = region
        return index + 1

    def name(self, gradient: int, number: int) -> None:
        """Records that an input names a gradient, or comes after it was dropped."""
        with self._lock:
            if (region := self._unnamed.pop(gradient, None)) is not None:
                self._named[number] = region

    def copied(self, number: int) -> None:
        """Frees the regions of the gradients that inputs up to this one have named."""
        with self._lock:
            for named in [named for named in self._named if named <= number]:
                del self._named[named]

    def close(self) -> None:
        """Frees the memory, once no array uses it."""
        with self._lock:
            self._unnamed, self._named = {}, {}
        self._segment.close()


__all__ = ["SHARED_FROM_BYTES", "SharedGradients"]
