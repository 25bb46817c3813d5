"""How bytes travel to a server: connections that carry frames, and the transports above them.

`Connection`, `Listener` and `Security` carry frames between any two processes and know no shards. `Transport` and
`TransportFactory` are a client's half of a transport; `register` adds one, and `ServerConnection` makes calls over the
best that works. Shoal's own are shared memory, lanes and gRPC. What calls mean, and which servers they go to, is in
`shoal._training`; a server's half of each transport is in `shoal_server.serving`. These two packages, and whoever
writes a transport, may import from here.
"""

from shoal._transport.chunk_reader import read_frame, read_message
from shoal._transport.connection import ByteStream, Connection, Frames
from shoal._transport.frames import PARAMETER_SERVER, Frame
from shoal._transport.grpc_calls import GrpcCalls
from shoal._transport.handshake import (
    Security,
    TokenSecurity,
    accept_handshake,
    decoded,
    open_handshake,
    received_error,
    send_error,
)
from shoal._transport.lane import STALL_S, Lane
from shoal._transport.lane_transport import LaneFactory, LaneTransport
from shoal._transport.listener import ConnectionHandler, Listener
from shoal._transport.registry import chosen_setting, register, registered, unregister
from shoal._transport.segment import Regions, Segment, SegmentLost, SegmentUnavailable, remove_stale
from shoal._transport.selector import Selector
from shoal._transport.server_connection import ServerConnection
from shoal._transport.transport import Target, Transport, TransportFactory, TransportUnavailable

__all__ = [
    "PARAMETER_SERVER",
    "STALL_S",
    "ByteStream",
    "Connection",
    "ConnectionHandler",
    "Frame",
    "Frames",
    "GrpcCalls",
    "Lane",
    "LaneFactory",
    "LaneTransport",
    "Listener",
    "Regions",
    "Security",
    "Segment",
    "SegmentLost",
    "SegmentUnavailable",
    "Selector",
    "ServerConnection",
    "Target",
    "TokenSecurity",
    "Transport",
    "TransportFactory",
    "TransportUnavailable",
    "accept_handshake",
    "chosen_setting",
    "decoded",
    "open_handshake",
    "received_error",
    "register",
    "registered",
    "send_error",
    "remove_stale",
    "read_frame",
    "read_message",
    "unregister",
]
