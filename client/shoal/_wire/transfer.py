"""One call's load, whatever carries it: what a push brings, and what a pull's answers are put into."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal import errors
from shoal._wire.chunks import Buffer, Chunk, encode_push
from shoal._wire.framing import Assembler, arenas_of, chunks_of, messages, region_arrays, region_offsets
from shoal._wire.layout import Aggregation, ShardLayout
from shoal._wire.packing import ArraySource, Memory, Packer
from shoal._wire.pull_decoder import PullDecoder
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb


class RegionOwner(Protocol):
    """Who lends regions of shared memory."""

    lost: str
    """Why what lies in them is not there any more; empty: it is."""


@dataclass(frozen=True, slots=True)
class PushPayload:
    """What a push brings to one server: arrays as they are, or a copy of them that lies as in a region.

    Attributes:
        packer: of the placement.
        layouts: of the call's shards.
        aggregations: the arenas that are brought.
        arrays: by variable; they must not change before the push is answered. None where nothing is brought, or only
            the copy stays as it is.
        copy: unsigned bytes, laid out by `region_offsets`.
        region: of shared memory, from 1, in which the copy is; 0: it is private.
        owner: whose region that is; None: the copy is private.
    """

    packer: Packer
    layouts: Sequence[ShardLayout]
    aggregations: Collection[Aggregation]
    arrays: ArraySource | None = None
    copy: np.ndarray | None = None
    region: int = 0
    owner: RegionOwner | None = None

    def copied(
        self, copy: np.ndarray, region: int = 0, owner: RegionOwner | None = None, *, arrays_stay: bool = False
    ) -> "PushPayload":
        """The same load, written into memory of its own: the arrays may change from now on.

        Args:
            copy, region, owner: as above.
            arrays_stay: they will not; so what is in the region can be sent even if its lane is lost.
        """
        assert self.arrays is not None, "there is nothing to copy"
        self.packer.write(self.layouts, self.arrays, self.aggregations, copy)
        arrays = self.arrays if arrays_stay else None
        return PushPayload(self.packer, self.layouts, self.aggregations, arrays, copy, region, owner)

    def copied_to(self, memory: Memory) -> "PushPayload":
        """The same load in private memory."""
        return self.copied(memory(region_offsets(self.layouts)[1]))

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""
        return self.arrays is None or self.arrays.complete

    def wait(self) -> None:
        """Until all of it is there."""
        if self.arrays is not None:
            self.arrays.wait()

    def chunks(self) -> Iterator[Chunk]:
        """All of it, as it gets ready.

        Raises:
            InternalError: the copy is lost, and there are no arrays.
            Cancelled: some of it never gets ready.
        """
        if self.arrays is not None:
            yield from self.packer.chunks(self.layouts, self.arrays, self.aggregations)
            return
        if self.copy is None:
            return
        if self.owner and self.owner.lost:
            raise errors.InternalError(f"a push is lost with the shared memory that it lay in: {self.owner.lost}")
        for key, elements in region_arrays(self.copy, self.layouts, self.aggregations).items():
            yield from chunks_of(key, elements)

    def requests(self, header: pb.PushHeader) -> Iterator[list[Buffer]]:
        """The messages of a push, each in pieces; the first has the header."""
        first: pb.PushHeader | None = header
        for group in messages(self.chunks()):
            yield encode_push(first, group)
            first = None
        if first is not None:
            yield encode_push(first, [])


class PullAssembly:
    """The replies to one pull, as they come.

    Args:
        layouts: of the shards that were asked for.
        pull_decoder: takes the values; None: only headers were asked for.

    Attributes:
        assembler: takes their chunks.
    """

    def __init__(self, layouts: Sequence[ShardLayout], pull_decoder: PullDecoder | None) -> None:
        self._layouts = layouts
        self._headers: list[header_pb2.ShardHeader] = []
        arenas = arenas_of(layouts) if pull_decoder else {}
        runs = {key: pull_decoder.runs(key, arena) for key, arena in arenas.items()} if pull_decoder else {}
        self.assembler = Assembler(arenas, runs)

    def add(self, reply: pb.PullReply) -> None:
        """Takes the headers of a reply whose chunks the assembler has."""
        self._headers += reply.headers

    def finish(self) -> list[header_pb2.ShardHeader]:
        """The headers of all shards.

        Raises:
            BadChunk: something is missing, of the values or of the headers.
        """
        self.assembler.finish()
        wanted = {layout.shard for layout in self._layouts}
        if {header.shard for header in self._headers} != wanted:
            raise errors.BadChunk(f"a pull of shards {sorted(wanted)} was answered without all of them")
        return self._headers
