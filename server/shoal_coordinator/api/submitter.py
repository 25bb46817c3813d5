"""The submitter of a job: who the limits of one submitter's jobs count for."""

import grpc


def submitter_of(context: grpc.ServicerContext) -> str:
    """Returns the submitter that a call comes from: its host, such as ipv4:10.0.0.5, because calls have no identity."""
    peer: str = context.peer()
    return peer.rpartition(":")[0]


__all__ = ["submitter_of"]
