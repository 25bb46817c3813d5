"""Data formats that both ends of a connection share: layouts, chunks, messages, leases and cursors.

- `layout`: the place of a variable's elements in arenas.
- `slabs`: arenas that lie next to each other, at a server and in a region.
- `framing`, `packing`, `pull_decoder`, `push_stream`: slabs as chunks, and back.
- `chunks`: the bytes of messages.
- `text_fields`: checks of short texts and addresses.
- `limits`: the largest sizes and counts of a message or a report.
- `leases`, `cursor`: the data that a worker has, and counts of its pushes.
- `acknowledgements`: the coordinator's answers to reports and evaluations.

Nothing here opens a socket, calls a server or imports gRPC. Every package may import from here.
"""

from shoal._wire.acknowledgements import EvaluationAck, EvaluationClaim, ReportAck
from shoal._wire.chunks import Buffer, Carrier, Chunk, decode, decode_push, encode_push, encode_values, read_start
from shoal._wire.cursor import Cursor, PushCounts
from shoal._wire.framing import Assembler, SlabRange, chunks_of, messages
from shoal._wire.headers import ShardHeaders
from shoal._wire.layout import (
    Aggregation,
    ArenaLayout,
    ShardLayout,
    Slice,
    row_elements,
    rows_of,
    storage_dtype,
    wire_dtype,
)
from shoal._wire.leases import LATEST_ORDER, DataRange, Lease, NoRange
from shoal._wire.metric_values import NAMES, is_name, number
from shoal._wire.packing import ArraySource, CompleteArrays, Memory, Packer
from shoal._wire.placement import Placement, ShardPlacement, with_groups
from shoal._wire.pull_decoder import PullDecoder
from shoal._wire.push_stream import PushStream
from shoal._wire.slabs import ArenaKey, CallLayout, Slab, SlabArrays
from shoal._wire.text_fields import (
    check_address,
    check_text,
    shortened,
    with_ellipsis,
    without_controls,
    without_middle,
)
from shoal._wire.transfer import PullAssembly, PushPayload

__all__ = [
    "LATEST_ORDER",
    "NAMES",
    "Aggregation",
    "ArenaKey",
    "ArenaLayout",
    "ArraySource",
    "Assembler",
    "Buffer",
    "CallLayout",
    "Carrier",
    "Chunk",
    "CompleteArrays",
    "Cursor",
    "DataRange",
    "EvaluationAck",
    "EvaluationClaim",
    "Lease",
    "Memory",
    "NoRange",
    "Packer",
    "Placement",
    "PullAssembly",
    "PullDecoder",
    "PushCounts",
    "PushPayload",
    "PushStream",
    "ReportAck",
    "ShardHeaders",
    "ShardLayout",
    "ShardPlacement",
    "Slab",
    "SlabArrays",
    "SlabRange",
    "Slice",
    "check_address",
    "check_text",
    "chunks_of",
    "decode",
    "decode_push",
    "encode_push",
    "encode_values",
    "is_name",
    "messages",
    "number",
    "read_start",
    "row_elements",
    "rows_of",
    "shortened",
    "storage_dtype",
    "wire_dtype",
    "with_ellipsis",
    "with_groups",
    "without_controls",
    "without_middle",
]
