"""Identities of the callers of the coordinator's RPCs."""

import grpc


def submitter_of(context: grpc.ServicerContext) -> str:
    """Returns who submits a job by this call: its host, such as ipv4:10.0.0.5, because calls have no identity."""
    peer: str = context.peer()
    return peer.rpartition(":")[0]


__all__ = ["submitter_of"]
