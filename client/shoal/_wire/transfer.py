"""Payload of one call on any transport: the arrays of a push, or the assembly of the replies to a pull."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal import errors
from shoal._wire.chunks import Buffer, Chunk, encode_push
from shoal._wire.framing import Assembler, chunks_of, messages
from shoal._wire.layout import Aggregation
from shoal._wire.limits import PERMIT_FREE_BYTES
from shoal._wire.packing import ArraySource, Memory, Packer
from shoal._wire.pull_decoder import PullDecoder
from shoal._wire.slabs import CallLayout
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb


class RegionOwner(Protocol):
    """Owner of regions of shared memory."""

    lost: str
    """Why the content of the regions is lost; empty if it is not."""


@dataclass(frozen=True, slots=True)
class PushPayload:
    """The arrays that one push carries to one server: as they are, or as a copy with the layout of a region.

    Attributes:
        packer: packer of the placement.
        layout: layout of the call.
        aggregations: aggregations of the slabs that the push carries.
        arrays: the arrays, by variable; they must not change before the push is answered. None if the push carries no
            arrays, or if the originals may change and only the copy is used.
        copy: unsigned bytes, laid out as a region.
        region: number, from 1, of the region in shared memory that holds the copy; 0 means that the copy is private.
        owner: owner of that region; None means that the copy is private.
    """

    packer: Packer
    layout: CallLayout
    aggregations: Collection[Aggregation]
    arrays: ArraySource | None = None
    copy: np.ndarray | None = None
    region: int = 0
    owner: RegionOwner | None = None

    def copied(
        self, copy: np.ndarray, region: int = 0, owner: RegionOwner | None = None, *, arrays_stay: bool = False
    ) -> "PushPayload":
        """Writes the arrays into memory, so that the originals may change.

        Args:
            copy: memory for the copy, unsigned bytes.
            region: number of the region that `copy` is, or 0.
            owner: owner of that region.
            arrays_stay: the originals will not change, so they can be sent if the region is lost.

        Returns:
            The same payload with the copy.
        """
        assert self.arrays is not None, "there is nothing to copy"
        self.packer.write(self.layout, self.arrays, self.aggregations, copy)
        arrays = self.arrays if arrays_stay else None
        return PushPayload(self.packer, self.layout, self.aggregations, arrays, copy, region, owner)

    def copied_to(self, memory: Memory) -> "PushPayload":
        """Returns the same payload with a copy in private memory."""
        return self.copied(memory(self.layout.region_bytes))

    @property
    def has_copy(self) -> bool:
        """Whether there is a copy whose memory is not lost."""
        return self.copy is not None and not (self.owner and self.owner.lost)

    def filled_from(self, others: Iterable["PushPayload"]) -> "PushPayload":
        """Fills the copy of this payload with arenas from copies that have another grouping of the same shards.

        Args:
            others: payloads of the same push, which have all arenas of this one.

        Returns:
            This payload.
        """
        assert self.copy is not None, "there is no memory to fill"
        arenas = {
            key: elements
            for other in others
            if other.copy is not None
            for slab, flat in other.layout.arrays(other.copy, other.aggregations).items()
            for key, elements in slab.split(flat)
        }
        for slab, flat in self.layout.arrays(self.copy, self.aggregations).items():
            for key, elements in slab.split(flat):
                elements[...] = arenas[key]
        return self

    @property
    def complete(self) -> bool:
        """Whether all arrays are available."""
        return self.arrays is None or self.arrays.complete

    def wait(self) -> None:
        """Waits until all arrays are available."""
        if self.arrays is not None:
            self.arrays.wait()

    def chunks(self) -> Iterator[Chunk]:
        """Yields the payload as chunks, as its arrays become available.

        Raises:
            InternalError: the copy is lost, and there are no arrays.
            Cancelled: some arrays never became available.
        """
        if self.arrays is not None:
            yield from self.packer.chunks(self.layout, self.arrays, self.aggregations)
            return
        if self.copy is None:
            return
        if self.owner and self.owner.lost:
            raise errors.InternalError(f"a push was lost with its shared memory: {self.owner.lost}")
        for slab, elements in self.layout.arrays(self.copy, self.aggregations).items():
            yield from chunks_of(slab, elements)

    def requests(self, header: pb.PushHeader) -> Iterator[list[Buffer]]:
        """Yields the messages of a push, each in pieces; the first carries the header.

        The header of a large push comes alone, so that the server has it before it makes room for the gradient.
        """
        first: pb.PushHeader | None = header
        alone = self.layout.nbytes > PERMIT_FREE_BYTES
        for group in messages(self.chunks()):
            if first is not None and alone:
                yield encode_push(first, [])
                first = None
            yield encode_push(first, group)
            first = None
        if first is not None:
            yield encode_push(first, [])


class PullAssembly:
    """Assembles the replies to one pull.

    Args:
        layout: layout of the call.
        pull_decoder: receives the values; None means that only headers were requested.
        aggregations: aggregations of the slabs that the replies have.

    Attributes:
        assembler: receives the chunks of the replies.
    """

    def __init__(
        self,
        layout: CallLayout,
        pull_decoder: PullDecoder | None,
        aggregations: Collection[Aggregation] = tuple(Aggregation),
    ) -> None:
        self._layout = layout
        self._headers: list[header_pb2.ShardHeader] = []
        slabs = layout.carrying(aggregations)
        runs = {slab: pull_decoder.runs(slab) for slab in slabs} if pull_decoder else {}
        self.assembler = Assembler(layout, runs)

    def add(self, reply: pb.PullReply) -> None:
        """Adds the headers of a reply whose chunks the assembler has."""
        self._headers += reply.headers

    def finish(self) -> list[header_pb2.ShardHeader]:
        """Returns the headers of all shards.

        Raises:
            BadChunk: values or headers are missing.
        """
        self.assembler.finish()
        wanted = {layout.shard for layout in self._layout.shards}
        if {header.shard for header in self._headers} != wanted:
            raise errors.BadChunk(
                f"the answer to a pull of shards {sorted(wanted)} lacks headers of some of them; repeat the pull"
            )
        return self._headers
