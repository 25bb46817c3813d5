"""gRPC: channels, servers, errors on the wire, retries with backoff, and the client of the coordinator.

In `shoal`, only this package and the generated `v1` import grpc. Users never see types of grpc. `shoal._transport` has
the calls that carry values, over gRPC and over other transports. Roles, clients and the packages of `shoal` in the
layers above this one may import `shoal._rpc`.
"""

import os

# gRPC's own lines would precede our message, and say less. A user who wants them sets GRPC_VERBOSITY to ERROR or INFO.
# gRPC's handlers of forks start its threads again in the child: one child of twenty was aborted by that, such as a
# process that loads data. Sessions and clients refuse to work in a child, so nobody needs these threads.
# gRPC reads the variables when it is loaded; later they would only reach child processes, such as those of a program.
if _unset := [it for it in (("GRPC_VERBOSITY", "NONE"), ("GRPC_ENABLE_FORK_SUPPORT", "0")) if it[0] not in os.environ]:
    os.environ.update(_unset)
    try:
        import grpc  # noqa: F401 - for its effect
    finally:
        for _name, _ in _unset:
            del os.environ[_name]

from shoal._rpc.backoff import Backoff
from shoal._rpc.call_limits import CallLimits
from shoal._rpc.callers import caller, set_caller
from shoal._rpc.calls import LaterReply, host_in
from shoal._rpc.channels import (
    as_shoal_errors,
    channel,
    check_free,
    close_channel,
    detail_of,
    error_from,
    error_metadata,
    error_of,
    is_everywhere,
    listen,
    parse_address,
    public_host,
    reserve,
    retrying,
    status_of,
)
from shoal._rpc.coordinator import CALL_TIMEOUT_S, CoordinatorClient
from shoal._rpc.heartbeat_pace import HeartbeatPace
from shoal._rpc.membership import MembershipClient
from shoal._rpc.outcomes import CallOutcome, OnOutcome
from shoal._rpc.retries import RETRY_TARGETS, Retries, RetryTarget
from shoal._rpc.servers import Deferred, NonBlocking, Pooled, RawMessages, RpcServer, encoded, refuse, servicer
from shoal._rpc.tickets import TicketSource, fetch_ticket
from shoal._rpc.tls_probe import tls_failure

__all__ = [
    "CALL_TIMEOUT_S",
    "RETRY_TARGETS",
    "Backoff",
    "CallLimits",
    "CallOutcome",
    "CoordinatorClient",
    "Deferred",
    "HeartbeatPace",
    "LaterReply",
    "MembershipClient",
    "NonBlocking",
    "OnOutcome",
    "Pooled",
    "RawMessages",
    "Retries",
    "RetryTarget",
    "RpcServer",
    "TicketSource",
    "as_shoal_errors",
    "caller",
    "channel",
    "check_free",
    "close_channel",
    "detail_of",
    "encoded",
    "error_from",
    "error_metadata",
    "error_of",
    "fetch_ticket",
    "host_in",
    "is_everywhere",
    "listen",
    "parse_address",
    "public_host",
    "refuse",
    "reserve",
    "retrying",
    "servicer",
    "set_caller",
    "status_of",
    "tls_failure",
]
