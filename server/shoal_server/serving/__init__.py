"""Data plane of the server: the parameter server's RPCs, and the server half of every transport.

`DataService` carries out pulls, pushes, commits and assignments of values on the shards. An `Endpoint` receives these
calls from clients over one transport. `register` adds an endpoint's factory to every server. `shoal_server.shards`
defines what a call changes in a shard. `shoal_server.process` imports this package, and so do packages that add a
transport.
"""

from shoal_server.serving.endpoint import Endpoint, EndpointConfig, EndpointFactory
from shoal_server.serving.lane_endpoint import LaneHandler
from shoal_server.serving.pending_push import PendingPush, stamp_of
from shoal_server.serving.pulls import PendingPull, replies
from shoal_server.serving.pushes import PushSource, from_chunks, from_region
from shoal_server.serving.registry import EndpointGroup, register, unregister
from shoal_server.serving.service import DataService, PushReply, required
from shoal_server.serving.servicer import SERVICE, ParameterServerServicer, add_to_server

__all__ = [
    "SERVICE",
    "DataService",
    "Endpoint",
    "EndpointConfig",
    "EndpointFactory",
    "EndpointGroup",
    "LaneHandler",
    "ParameterServerServicer",
    "PendingPull",
    "PendingPush",
    "PushReply",
    "PushSource",
    "add_to_server",
    "from_chunks",
    "from_region",
    "register",
    "replies",
    "required",
    "stamp_of",
    "unregister",
]
