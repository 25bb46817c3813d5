"""gRPC: channels, servers, errors on the wire, retries with backoff, and the client of the coordinator.

It is the only package of `shoal` that imports grpc, and users never see grpc types. `shoal._transport` has the calls
that carry values, and the other transports. Roles, clients and everything above the wire may import this package.
"""

from shoal._rpc.backoff import Backoff
from shoal._rpc.channels import (
    NonBlocking,
    Pooled,
    RawMessages,
    RpcServer,
    as_shoal_errors,
    channel,
    detail_of,
    error_from,
    error_metadata,
    error_of,
    is_everywhere,
    listen,
    parse_address,
    public_host,
    refuse,
    retrying,
    servicer,
    status_of,
)
from shoal._rpc.coordinator import CoordinatorClient, MembershipClient
from shoal._rpc.retries import RETRY_TARGETS, Retries, RetryTarget

__all__ = [
    "RETRY_TARGETS",
    "Backoff",
    "CoordinatorClient",
    "MembershipClient",
    "NonBlocking",
    "Pooled",
    "RawMessages",
    "Retries",
    "RetryTarget",
    "RpcServer",
    "as_shoal_errors",
    "channel",
    "detail_of",
    "error_from",
    "error_metadata",
    "error_of",
    "is_everywhere",
    "listen",
    "parse_address",
    "public_host",
    "refuse",
    "retrying",
    "servicer",
    "status_of",
]
