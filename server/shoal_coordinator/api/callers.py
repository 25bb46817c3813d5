"""Identities of the callers of the coordinator's RPCs."""

import grpc

from shoal import _rpc


def submitter_of(context: grpc.ServicerContext) -> str:
    """Returns who submits a job by this call: the name of the caller's token.

    If the cluster asks for no tokens, it is the caller's host, such as ipv4:10.0.0.5.
    """
    if caller := _rpc.caller():
        return caller.name
    peer: str = context.peer()
    return peer.rpartition(":")[0]


__all__ = ["submitter_of"]
