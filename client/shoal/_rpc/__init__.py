"""gRPC: channels and servers, errors over the wire, retries with backoff, and the client of the coordinator.

The one package of `shoal` that imports grpc; its types do not leave it. Which calls carry values, and what else can
carry them, is in `shoal._transport`. Roles, clients and everything above the wire may import it.
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
