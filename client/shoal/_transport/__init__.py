"""Transports to a server, and the connections that they use.

`Connection`, `Listener` and `Security` carry frames between any two processes. They do not know shards. `Transport` and
`TransportFactory` are the client's half of a transport. `register` adds a transport, and `ServerConnection` makes calls
over the best one that works. Shoal's own transports are shared memory, lanes and gRPC.

`shoal._training` defines what calls mean and which servers they go to. `shoal_server.serving` has the server's half of
each transport. These two packages, and packages that add a transport, may import from here.
"""

from shoal._transport.chunk_reader import read_frame, read_message
from shoal._transport.connection import ByteStream, Connection, Frames
from shoal._transport.frames import PARAMETER_SERVER, Frame
from shoal._transport.grpc_calls import GrpcCalls
from shoal._transport.handshake import (
    Security,
    TicketSecurity,
    TokenSecurity,
    accept_handshake,
    decoded,
    open_handshake,
    received_error,
    send_error,
)
from shoal._transport.lane import Lane
from shoal._transport.lane_socket import STALL_S
from shoal._transport.lane_transport import LaneFactory, LaneTransport
from shoal._transport.listener import ConnectionHandler, Listener, ListenerLimits
from shoal._transport.registry import chosen_setting, register, registered, unregister
from shoal._transport.segment import SHM, Regions, Segment, SegmentLost, SegmentUnavailable, remove_stale
from shoal._transport.selector import Selector
from shoal._transport.server_connection import ServerConnection
from shoal._transport.tls_stream import TlsSecurity, TlsStream, secured
from shoal._transport.transport import Target, Transport, TransportFactory, TransportUnavailable

__all__ = [
    "PARAMETER_SERVER",
    "SHM",
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
    "ListenerLimits",
    "Regions",
    "Security",
    "Segment",
    "SegmentLost",
    "SegmentUnavailable",
    "Selector",
    "ServerConnection",
    "Target",
    "TicketSecurity",
    "TlsSecurity",
    "TlsStream",
    "TokenSecurity",
    "Transport",
    "TransportFactory",
    "TransportUnavailable",
    "accept_handshake",
    "chosen_setting",
    "decoded",
    "open_handshake",
    "read_frame",
    "read_message",
    "received_error",
    "register",
    "registered",
    "remove_stale",
    "secured",
    "send_error",
    "unregister",
]
