"""What travels between processes: layouts, chunks and the messages around them, and the words of workers' data.

Here is what both ends have to agree on: where a variable's elements lie in arenas (`layout`), how arenas are cut and
put together again (`framing`, `packing`, `arrival`, `outgoing`), the bytes of messages (`chunks`), and limits
(`limits`). Also the values that workers and the coordinator exchange: which data a worker has (`leases`, `cursor`), and
what the coordinator answers to reports and evaluations (`answers`). Nothing here opens a socket, calls a server or
imports gRPC. Every package may import from here.
"""

from shoal._wire.answers import Heard, Turn, Verdict
from shoal._wire.arrival import Arrival
from shoal._wire.chunks import Buffer, Carrier, Chunk, decode, decode_push, encode_push, encode_values, read_start
from shoal._wire.cursor import Cursor
from shoal._wire.figures import NAMES, is_name, number
from shoal._wire.framing import (
    ArenaKey,
    Assembler,
    Run,
    arenas_of,
    messages,
    slot_arrays,
    slot_offsets,
)
from shoal._wire.layout import (
    Aggregation,
    ArenaLayout,
    Placement,
    ShardLayout,
    ShardPlacement,
    Slice,
    row_elements,
    storage_dtype,
    wire_dtype,
)
from shoal._wire.leases import DataRange, Lease, NoRange
from shoal._wire.outgoing import Outgoing
from shoal._wire.packing import Arrays, Complete, Memory, Packer
from shoal._wire.transfer import Delivery, Load

__all__ = [
    "NAMES",
    "Aggregation",
    "ArenaKey",
    "ArenaLayout",
    "Arrays",
    "Arrival",
    "Assembler",
    "Buffer",
    "Carrier",
    "Chunk",
    "Complete",
    "Cursor",
    "DataRange",
    "Delivery",
    "Heard",
    "Lease",
    "Load",
    "Memory",
    "NoRange",
    "Outgoing",
    "Packer",
    "Placement",
    "Run",
    "ShardLayout",
    "ShardPlacement",
    "Slice",
    "Turn",
    "Verdict",
    "arenas_of",
    "decode",
    "decode_push",
    "encode_push",
    "encode_values",
    "is_name",
    "messages",
    "number",
    "read_start",
    "row_elements",
    "slot_arrays",
    "slot_offsets",
    "storage_dtype",
    "wire_dtype",
]
