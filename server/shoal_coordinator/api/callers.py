"""Identities of the callers of the coordinator's RPCs."""

import grpc


def submitter_of(context: grpc.ServicerContext) -> str:  # noqa: ARG001 - calls have no identity yet
    """Returns the name of the user who submits a job by this call; empty if calls have no identity."""
    return ""


__all__ = ["submitter_of"]
