"""Identities of the callers of the coordinator's RPCs."""

from dataclasses import replace

import grpc

from shoal import _rpc
from shoal.v1 import coordinator_pb2
from shoal_coordinator.messages import Registration


def submitter_of(context: grpc.ServicerContext) -> str:
    """Returns who submits a job by this call: the name of the caller's token.

    If the cluster asks for no tokens, it is the caller's host, such as ipv4:10.0.0.5.
    """
    if caller := _rpc.caller():
        return caller.name
    peer: str = context.peer()
    return peer.rpartition(":")[0]


def submitter_role() -> str:
    """Returns the access role of the caller, or an empty string if the cluster asks for no tokens."""
    caller = _rpc.caller()
    return caller.role.value if caller else ""


def registration_of(request: coordinator_pb2.RegisterRequest) -> Registration:
    """Returns what a process states about itself, and the name under which it is known. With a name, it has a secret.

    Raises:
        BadRequest: see `Registration`.
    """
    holder = caller_name()
    return replace(Registration.from_proto(request), holder=holder, has_secret=bool(holder))


def caller_name() -> str:
    """Returns the name of the caller's token or certificate, or an empty string if the cluster asks for no tokens."""
    caller = _rpc.caller()
    return caller.name if caller else ""


__all__ = ["caller_name", "registration_of", "submitter_of", "submitter_role"]
